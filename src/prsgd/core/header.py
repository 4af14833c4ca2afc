"""What travels beside the hosted workers' rows: who counts, who is done, the numbers of the last round."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

from torch import Tensor

from prsgd.averaging.base import DIGIT, NOISE_WIDTH, Averaging, Header, Memory, Sums
from prsgd.clocks.base import Timekeeper
from prsgd.comm.base import Communicator
from prsgd.comm.team import Lone, Team
from prsgd.core.books import Books, Page
from prsgd.core.noise import GradientNoise
from prsgd.core.pace import Pace
from prsgd.core.roll import Account, Roll, brought
from prsgd.core.snapshots import Boarded
from prsgd.replicas.buffers import Buffers


@dataclass(frozen=True)
class Told:
    """What the hosted workers tell of themselves, the same in all processes of a worker."""

    bad: tuple[bool, ...]
    """Per hosted worker: is its model not finite?"""
    totals: tuple[float, ...]
    """And the sum of its parameters."""
    marks: tuple[float, ...]
    """And a number that is the same for models that are alike."""
    last: Sums
    """Of the last average and its round: drift, losses, samples."""
    samples: tuple[int, ...]
    """Per hosted worker: since its newest snapshot that an average has seen."""
    step_seconds: tuple[float, ...] = ()
    flights: tuple[float, ...] = ()
    noise: tuple[float, ...] = ()


@dataclass
class Headers:
    """Makes the headers of one lane's averages, from what its other parts know of the hosted workers."""

    comm: Communicator
    averaging: Averaging
    buffers: Buffers
    paces: Sequence[Pace]
    accounts: Sequence[Account]
    roll: Roll
    books: Books
    clock: Timekeeper
    lr: Callable[[], float]
    shares_speed: bool
    hides: bool = False
    """Do all workers tell how long an average took, and their steps, so that the overlap can be chosen?"""
    flights: tuple[float, ...] = ()
    """Per hosted worker: seconds of the last average that steps have to hide; empty: it was told of, or is unknown."""
    told: tuple[float, ...] = ()
    """What all workers told with the last average, if the averaging ``tells``."""
    skipped: Callable[[], int] | None = None
    """Steps that the hosted worker skipped since this was last asked, where the averaging has to know."""
    noise: GradientNoise | None = None
    """How much gradients scatter, where the schedule has to know."""
    team: Team = field(default_factory=Lone)
    """The processes that are a hosted worker together, of which each knows its part."""

    def ask(self, boarded: Boarded, *, look: bool = False) -> Told:
        """What the hosted workers have to tell beside what they brought: once an average, by all processes of each."""
        last, hosted = self.books.numbers(), range(len(self.paces))
        speeds = list(map(self.clock.step_seconds, hosted)) if self.shares_speed or self.hides else []
        flights = [*self.flights, *[0.0] * len(hosted)][: len(hosted)] if self.hides else []
        noise, looks, momentum = self.noise.told() if self.noise is not None and not look else (0.0,) * NOISE_WIDTH
        samples = [
            (page.samples if look else account.snapped_samples) - account.seen_samples
            for account, page in zip(self.accounts, self.books.pages)
        ]
        (drift, noise, *sums), (loss, losses, *counts), (most_looks, fewer, *largest) = self.team.agree(
            parts=[last.drift, noise, *boarded.totals, *boarded.marks],
            sums=[last.loss, last.losses, last.samples, *samples],
            largest=[looks, -looks, *map(float, boarded.bad), *speeds, *flights],
        )
        bad, times, flown = (tuple(largest[n * len(hosted) : (n + 1) * len(hosted)]) for n in range(3))
        if most_looks != -fewer:  # it is not finite in some of its processes
            noise = looks = momentum = 0.0
        return Told(
            bad=tuple(map(bool, bad)),
            totals=tuple(sums[: len(hosted)]),
            marks=tuple(sums[len(hosted) :]),
            last=last._replace(drift=drift, loss=loss, losses=losses, samples=int(counts[0])),
            samples=tuple(map(int, counts[1:])),
            step_seconds=self._by_id(times) if speeds else (),
            flights=self._by_id(flown) if self.hides else (),
            noise=() if self.noise is None else (noise, looks, momentum),
        )

    def last(self) -> Sums:
        """The last average's numbers alone, which travel with no other."""
        last = self.books.numbers()
        (drift,), (loss, losses, samples), _ = self.team.agree(
            parts=[last.drift], sums=[last.loss, last.losses, last.samples]
        )
        return last._replace(drift=drift, loss=loss, losses=losses, samples=int(samples))

    def make(
        self, boarded: Boarded, told: Told, memory: Memory, *, look: bool = False, everybody: bool = False
    ) -> Header:
        """Of the hosted workers' snapshots and what they ``told``, or in a look of their models as they are;
        ``everybody`` counts, with news or without. ``memory`` is the averaging's."""
        bring, answering = [], 0
        for account, pace, samples, bad, done in zip(self.accounts, self.paces, told.samples, told.bad, self.roll.done):
            answers = done and not pace.boards
            answering += answers
            at = pace.steps if look or pace.snap is None else pace.snap.at
            bring.append(brought(account, at=at, samples=samples, bad=bad, answers=answers, everybody=everybody))
        counts, pools, steps, samples_of_round = zip(*((b.counts, b.pools, b.steps, b.samples) for b in bring))
        running = len(bring) - answering
        changes = self.averaging.measure(memory, boarded.snap)
        mark, other_mark = _marks([mark for mark, count in zip(told.marks, counts) if count])
        header = Header(
            sums=told.last._replace(
                saved=running * self.books.saves,
                workers=sum(counts),
                done=0 if look else answering,
                bad=sum(told.bad),
                consensus=len(bring) if look else 0,
                lr=self.lr() * running,
                mark=mark,
                other_mark=other_mark,
            ),
            exact=self._exact(boarded, pools),
            extras=boarded.extras,
            counts=counts,
            bad=told.bad,
            steps=steps,
            samples=samples_of_round,
            step_seconds=told.step_seconds,
            flights=told.flights,
            noise=told.noise,
            workers=tuple(self.roll.ids),
            losses=tuple([partial(self._loss, page) for page in self.books.pages]),
            told=self.told,
            changes=tuple([cache(partial(self._change, change)) for change in changes]),
            whole_length=self._whole_length,
            flat=boarded.flat,
        )
        if self.averaging.tells:
            weighed = header.brought
            header = replace(header, tells=self._by_id(map(self.averaging.tell, weighed)))
            trusted = tuple(pool and not self.averaging.distrusts(b) for pool, b in zip(pools, weighed))
            if trusted != pools:
                header = replace(header, exact=self._exact(boarded, trusted))
        if self.skipped is not None and not look:
            header = replace(header, skipped=(self.skipped(),))
        return header

    def _exact(self, boarded: Boarded, counts: Sequence[bool]) -> Tensor:
        """What is summed over all processes of all workers."""
        return self.team.sum(self.buffers.sums(boarded.buffers, counts))

    def _loss(self, page: Page) -> float | None:
        """A hosted worker's mean loss of its round, for its weight."""
        _, (loss, losses), _ = self.team.agree(sums=page.losses_of_round())
        return loss / losses if losses else None

    def _change(self, change: Callable[[], float | None]) -> float | None:
        """How far a hosted worker's model is from where all last agreed."""
        length = change()
        return length if length is None else self._whole_length(length)

    def _whole_length(self, length: float) -> float:
        """Of a row of whole models."""
        if self.team.size == 1:  # to the last bit
            return length
        (square,), _, _ = self.team.agree(parts=[length * length])
        return math.sqrt(square)

    def _by_id(self, numbers: Iterable[float]) -> tuple[float, ...]:
        """The hosted workers' numbers among all workers'."""
        found = [0.0] * self.comm.num_workers
        for id, number in zip(self.roll.ids, numbers):
            found[id] = number
        return tuple(found)


def _marks(marks: Sequence[float]) -> tuple[float, float]:
    """Those of models, added up; -1 if they are not alike."""
    if len(set(marks)) > 1:
        return -1.0, -1.0
    low = high = 0
    for number in marks:
        mark = zlib.crc32(struct.pack("d", number))
        low, high = low + mark % DIGIT, high + mark // DIGIT % DIGIT
    return float(low), float(high)
