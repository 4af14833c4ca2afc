"""Launching averages and reading what comes back: the loop's side of the averaging and the communicator."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing, Sums
from prsgd.clocks import Sent, Timekeeper
from prsgd.comm.base import Communicator
from prsgd.errors import DivergedError, MismatchError, PeerError, PrsgdError
from prsgd.flight import Boarding, Flight, Hangar
from prsgd.ledger import Ledger
from prsgd.worker import Worker


class Tower:
    """Every collective of a run goes through here; errors leave it with the round and the worker in their message."""

    def __init__(
        self,
        comm: Communicator,
        averaging: Averaging,
        hangar: Hangar,
        ledger: Ledger,
        workers: Sequence[Worker],
        clock: Timekeeper,
        lr: Callable[[], float],
        *,
        timeout_seconds: float,
        done_timeout_seconds: float,
    ) -> None:
        self._comm, self._averaging = comm, averaging
        self._hangar, self._ledger, self._workers, self._clock = hangar, ledger, workers, clock
        self._lr = lr
        self.apart = False
        """Did the last average have targets that differ by worker?"""
        self._defers = getattr(averaging, "hears_neighbours_only", False)
        """Do records wait until all meet?"""
        self._timeout_seconds, self._done_timeout_seconds = timeout_seconds, done_timeout_seconds

    def launch(self, kind: str = "average", known_bad: tuple[bool, ...] = ()) -> Flight:
        """Start the average of the hosted workers' snapshots; those that are done have theirs taken now."""
        began = time.perf_counter()
        done = [i for i, w in enumerate(self._workers) if w.done]
        for i in done:
            w = self._workers[i]
            w.snap()
            w.period = w.round = None
        boarding = self._hangar.board(capture=done, consensus=False)
        boarding.bad = known_bad or boarding.bad  # rows found bad were zeroed, and look fine the second time
        header = self._header(boarding, kind)
        self._clock.launched(done)
        work = self._averaging.launch(self._comm, boarding.snap, header)
        copied = time.perf_counter()
        return Flight(
            work=work,
            snap=boarding.snap,
            counts=header.counts,
            bad=boarding.bad,
            to_land=set(range(len(self._workers))),
            copy_seconds=copied - began,
        )

    def wait(self, flight: Flight) -> Landing:
        """What came back, as soon as it is there; its header stays unread."""
        if flight.landing is None:
            began = time.perf_counter()
            limit = self._done_timeout_seconds if self._all_done() else self._timeout_seconds
            try:
                flight.landing = flight.work.wait(limit)
            except (PeerError, MismatchError) as error:
                raise self._named(error) from None
            flight.wait_seconds += time.perf_counter() - began - flight.landing.copy_seconds
            flight.copy_seconds += flight.landing.copy_seconds
            flight.flight_seconds = flight.work.flight_seconds()
            if flight.landing.header.sums.workers:  # a last handshake, in which nobody had anything new, is no average
                landing = flight.landing
                sent = Sent(landing.bytes_sent, landing.server_bytes_sent, landing.hops, landing.hears)
                self._clock.arrived(sent, round=self._ledger.round + 1, flight_seconds=flight.flight_seconds)
        return flight.landing

    def arrive(self, flight: Flight) -> Landing:
        """Wait for it, and read its header, once."""
        landing = self.wait(flight)
        if flight.announced:
            return landing
        flight.announced = True
        if landing.target is not None:
            self.apart = landing.target.dim() == 2
        sums = landing.header.sums
        if not landing.shared:
            self._ledger.defer(sums)
            return landing
        if sums.consensus:
            if not self._all_done() or sums.consensus + sums.done < self._comm.num_workers:
                raise self._split(sums)
            flight.to_land.clear()  # another worker's consensus(), which this process only answered
            self._settle()
            return landing
        if sums.bad and not sums.workers:
            if sums.bad == self._comm.num_workers:
                raise self._diverged(sums)
            # Only workers that are done have finite models, and had nothing new to bring: they bring them now.
            rescue = self.launch("rescue", flight.bad)
            landing = flight.landing = self.wait(rescue)
            flight.counts = rescue.counts
        self._settle()
        self._ledger.complete(sums, landing.header.step_seconds or None)
        return landing

    def consensus(self) -> Landing:
        """The exact mean of all workers' models as they are now."""
        boarding = self._hangar.board(capture=(), consensus=True)
        header = self._header(boarding, "consensus")
        try:
            landing = self._averaging.final(self._comm, boarding.snap, header)
        except (PeerError, MismatchError) as error:
            raise self._named(error) from None
        sums = landing.header.sums
        if sums.consensus + sums.done < self._comm.num_workers:
            raise self._split(sums)
        if sums.bad and not sums.workers:
            raise self._diverged(sums)
        self._settle()
        return landing

    def end(self) -> None:
        """All workers are done: one exact mean if their targets differed, and the last average's numbers."""
        try:
            if self.apart:
                boarding = self._hangar.board(capture=(), consensus=True)
                header = self._header(boarding, "rescue")
                exact = self._averaging.final(self._comm, boarding.snap, header)
                if exact.target is not None:
                    for i in range(len(self._workers)):
                        self._hangar.rows.replace(i, exact.target)
            if not self._ledger.is_complete:
                totals = self._summed(self._ledger.numbers())
                self._ledger.complete(Sums(*totals.tolist()))
        except PeerError as error:
            raise self._named(error) from None

    def _settle(self) -> None:
        """All workers meet: sum what they have to tell of the records that wait for it.

        With an overlap, a process may have landed an average that others have in flight: they settle what all have.
        """
        if not self._defers:
            return
        try:
            last = self._agreed(self._ledger.deferred.stop)
            own = self._ledger.own(range(self._ledger.deferred.start, last))
            if own:
                self._ledger.settle([Sums(*row) for row in self._summed(own).tolist()])
        except PeerError as error:
            raise self._named(error) from None

    def _agreed(self, round: int) -> int:
        """The smallest of the processes' numbers, none of which is far from the others'."""
        rounds = [0.0] * self._comm.num_workers
        rounds[self._comm.workers.start] = round
        return int(min(found for found in self._summed(rounds).tolist() if found))

    def _summed(self, numbers: Sequence[Any]) -> Tensor:
        rows = self._hangar.rows
        return self._comm.all_reduce(torch.tensor(numbers, dtype=torch.float64, device=rows.device)).wait(
            self._timeout_seconds
        )

    def _header(self, boarding: Boarding, kind: str) -> Header:
        return self._hangar.header(
            boarding,
            self._workers,
            self._ledger.numbers(),
            round=self._ledger.round,
            step_seconds=self._clock.step_seconds,
            lr=self._lr(),
            kind=kind,
        )

    def _all_done(self) -> bool:
        return all(w.done for w in self._workers)

    def _named(self, error: PrsgdError) -> PrsgdError:
        ids = self._comm.workers
        who = f"worker {ids.start}" if len(ids) == 1 else f"workers {ids.start}-{ids.stop - 1}"
        return type(error)(f"round {self._ledger.round + 1}, {who}: {error}")

    def _diverged(self, sums: Sums) -> DivergedError:
        return DivergedError(
            f"round {self._ledger.round + 1}: no worker has a finite model left to restart from "
            f"({sums.bad:g} are not finite); lower the lr, or clip gradients"
        )

    def _split(self, sums: Sums) -> MismatchError:
        averaged = self._comm.num_workers - sums.consensus - sums.done
        return MismatchError(
            f"round {self._ledger.round + 1}: {sums.consensus:g} of {self._comm.num_workers} workers called "
            f"consensus() while {averaged:g} averaged: all must call it between the same two averages"
        )
