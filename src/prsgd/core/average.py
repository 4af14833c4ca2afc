"""One average: snapshots -> collective -> landing.

``Averages`` launches them and reads what comes back; an ``Average`` is one under way. A landing is
``x_i += target_i - snap_i``, or the target itself where nothing has moved x_i since the snapshot.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prsgd._warn import warn
from prsgd.averaging.base import NOISE_WIDTH, Averaging, Landing, Memory, Sums
from prsgd.clocks.base import Sent, Timekeeper
from prsgd.comm.base import Communicator, Missed, Work
from prsgd.core.books import Books
from prsgd.core.header import Headers
from prsgd.core.hiding import Hiding
from prsgd.core.pace import Landed, Pace
from prsgd.core.patience import Patience
from prsgd.core.roll import Account, Roll
from prsgd.core.snapshots import Snapshots
from prsgd.errors import AverageTimeout, DivergedError, MismatchError, PeerError
from prsgd.records import Modelled, Record
from prsgd.replicas.rows import subtract_from
from prsgd.schedules.base import Learns


@dataclass
class Average:
    """An average that was launched."""

    work: Work[Landing]
    again: Callable[[], Work[Landing]]
    """Launches it again with what the averaging remembers by then."""
    own: Sums
    """What the hosted workers told with it."""
    snap: Tensor
    """(n, P), as launched; with overlap it becomes target - snap, worker by worker, as they land."""
    members: int
    """How many workers it is of."""
    who: tuple[int, ...] | None
    """Their ids, where workers come and go."""
    counts: tuple[bool, ...]
    bad: tuple[bool, ...]
    """Whose models are not finite, or were left out: they take the target itself."""
    to_land: set[int]
    """Hosted workers, by place, on which it has not landed."""
    number: int = 1
    """Among those of its lane."""
    landing: Landing | None = None
    """What came back, once somebody waited for it."""
    announced: bool = False
    """Its header was read."""
    missed: bool = False
    """Is it another than this worker called for, which the others had gone on without?"""
    outliers: tuple[int, ...] = ()
    """The ids of those of all workers that the averaging left out, as its header tells."""
    step: int = 0
    period: int = 0
    overlap: int = 0
    reason: str = ""
    wait_seconds: float = 0.0
    copy_seconds: float = 0.0
    flight_seconds: float = 0.0
    drift: float = 0.0
    drifts: int = 0
    pooled: tuple[Tensor, Tensor] | None = None
    """All workers' buffers, once somebody needed them."""

    @property
    def arrived(self) -> Landing:
        assert self.landing is not None
        return self.landing

    @property
    def is_last(self) -> bool:
        """Were all workers done?"""
        assert self.landing is not None
        return self.landing.header.sums.done == self.members

    @property
    def ends_it(self) -> bool:
        """Were all others done when this worker came back? Then it has ended with them."""
        return self.missed and self.is_last

    def gives_up(self, i: int) -> bool:
        """Does hosted worker i take the target itself, whatever it has done since its snapshot?"""
        return self.bad[i] or self.ends_it

    @property
    def is_look(self) -> bool:
        """Was it another worker's ``consensus()``, which this process answered?"""
        assert self.landing is not None
        return self.landing.header.sums.consensus > 0

    @property
    def brought_news(self) -> bool:
        """A last handshake, in which nobody had anything new, is no average."""
        assert self.landing is not None
        return self.landing.header.sums.workers > 0

    def came_down(self, landed: Landed) -> None:
        """On one of the hosted workers."""
        self.step, self.period = max(self.step, landed.step), max(self.period, landed.period)
        if landed.reason and (landed.overlap > self.overlap or not self.reason):  # of whom the record has the overlap
            self.reason = landed.reason
        self.overlap = max(self.overlap, landed.overlap)

    def record(self, *, round: int, fragment: int | None, lr: float, modelled: Modelled | None) -> Record:
        """What is known of it here; the numbers of all processes come with the next one."""
        landing = self.arrived
        sums, (noise, looks, momentum) = landing.header.sums, landing.header.noise or (0.0,) * NOISE_WIDTH
        return Record(
            round=round,
            step=self.step,
            period=self.period,
            overlap=self.overlap,
            workers=int(sums.workers) - len(self.outliers),
            members=self.who,
            bad_workers=int(sums.bad),
            outliers=len(self.outliers),
            bytes_sent=landing.bytes_sent,
            server_bytes_sent=landing.server_bytes_sent,
            hops=landing.hops,
            wait_seconds=self.wait_seconds,
            copy_seconds=self.copy_seconds,
            flight_seconds=self.flight_seconds,
            lr=lr,
            drift=None,
            loss=None,
            samples=0,
            noise=_mean(noise, looks),
            momentum=None if momentum < 0 else _mean(momentum, looks),
            reason=self.reason,
            modelled=modelled,
            fragment=fragment,
        )


def _ignore(state: Mapping[str, Any]) -> None:
    """Nobody has told anything."""


def _mean(total: float, count: float) -> float | None:
    return total / count if count and math.isfinite(total) else None


@dataclass
class Averages:
    """The averages of one lane. Errors leave with the round and the worker in their message."""

    comm: Communicator
    averaging: Averaging
    snapshots: Snapshots
    optimizer_state: str
    paces: Sequence[Pace]
    accounts: Sequence[Account]
    roll: Roll
    books: Books
    clock: Timekeeper
    headers: Headers
    patience: Patience
    done_timeout_seconds: float
    memory: Memory
    """What the averaging remembers."""
    apart: bool = False
    """Did the last average have targets that differ by worker?"""
    learns: Learns | None = None
    """The schedule, if it goes by records; and what it has learned."""
    learned: Mapping[str, float] = field(default_factory=dict)
    hiding: Hiding | None = None
    """Chooses the overlap; None: it was given."""
    tell: Callable[[], Mapping[str, Any]] = dict
    """What a worker is told that comes in with an average, and what one does that is told."""
    hear: Callable[[Mapping[str, Any]], None] = _ignore
    mean_lr: float = 0.0
    """Of all workers with data, at the newest average that has arrived."""
    named_outliers: set[int] = field(default_factory=set)
    """Workers that were warned of."""
    totals: tuple[float, ...] = ()
    """Per hosted worker: what the numbers of its model added up to in the newest average, and in the one before that; 0
    where they were not finite."""
    totals_before: tuple[float, ...] = ()
    given: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By hosted worker whose model was replaced: the buffers that it was given, while other fragments of it are not."""
    done: float = 0.0
    """How many workers had run out of data at the newest average whose header was read."""

    def launch(self, answering: Sequence[int]) -> Average:
        """Start the average of the hosted workers' snapshots; those that answer have theirs taken now."""
        began = time.perf_counter()
        boarded = self.snapshots.board()
        with self.named():
            told = self.headers.ask(boarded)
            header = self.headers.make(boarded, told, self.memory)
        self.clock.launched(answering)
        self.totals_before = self.totals
        self.totals = tuple(0.0 if bad else total for bad, total in zip(told.bad, told.totals))
        self.comm.invite(self.tell)

        def start() -> Work[Landing]:
            with self.named():
                return self.averaging.launch(self.memory, self.comm, boarded.snap, header)

        return Average(
            work=start(),
            again=start,
            own=header.sums,
            snap=boarded.snap,
            members=len(self.comm.members),
            who=None,
            counts=header.counts,
            bad=told.bad,
            to_land=set(range(len(self.paces))),
            number=self.snapshots.number,
            copy_seconds=self.snapshots.take_seconds() + time.perf_counter() - began,
        )

    def wait(self, average: Average) -> Landing:
        """What came back, as soon as it is there; its header stays unread."""
        if average.landing is None:
            began = time.perf_counter()
            with self.named():
                average.landing = self._waited(average)
            average.members = len(self.comm.members)
            average.who = tuple(self.comm.members) if self.comm.is_elastic else None
            average.wait_seconds += time.perf_counter() - began - average.landing.copy_seconds
            average.copy_seconds += average.landing.copy_seconds
            average.flight_seconds = average.work.flight_seconds()
            self.patience.arrived()
        return average.landing

    def _waited(self, average: Average) -> Landing:
        try:
            return average.work.wait(self.limit_seconds)
        except Missed as missed:
            self.hear(missed.state)
            average.missed = True
            average.counts = (False,) * len(average.counts)
            average.work = average.again()
            return average.work.wait(self.limit_seconds)
        except AverageTimeout as error:
            raise error if self.roll.all_done else self.patience.explain(error) from None

    def note(self, average: Average) -> None:
        """It was an average: keep what the averaging remembers of it, and tell the clock."""
        landing = average.arrived
        self.snapshots.number += 1
        if average.is_last:
            if landing.target is not None:  # it lies where the next sum will
                self.memory = self.averaging.met(self.memory, landing.target.clone())
        elif landing.memory is not None:
            self.memory = landing.memory
        self.done = landing.header.sums.done
        self.headers.flights = ()  # that was told with it, and is news once
        if landing.header.tells:
            self.headers.told = self.averaging.hear(self.headers.told, landing.header.tells)
        if average.brought_news:
            sent = Sent(landing.bytes_sent, landing.server_bytes_sent, landing.hops, landing.hears)
            flights = self.clock.arrived(sent, round=self.books.number, flight_seconds=average.flight_seconds)
            self.headers.flights = tuple(flights)

    def leave_out(self, average: Average) -> None:
        """Those that its averaging has left out are given up, as if their models were not finite."""
        landing = average.arrived
        if not landing.header.tells or landing.target is None:
            return
        out = average.outliers = self.averaging.left_out(landing.header.tells)
        average.bad = tuple(bad or id in out for bad, id in zip(average.bad, self.roll.ids))
        average.counts = tuple(counts and id not in out for counts, id in zip(average.counts, self.roll.ids))
        for id in sorted(set(out) - self.named_outliers) if self.books.speaks else ():
            self.named_outliers.add(id)
            warn(
                f"round {self.books.number}: worker {id} was left out of the average: it changed its model by "
                f"{abs(landing.header.tells[id]):.3g}, far more than is usual for it and for the others; it restarts "
                "from their mean, with fresh optimizer state (if it happens again, records tell: Record.outliers)",
                RuntimeWarning,
            )

    def land(self, i: int, average: Average) -> None:
        """Move worker i to its target: x_i += target_i - snap_i, or the target itself if it has not moved since."""
        began = time.perf_counter()
        landing, bad = average.arrived, average.bad[i]
        if bad and landing.target is None:
            raise DivergedError(
                f"worker {self.roll.ids[i]}: its model is not finite, and the average brought none to restart from; "
                "lower the lr, or clip gradients"
            )
        if landing.target is not None:
            self._move(i, average, landing.target, rows_apart=self._distance(i, average))
            if self.optimizer_state == "average":
                self.snapshots.state.write(i, landing.header.extras, average.number)
            elif self.optimizer_state == "reset":
                self.snapshots.state.forget(i)
        if self.pools(average) or bad:
            self.snapshots.buffers.write(i, self.pooled(average))
        if bad:
            self.snapshots.state.forget(i)
            self.given[i] = self.pooled(average)
        if bad and self.roll.ids[i] not in average.outliers:
            self._tell_of_bad(i)
        average.to_land.discard(i)
        average.copy_seconds += time.perf_counter() - began

    def _distance(self, i: int, average: Average) -> float | None:
        """Squared, of what worker i brought from the mean, where that is not the target; None: the move tells."""
        landing = average.arrived
        mean = landing.mean if landing.exact is None else landing.exact
        if not average.counts[i] or mean is None or mean is landing.target:
            return None
        return float((self.snapshots.brought(i, average.snap) - mean).double().square().sum())

    def _move(self, i: int, average: Average, target: Tensor, rows_apart: float | None) -> None:
        landing, rows = average.arrived, self.snapshots.rows
        target = target if target.dim() == 1 else target[i]
        # What was done to its model since the snapshot stays, be it a step or an edit of the user's (a mask, a clamp):
        # x_i += target - snap_i, which in floating point is not the target itself where x_i is snap_i.
        if not average.gives_up(i) and (self.accounts[i].moved or self.snapshots.has_moved(i, average.snap)):
            distance = subtract_from(target, average.snap[i])
            rows.add(i, average.snap[i])
        else:
            distance = rows.replace(i, target)
        if average.counts[i] and not (landing.exact is None and landing.mean is None):
            average.drift += distance if rows_apart is None else rows_apart
            average.drifts += 1

    def _tell_of_bad(self, i: int) -> None:
        buffer = self.snapshots.not_finite.get(i)
        where = f" (buffer {buffer!r})" if buffer else ""
        warn(
            f"worker {self.roll.ids[i]}: its model was not finite{where} and was replaced by the other workers' mean",
            RuntimeWarning,
        )

    def pools(self, average: Average) -> bool:
        """Do buffers ride with it? Not in flight, where a delta could make a variance negative; the last one pools."""
        return average.arrived.shared and (not self.paces[0].overlap or average.is_last)

    def pooled(self, average: Average) -> tuple[Tensor, Tensor]:
        """All workers' buffers."""
        if average.pooled is None:
            sums = average.arrived.header.exact
            average.pooled = self.snapshots.buffers.pooled(sums if average.arrived.shared else torch.zeros_like(sums))
        return average.pooled

    def return_buffers(self, i: int) -> None:
        """All of worker i's model was replaced: its batches may have spoilt the buffers that it was given before."""
        if i in self.given:
            self.snapshots.buffers.write(i, self.given.pop(i))

    def adopt(self, average: Average) -> None:
        """It has landed on all hosted workers: their buffers are those of all."""
        if self.pools(average) and not average.is_look:
            self.snapshots.buffers.adopt(self.pooled(average))
            for account in self.accounts:
                account.pooled = account.seen

    @property
    def limit_seconds(self) -> float:
        return self.done_timeout_seconds if self.roll.all_done else self.patience.seconds()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors leave with the round and the worker in front."""
        try:
            yield
        except Missed:
            raise
        except (PeerError, MismatchError) as error:
            if str(error).startswith("round "):
                raise
            ids = self.comm.workers
            who = f"worker {ids.start}" if len(ids) == 1 else f"workers {ids.start}-{ids.stop - 1}"
            raise type(error)(f"round {self.books.number}, {who}: {error}") from None
