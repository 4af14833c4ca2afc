"""Where all workers stand still: to look (``consensus()``), to end, or because a model is not finite.

One exact mean is taken by the one function that sums, whatever the averaging. No averaging knows of any of this.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from prsgd._warn import warn
from prsgd.averaging.base import Landing, Sums
from prsgd.averaging.summed import summed
from prsgd.core.average import Average, Averages
from prsgd.errors import DivergedError, MismatchError, UsageError
from prsgd.records import Record

THROWN = 1e6
"""So many times larger than any other's is a model that must have thrown the others off."""
SETTLE_EVERY = 1024
"""Averages with neighbours only, after which all workers meet to sum what records wait for."""


class Meeting:
    """What the averages of a lane come to."""

    def __init__(self, averages: Averages) -> None:
        self._averages, self._books, self._comm = averages, averages.books, averages.comm

    def arrive(self, average: Average) -> Landing:
        """Wait for it, and read its header, once: was it an average, the last one, or another's ``consensus()``?"""
        averages = self._averages
        landing = averages.wait(average)
        if average.announced:
            return landing
        average.announced = True
        if average.is_look or average.is_last:
            average.landing = landing = self._met(landing, look=False)
            if average.is_look:
                average.counts = (False,) * len(average.counts)
                average.to_land.clear()
                self._settle()
                return landing
            if averages.apart:
                average.counts = tuple(not bad for bad in average.bad)
            averages.apart = False
        else:
            average.landing, averages.apart = self._rescued(landing, look=False), self._apart_after(landing)
            landing = average.landing
            if landing.target is None and landing.header.sums.workers and any(landing.header.steps):
                warn(
                    f"round {self._books.number}: the weights of all workers are 0 (or so small that float32 knows "
                    "none), so nothing was averaged",
                    RuntimeWarning,
                )
        averages.leave_out(average)
        averages.note(average)
        sums = landing.header.sums
        if not landing.shared:
            self._books.defer(sums)
            if (self._books.round + 1) % SETTLE_EVERY == 0:
                self._settle()
            return landing
        self._settle()
        self._learn(self._books.complete(sums, landing.header.step_seconds or None), average)
        if averages.hiding is not None:
            averages.hiding.hear(landing.header.flights, landing.header.step_seconds)
        self._check_saved(sums, average.own)
        return landing

    def _learn(self, record: Record | None, average: Average) -> None:
        """Show the schedule the record that this average has completed, with nothing in it that it may go by and that
        is another in another process."""
        averages = self._averages
        then, averages.mean_lr = averages.mean_lr, average.arrived.header.sums.mean_lr(average.members)
        if averages.headers.noise is not None:
            averages.headers.noise.heard()
        if record is not None and averages.learns is not None:
            now = then if average.is_last else averages.mean_lr  # nobody tells it where all have run out of data
            record = record if record.lr == then else replace(record, lr=then)
            averages.learned = averages.learns.learn(averages.learned, record, now)

    def look(self) -> Landing:
        """The exact mean of all workers' models as they are now; an average in flight has arrived."""
        averages = self._averages
        boarded = averages.snapshots.board(as_they_are=True)
        with averages.named():
            told = averages.headers.ask(boarded, look=True)
            header = averages.headers.make(boarded, told, averages.memory, look=True)
            work = averages.averaging.launch(averages.memory, self._comm, boarded.snap, header)
            landing = self._met(work.wait(averages.patience.longest_seconds), look=True)
        self._settle()
        return landing

    def end(self) -> None:
        """All workers are done: the last average's numbers, and a look whether all have the same model indeed."""
        with self._averages.named():
            if not self._books.is_complete:
                totals = self._summed([self._averages.headers.last().packed()])
                record = self._books.complete(Sums.unpacked(totals[0].tolist()))
                if record is not None and self._averages.learns is not None:
                    self._averages.learned = self._averages.learns.cut_short(self._averages.learned, record.round)
            if len(self._comm.members) > 1:
                self._compare()

    def _met(self, landing: Landing, *, look: bool) -> Landing:
        """All workers stand still, to look or to end: the exact mean of their models is the target.

        Where their last targets differed each counts, with news or without.
        """
        self._require_all(landing.header.sums)
        if self._averages.apart or (landing.exact is None and landing.header.sums.workers):
            landing = self._sum(look=look, everybody=self._averages.apart).beside(landing)
            self._require_all(landing.header.sums)
        else:
            landing = replace(landing, target=landing.exact)
        return self._rescued(landing, look=look)

    def _rescued(self, landing: Landing, *, look: bool) -> Landing:
        """Where nobody who counts has a finite model, those that had nothing new to bring bring theirs now."""
        sums = landing.header.sums
        if landing.target is not None or not sums.bad:
            return landing
        if sums.bad == len(self._comm.members):
            raise self._diverged(sums)
        header = replace(landing.header, exact=landing.header.exact.clone())  # lies where the next sum will
        found = self._sum(look=look, everybody=True, alike=True)
        sums = header.sums._replace(workers=found.header.sums.workers)
        header = replace(header, extras=found.header.extras, sums=sums)
        return replace(landing, target=found.target, exact=found.target, header=header).beside(found)

    def _sum(self, *, look: bool, everybody: bool, alike: bool = False) -> Landing:
        """One exact mean of what was boarded before; ``alike``: all weigh the same, whatever they have done."""
        averages = self._averages
        boarded = averages.snapshots.board(as_they_are=look)
        with averages.named():
            told = averages.headers.ask(boarded, look=look)
            header = averages.headers.make(boarded, told, averages.memory, look=look, everybody=everybody)
            weights = None if alike else averages.averaging.weigh(header)
            return summed(self._comm, boarded.snap, header, weights).wait(averages.limit_seconds)

    def _apart_after(self, landing: Landing) -> bool:
        """Do the workers keep apart after this average?"""
        if landing.target is None:
            return self._averages.apart and not landing.header.sums.bad  # a rescue gives all the same
        return landing.target.dim() == 2

    def _compare(self) -> None:
        """Mend what no step tells of: models that were changed after their last average, or by unseen updates."""
        averages, rows = self._averages, self._averages.snapshots.rows
        hosted = range(len(averages.paces))
        digests = torch.stack([rows.digest(i) for i in hosted])
        found = self._comm.all_gather(digests).wait(averages.patience.longest_seconds)
        _, _, (differ,) = self._averages.headers.team.agree(largest=[float(bool((found != found[0]).any()))])
        if not differ:
            return
        steps = self._summed([float(sum(pace.steps for pace in averages.paces))])
        if not steps.item():
            raise UsageError(
                "the models were changed, but no optimizer.step() was seen, so nothing was averaged: LocalSGD must be "
                "given the optimizer whose step() is called (not one that updates by other methods, as SAM's "
                "first_step and second_step do: hook its base_optimizer), and of several the last one's step counts"
            )
        exact = self._sum(look=True, everybody=True, alike=True)
        if exact.target is None:
            raise self._diverged(exact.header.sums)
        for i in hosted:
            rows.replace(i, exact.target)

    def _settle(self) -> None:
        """All workers meet: sum what they have to tell of the records that wait for it.

        With an overlap, a process may have landed an average that others have in flight: they settle what all have.
        """
        if not self._averages.averaging.hears_neighbours_only:
            return
        with self._averages.named():
            last = self._agreed(self._books.deferred.stop)
            own = self._books.own(range(self._books.deferred.start, last))
            if own:
                found = self._summed([sums.packed() for sums in own]).tolist()
                self._books.settle([Sums.unpacked(row) for row in found])

    def _agreed(self, round: int) -> int:
        """The smallest of the processes' numbers, none of which is far from the others'."""
        rounds = [0.0] * len(self._comm.members)
        rounds[self._comm.workers.start] = round
        return int(min(found for found in self._summed(rounds).tolist() if found))

    def _summed(self, numbers: Sequence[Any]) -> Tensor:
        flat = torch.tensor(numbers, dtype=torch.float64, device=self._averages.snapshots.rows.device)
        return self._comm.all_reduce(flat).wait(self._averages.limit_seconds)

    def _require_all(self, sums: Sums) -> None:
        """A consensus is one to which all workers have come that are not done."""
        members = len(self._comm.members)
        if not sums.consensus or sums.consensus + sums.done >= members:
            return
        averaged = members - sums.consensus - sums.done
        raise MismatchError(
            f"round {self._books.number}: {sums.consensus:g} of {members} workers called "
            f"consensus() while {averaged:g} averaged: every worker must call it, not worker 0 alone, and between the "
            "same two averages; where workers take different steps or have different numbers of batches call it by "
            "local.launched, pad the sampler, or put each epoch into `with local.epoch():` and call it after that"
        )

    def _check_saved(self, sums: Sums, own: Sums) -> None:
        """``own``: what this process told with it."""
        running = len(self._comm.members) - sums.done
        hosted = len(self._averages.paces) - own.done
        if hosted and sums.saved * hosted != own.saved * running:
            warn(
                f"round {self._books.number}: not all workers saved a state equally often since the last average "
                f"({own.saved / hosted:g} times here, {sums.saved / running:.3g} in the mean): states fit together "
                "only if all are taken between the same two averages, so save by local.launched, not by local.step",
                RuntimeWarning,
            )

    def _diverged(self, sums: Sums) -> DivergedError:
        return DivergedError(
            f"round {self._books.number}: no worker has a finite model left to restart from "
            f"({sums.bad:g} are not finite); {self._thrower() or 'lower the lr, or clip gradients'}"
        )

    def _thrower(self) -> str:
        """Did one worker throw all others off? Its model, finite but huge, was part of the mean that all took."""
        found = [0.0] * self._comm.num_workers  # by id, also where some are gone
        for id, total in zip(self._averages.roll.ids, self._averages.totals_before):
            found[id] = min(abs(total), sys.float_info.max / len(found)) if total == total else math.inf
        sizes = [abs(total) for total in self._summed(found).tolist()]
        largest, *others = sorted(sizes, reverse=True)
        if not others or largest <= THROWN * max(*others, 1.0):
            return ""
        return (
            f"in the average before, the numbers of worker {sizes.index(largest)}'s model added up to {largest:.2g} "
            f"and those of no other to more than {others[0]:.2g}: mean(weights=prsgd.steady()) leaves such a worker out"
        )
