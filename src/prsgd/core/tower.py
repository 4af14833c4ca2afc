"""Launching averages and reading what comes back: the loop's side of the averaging and the communicator."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing, Memory, Sums
from prsgd.averaging.summed import summed
from prsgd.clocks.base import Sent, Timekeeper
from prsgd.comm.base import Communicator
from prsgd.core.books import Ledger
from prsgd.core.flight import Boarding, Flight, Hangar
from prsgd.core.worker import Worker
from prsgd.errors import DivergedError, MismatchError, PeerError, UsageError

SETTLE_EVERY = 1024
"""Averages with neighbours only, after which all workers meet to sum what records wait for."""


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
        self.memory: Memory = {}
        """What the averaging remembers."""
        self.apart = False
        """Did the last average have targets that differ by worker?"""
        self.passes: tuple[int, ...] = ()
        """Gradients that each hosted worker computed since the last average, where the averaging asks."""
        self._timeout_seconds, self._done_timeout_seconds = timeout_seconds, done_timeout_seconds

    def launch(self) -> Flight:
        """Start the average of the hosted workers' snapshots; those that are done have theirs taken now."""
        began = time.perf_counter()
        done = [i for i, w in enumerate(self._workers) if w.answers]
        for i in done:
            w = self._workers[i]
            w.snap()
            w.period = w.round = None
        boarding = self._hangar.board(capture=done, consensus=False)
        header = self._header(boarding)
        self._clock.launched(done)
        with self._naming():
            work = self._averaging.launch(self.memory, self._comm, boarding.snap, header)
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
            with self._naming():
                flight.landing = flight.work.wait(self._limit())
            flight.wait_seconds += time.perf_counter() - began - flight.landing.copy_seconds
            flight.copy_seconds += flight.landing.copy_seconds
            flight.flight_seconds = flight.work.flight_seconds()
        return flight.landing

    def arrive(self, flight: Flight) -> Landing:
        """Wait for it, and read its header, once: was it an average, the last one, or another's ``consensus()``?"""
        landing = self.wait(flight)
        if flight.announced:
            return landing
        flight.announced = True
        sums = landing.header.sums
        if sums.consensus or sums.done == self._comm.num_workers:
            landing = self._met(landing, consensus=False)
            sums = landing.header.sums
            if sums.consensus:  # another worker's consensus(), which this process only answered
                flight.landing, flight.counts = landing, (False,) * len(self._workers)
                flight.to_land.clear()
                self._settle()
                return landing
            if self.apart:
                flight.counts = tuple(not bad for bad in flight.bad)
            self.apart = False
        else:
            landing, self.apart = self._rescued(landing, consensus=False), self._apart_after(landing)
            sums = landing.header.sums
            if landing.memory is not None:
                self.memory = landing.memory
        flight.landing = landing
        if sums.workers:  # a last handshake, in which nobody had anything new, is no average
            sent = Sent(landing.bytes_sent, landing.server_bytes_sent, landing.hops, landing.hears)
            self._clock.arrived(sent, round=self._ledger.round + 1, flight_seconds=flight.flight_seconds)
        if not landing.shared:
            self._ledger.defer(sums)
            if (self._ledger.round + 1) % SETTLE_EVERY == 0:
                self._settle()
            return landing
        self._settle()
        self._ledger.complete(sums, landing.header.step_seconds or None)
        self._check_saved(sums)
        return landing

    def consensus(self) -> Landing:
        """The exact mean of all workers' models as they are now; an average in flight has arrived."""
        boarding = self._hangar.board(capture=(), consensus=True)
        header = self._header(boarding, consensus=True)
        with self._naming():
            work = self._averaging.launch(self.memory, self._comm, boarding.snap, header)
            landing = self._met(work.wait(self._timeout_seconds), consensus=True)
        self._settle()
        return landing

    def end(self) -> None:
        """All workers are done: the last average's numbers, and a look whether all have the same model indeed."""
        with self._naming():
            if not self._ledger.is_complete:
                totals = self._summed([self._ledger.numbers().packed()])
                self._ledger.complete(Sums.unpacked(totals[0].tolist()))
            if self._comm.num_workers > 1:
                self._compare()

    def _met(self, landing: Landing, *, consensus: bool) -> Landing:
        """All workers stand still, to look or to end: the exact mean of their models is the target.

        Where their last targets differed each counts, with news or without.
        """
        self._require_all(landing.header.sums)
        if self.apart or (landing.exact is None and landing.header.sums.workers):
            landing = self._sum(consensus=consensus, everybody=self.apart).beside(landing)
            self._require_all(landing.header.sums)
        else:
            landing = replace(landing, target=landing.exact)
        return self._rescued(landing, consensus=consensus)

    def _rescued(self, landing: Landing, *, consensus: bool) -> Landing:
        """Where nobody who counts has a finite model, those that had nothing new to bring bring theirs now."""
        sums = landing.header.sums
        if landing.target is not None or not sums.bad:
            return landing
        if sums.bad == self._comm.num_workers:
            raise self._diverged(sums)
        header = replace(landing.header, exact=landing.header.exact.clone())  # lies where the next sum will
        found = self._sum(consensus=consensus, everybody=True, alike=True)
        sums = header.sums._replace(workers=found.header.sums.workers)
        header = replace(header, extras=found.header.extras, sums=sums)
        return replace(landing, target=found.target, exact=found.target, header=header).beside(found)

    def _sum(self, *, consensus: bool, everybody: bool, alike: bool = False) -> Landing:
        """One exact mean of what was boarded before; ``alike``: all weigh the same, whatever they have done."""
        boarding = self._hangar.board(capture=(), consensus=consensus)
        header = self._header(boarding, consensus=consensus, everybody=everybody)
        weights = None if alike else self._averaging.weigh(header)
        with self._naming():
            return summed(self._comm, boarding.snap, header, weights).wait(self._limit())

    def _apart_after(self, landing: Landing) -> bool:
        """Do the workers keep apart after this average?"""
        if landing.target is None:
            return self.apart and not landing.header.sums.bad  # a rescue gives all the same
        return landing.target.dim() == 2

    def _compare(self) -> None:
        """Mend what no step tells of: models that were changed after their last average, or by unseen updates."""
        rows = self._hangar.rows
        digests = torch.stack([rows.digest(i) for i in range(len(self._workers))])
        found = self._comm.all_gather(digests).wait(self._timeout_seconds)
        if bool((found == found[0]).all()):
            return
        steps = self._summed([float(sum(w.steps for w in self._workers))])
        if not steps.item():
            raise UsageError(
                "the models were changed, but no optimizer.step() was seen, so nothing was averaged: LocalSGD must be "
                "given the optimizer whose step() is called (not one that updates by other methods, as SAM's "
                "first_step and second_step do: hook its base_optimizer)"
            )
        exact = self._sum(consensus=True, everybody=True, alike=True)
        if exact.target is None:
            raise self._diverged(exact.header.sums)
        for i in range(len(self._workers)):
            rows.replace(i, exact.target)

    def _settle(self) -> None:
        """All workers meet: sum what they have to tell of the records that wait for it.

        With an overlap, a process may have landed an average that others have in flight: they settle what all have.
        """
        if not self._averaging.hears_neighbours_only:
            return
        with self._naming():
            last = self._agreed(self._ledger.deferred.stop)
            own = self._ledger.own(range(self._ledger.deferred.start, last))
            if own:
                found = self._summed([sums.packed() for sums in own]).tolist()
                self._ledger.settle([Sums.unpacked(row) for row in found])

    def _agreed(self, round: int) -> int:
        """The smallest of the processes' numbers, none of which is far from the others'."""
        rounds = [0.0] * self._comm.num_workers
        rounds[self._comm.workers.start] = round
        return int(min(found for found in self._summed(rounds).tolist() if found))

    def _summed(self, numbers: Sequence[Any]) -> Tensor:
        device = self._hangar.rows.device
        return self._comm.all_reduce(torch.tensor(numbers, dtype=torch.float64, device=device)).wait(self._limit())

    def _header(self, boarding: Boarding, *, consensus: bool = False, everybody: bool = False) -> Header:
        return self._hangar.header(
            boarding,
            self._workers,
            self._ledger.numbers(),
            step_seconds=self._clock.step_seconds,
            lr=self._lr(),
            consensus=consensus,
            everybody=everybody,
            passes=self.passes,
        )

    def _all_done(self) -> bool:
        return all(w.done for w in self._workers)

    def _limit(self) -> float:
        return self._done_timeout_seconds if self._all_done() else self._timeout_seconds

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Errors leave with the round and the worker in front."""
        try:
            yield
        except (PeerError, MismatchError) as error:
            if str(error).startswith("round "):
                raise
            ids = self._comm.workers
            who = f"worker {ids.start}" if len(ids) == 1 else f"workers {ids.start}-{ids.stop - 1}"
            raise type(error)(f"round {self._ledger.round + 1}, {who}: {error}") from None

    def _require_all(self, sums: Sums) -> None:
        """A consensus is one to which all workers have come that are not done."""
        if not sums.consensus or sums.consensus + sums.done >= self._comm.num_workers:
            return
        averaged = self._comm.num_workers - sums.consensus - sums.done
        raise MismatchError(
            f"round {self._ledger.round + 1}: {sums.consensus:g} of {self._comm.num_workers} workers called "
            f"consensus() while {averaged:g} averaged: every worker must call it, not worker 0 alone, and between the "
            "same two averages; where workers have different numbers of batches call it by local.round, pad the "
            "sampler, or put each epoch into `with local.epoch():` and call it after that"
        )

    def _check_saved(self, sums: Sums) -> None:
        expected = self._comm.num_workers - sums.done
        if 0 < sums.saved < expected:
            warnings.warn(
                f"round {self._ledger.round}: {sums.saved:g} of {expected:g} workers saved a state since the last "
                "average: states fit together only if all are taken between the same two averages, so save by "
                "local.launched instead of local.step",
                RuntimeWarning,
                stacklevel=2,
            )

    def _diverged(self, sums: Sums) -> DivergedError:
        return DivergedError(
            f"round {self._ledger.round + 1}: no worker has a finite model left to restart from "
            f"({sums.bad:g} are not finite); lower the lr, or clip gradients"
        )
