"""What travels beside the hosted workers' rows: who counts, who is done, the numbers of the last round."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from prsgd.averaging.base import DIGIT, NOISE_WIDTH, Averaging, Header, Memory
from prsgd.clocks.base import Timekeeper
from prsgd.comm.base import Communicator
from prsgd.core.books import Books
from prsgd.core.noise import GradientNoise
from prsgd.core.pace import Pace
from prsgd.core.roll import Account, Roll, brought
from prsgd.core.snapshots import Boarded
from prsgd.replicas.buffers import Buffers


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

    def make(self, boarded: Boarded, memory: Memory, *, look: bool = False, everybody: bool = False) -> Header:
        """Of the hosted workers' snapshots, or in a look of their models as they are; ``everybody`` counts, with news
        or without. ``memory`` is the averaging's."""
        bring, answering = [], 0
        each = zip(self.accounts, self.paces, self.books.pages, boarded.bad, self.roll.done)
        for account, pace, page, bad, done in each:
            answers = done and not pace.boards
            answering += answers
            at = pace.steps if look or pace.snap is None else pace.snap.at
            samples = page.samples if look else account.snapped_samples
            bring.append(brought(account, at=at, samples=samples, bad=bad, answers=answers, everybody=everybody))
        counts, pools, steps, samples_of_round = zip(*((b.counts, b.pools, b.steps, b.samples) for b in bring))
        running = len(bring) - answering
        times = self._by_id(map(self.clock.step_seconds, range(len(bring)))) if self.shares_speed or self.hides else ()
        mark, other_mark = _marks([total for total, count in zip(boarded.totals, counts) if count])
        header = Header(
            sums=self.books.numbers(
                running,
                workers=sum(counts),
                done=0 if look else answering,
                bad=sum(boarded.bad),
                consensus=len(bring) if look else 0,
                lr=self.lr() * running,
                mark=mark,
                other_mark=other_mark,
            ),
            exact=self.buffers.sums(boarded.buffers, pools),
            extras=boarded.extras,
            counts=counts,
            bad=boarded.bad,
            steps=steps,
            samples=samples_of_round,
            step_seconds=times,
            flights=self._by_id(self.flights) if self.hides else (),
            noise=() if self.noise is None else (0.0,) * NOISE_WIDTH if look else self.noise.told(),
            workers=tuple(self.roll.ids),
            losses=tuple([page.loss_of_round for page in self.books.pages]),
            told=self.told,
            changes=self.averaging.measure(memory, boarded.snap),
            flat=boarded.flat,
        )
        if self.averaging.tells:
            weighed = header.brought
            header = replace(header, tells=self._by_id(map(self.averaging.tell, weighed)))
            trusted = tuple(pool and not self.averaging.distrusts(b) for pool, b in zip(pools, weighed))
            if trusted != pools:
                header = replace(header, exact=self.buffers.sums(boarded.buffers, trusted))
        if self.skipped is not None and not look:
            header = replace(header, skipped=(self.skipped(),))
        return header

    def _by_id(self, numbers: Iterable[float]) -> tuple[float, ...]:
        """The hosted workers' numbers among all workers'."""
        found = [0.0] * self.comm.num_workers
        for id, number in zip(self.roll.ids, numbers):
            found[id] = number
        return tuple(found)


def _marks(totals: Sequence[float]) -> tuple[float, float]:
    """Of models with these sums, added up; -1 if they are not alike."""
    if len(set(totals)) > 1:
        return -1.0, -1.0
    low = high = 0
    for total in totals:
        mark = zlib.crc32(struct.pack("d", total))
        low, high = low + mark % DIGIT, high + mark // DIGIT % DIGIT
    return float(low), float(high)
