"""The books of a run: what workers log, and one record per average.

Numbers that need all processes (drift, mean loss, samples) are summed with the *next* average, so a record stays
incomplete until that one's header arrives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from prsgd._check import whole_number
from prsgd._warn import warn
from prsgd.averaging.base import Sums
from prsgd.core.pace import Pace
from prsgd.core.roll import Roll
from prsgd.records import Record, Totals

MOVES_NOTHING = 1e-8
"""An lr up to this may well leave all numbers of a model as they are."""
SURE = 16
"""Steps in a round after which workers that are alike have done the same work: one average is enough to tell."""
KEPT = 10_000
"""Records that are kept in memory, the newest; about 1 kB each."""


@dataclass
class Tally:
    """What one worker logged in one round. The loss stays a tensor until an average asks: logging never waits."""

    loss: float | Tensor = 0.0
    losses: int | Tensor = 0
    samples: int = 0

    def add(self, loss: float | Tensor | None, samples: int) -> None:
        """A loss that is not finite is left out: it would spoil all workers' mean."""
        if isinstance(loss, Tensor):
            finite = loss.isfinite()
            self.loss = self.loss + torch.where(finite, loss, 0.0)
            self.losses = self.losses + finite
        elif loss is not None and math.isfinite(loss):
            self.loss = self.loss + float(loss)
            self.losses = self.losses + 1
        self.samples += samples

    def state_dict(self) -> dict[str, Any]:
        return {"loss": float(self.loss), "losses": int(self.losses), "samples": self.samples}


@dataclass
class Page:
    """What one worker has logged."""

    last: Tally = field(default_factory=Tally)
    """In the round before the open one, whose numbers travel with the next average; and in the open one."""
    now: Tally = field(default_factory=Tally)
    sent: bool = False
    """Have the numbers of the last round left?"""
    samples: int = 0
    """In all."""

    def losses_of_round(self) -> tuple[float, int]:
        """Their sum and number in the open round, or in the last one if nothing is logged in it yet."""
        tally = self.now if int(self.now.losses) else self.last
        return float(tally.loss), int(tally.losses)

    def turn(self) -> None:
        """The round's numbers are complete, and those of the next one begin."""
        self.last, self.now, self.sent = self.now, Tally(), False

    def state_dict(self) -> dict[str, Any]:
        own = {"sent": self.sent, "samples": self.samples}
        return {**own, "last": self.last.state_dict(), "now": self.now.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Page:
        tallies = {name: Tally(**state[name]) for name in ("last", "now")}
        return cls(sent=state["sent"], samples=state["samples"], **tallies)


class Ledger:
    """The complete records of a run, of all its lanes."""

    def __init__(
        self, on_record: Callable[[Record], None] | None, paused: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._paused = paused
        self.listeners = [] if on_record is None else [on_record]
        """Called with each."""
        self._news: deque[Record] = deque()
        """Complete, and not yet published."""
        self._publishing = False
        self.records: deque[Record] = deque(maxlen=KEPT)
        self.totals = Totals()
        self.round = 0
        """Averages that have landed."""
        self.told_alike = False
        """Was it said that the workers are alike? Once is enough, also for a model that travels in fragments."""

    def add(self, record: Record) -> None:
        """It is complete, perhaps in the middle of the average that completed it: listeners hear of it afterwards."""
        self._news.append(record)

    def publish(self) -> None:
        """Between two steps, when no average is half landed: a listener may evaluate or save the run as anybody may.
        What becomes complete meanwhile is next."""
        if not self._news or self._publishing:
            return
        self._publishing = True
        try:
            while self._news:
                record = self._news.popleft()
                self.records.append(record)
                self.totals.add(record)
                if self.listeners:
                    with self._paused():  # what they do is no training
                        for listener in self.listeners:
                            listener(record)
        finally:
            self._publishing = False

    def state_dict(self) -> dict[str, Any]:
        totals = replace(self.totals)
        for record in self._news:
            totals.add(record)
        return {"round": self.round, "totals": asdict(totals)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.round, self.totals = int(state["round"]), Totals(**state["totals"])


class Books:
    """The books of one lane: its records, of which the hosted workers' share in the next one is kept here."""

    def __init__(self, hosted: int, ledger: Ledger, *, speaks: bool, fragment: int | None = None) -> None:
        self.ledger, self.speaks, self.fragment = ledger, speaks, fragment
        self.pages = [Page() for _ in range(hosted)]
        self.last: Record | None = None
        """The newest that is complete."""
        self.round = 0
        """Averages of this lane that have landed."""
        self._incomplete: Record | None = None
        self._deferred: list[tuple[Record, Sums]] = []
        """Records that wait until all workers meet, with the hosted workers' own numbers."""
        self._drift = 0.0
        self._drifts = 0
        self._own = Sums()
        self._alike = False
        self._still = 0
        """Averages in a row that found all workers' models alike although they had taken steps."""
        self._logs_first: bool | None = None
        self._before = 0
        """Samples of the workers from whose states this run went on, in worker 0's process."""
        self.saves = 0
        """How often the state was saved since the last average."""

    @property
    def number(self) -> int:
        """Of the average under way, or of the next one, among all of the run."""
        return self.ledger.round + 1

    @property
    def samples(self) -> int:
        """That were logged here, in all; the sum over all processes is that of the run."""
        return self._before + sum(page.samples for page in self.pages)

    def log(self, loss: float | Tensor | None, samples: int | Sequence[int], paces: Sequence[Pace], roll: Roll) -> None:
        """Add to the round that each worker's step belongs to."""
        n = len(self.pages)
        losses = _per_worker("loss", loss.detach() if isinstance(loss, Tensor) else loss, n)
        counts = [whole_number("samples", count, at_least=0) for count in _per_worker("samples", samples, n)]
        if self._logs_first is None:
            self._logs_first = all(pace.steps == 0 for pace in paces)
        for i, (page, pace, value, count) in enumerate(zip(self.pages, paces, losses, counts)):
            if not (roll.may_step(i) if self._logs_first else roll.takes_part[i]):
                continue  # a fleet's worker that waits
            in_last_round = pace.steps + self._logs_first <= pace.opened_at and not page.sent
            (page.last if in_last_round else page.now).add(value, count)
            page.samples += count

    def numbers(self) -> Sums:
        """What travels of the last average: the drift, losses and samples that are known here of the hosted workers."""
        loss, losses, samples = 0.0, 0, 0
        for page in self.pages:
            loss, losses = loss + float(page.last.loss), losses + int(page.last.losses)
            samples += page.last.samples
        return Sums(drift=self._drift, drifts=self._drifts, loss=loss, losses=losses, samples=samples)

    def sent(self) -> None:
        """They have left, with an average that was launched."""
        for page in self.pages:
            page.sent = True
        self.saves = 0

    def enter(self, record: Record, drift: float, drifts: int, own: Sums, *, alike: bool) -> None:
        """An average has landed on all hosted workers; their squared distances from it add up to ``drift``.

        ``own`` is what they told of themselves with it; ``alike``: were all workers' models the same to the last bit?
        """
        self.ledger.round, self.round, self._own, self._alike = record.round, self.round + 1, own, alike
        self._incomplete, self._drift, self._drifts = record, drift, drifts

    def complete(self, sums: Sums, step_seconds: tuple[float, ...] | None = None) -> Record | None:
        """The last average's numbers came with this header: its record, unless it was complete already."""
        if self._incomplete is None:
            return None
        record = replace(
            self._incomplete,
            drift=sums.drift / sums.drifts if sums.drifts and math.isfinite(sums.drift) else None,
            loss=sums.loss / sums.losses if sums.losses else None,
            samples=sums.samples,
            step_seconds=step_seconds,
        )
        before, self._incomplete, self.last = self.last, None, record
        self._watch(record, before)
        self.ledger.add(record)
        return record

    def _watch(self, record: Record, before: Record | None) -> None:
        """Workers whose models are alike to the last bit before they are averaged have nothing to average."""
        still = self._alike and record.workers > 1 and record.period > 0 and record.lr > MOVES_NOTHING
        self._still = self._still + 1 if still else 0
        sure = self._still == 2 or (still and record.period >= SURE)
        if sure and self.speaks and not self.ledger.told_alike:
            self.ledger.told_alike = True
            first = f"s {before.round} and" if before is not None and self._still == 2 else ""
            warn(
                f"round{first} {record.round}: all workers' models were alike to the last bit before "
                "they were averaged. Is DistributedDataParallel (or a trainer's ddp strategy) left on, so that "
                "gradients still travel at every step? Or do all workers get the same batches? Use the model without "
                "DDP, and give each worker its own part of the data",
                RuntimeWarning,
            )

    def defer(self, own: Sums) -> None:
        """The last average's numbers are the hosted workers' ``own`` so far: they are summed when all meet."""
        if self._incomplete is not None:
            told = {name: getattr(self._own, name) for name in ("workers", "bad", "mark", "other_mark")}
            self._deferred.append((self._incomplete, own._replace(**told)))
            self._incomplete = None

    @property
    def deferred(self) -> range:
        """The rounds of this lane whose records wait until all meet."""
        end = self.round + (self._incomplete is None)
        return range(end - len(self._deferred), end)

    def own(self, rounds: range) -> list[Sums]:
        """What the hosted workers have to tell of these deferred records."""
        return [own for round, (_, own) in zip(self.deferred, self._deferred) if round in rounds]

    def settle(self, totals: Sequence[Sums]) -> None:
        """All workers' numbers for the oldest deferred records."""
        settled, self._deferred = self._deferred[: len(totals)], self._deferred[len(totals) :]
        newest = self._incomplete
        for (record, own), sums in zip(settled, totals):
            self._incomplete = replace(record, workers=round(sums.workers), bad_workers=round(sums.bad))
            self._alike = sums.are_alike(own)
            self.complete(sums)
        self._incomplete = newest

    @property
    def is_complete(self) -> bool:
        return self._incomplete is None

    def common(self) -> dict[str, Any]:
        """What all workers know of records, with the numbers of this process where they differ."""
        return {
            "round": self.round,
            "alike": self._alike,
            "incomplete": None if self._incomplete is None else asdict(self._incomplete),
            "last": None if self.last is None else asdict(self.last),
            "ledger": self.ledger.state_dict(),
        }

    def take_over(self, common: Mapping[str, Any]) -> None:
        """Know as much as another worker; this one has nothing to add to the record that is incomplete."""
        self.round, self._alike, self._own, self._drift, self._drifts = common["round"], common["alike"], Sums(), 0.0, 0
        self._incomplete = None if common["incomplete"] is None else _record(common["incomplete"])
        if common["last"] is not None and (self.last is None or self.last.round < common["last"]["round"]):
            self._remember(common["last"])
        self.ledger.load_state_dict(common["ledger"])

    def state_dict(self) -> dict[str, Any]:
        return {
            "pages": [page.state_dict() for page in self.pages],
            "samples": self.samples,
            "round": self.round,
            "drift": self._drift,
            "drifts": self._drifts,
            "own": list(self._own),
            "alike": self._alike,
            "logs_first": self._logs_first,
            "incomplete": None if self._incomplete is None else asdict(self._incomplete),
            "deferred": [[asdict(record), list(own)] for record, own in self._deferred],
            "last": None if self.last is None else asdict(self.last),
            "ledger": self.ledger.state_dict(),
        }

    def inherit(self, state: Mapping[str, Any], *, in_flight: bool) -> None:
        """Go on after the rounds of other workers, also after one that was ``in_flight``. The numbers of the last one,
        which travel with the next average, are not known any more, so it has no record."""
        round, ledger = int(state["round"]), state["ledger"]
        self.round = round + in_flight
        if int(ledger["round"]) + in_flight > self.ledger.round:
            self.ledger.load_state_dict({**ledger, "round": int(ledger["round"]) + in_flight})
        self._before = int(state["samples"]) if self.speaks else 0
        self._logs_first = state["logs_first"]
        if state["last"] is not None:
            self._remember(state["last"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(state["pages"]) != len(self.pages):
            raise ValueError(f"the state has {len(state['pages'])} pages for {len(self.pages)} workers")
        self.pages = [Page.from_state(page) for page in state["pages"]]
        self._before = 0
        self._before = int(state.get("samples", self.samples)) - self.samples
        self.round, self._drift, self._drifts = state["round"], state["drift"], state["drifts"]
        self._logs_first, self._alike = state["logs_first"], state["alike"]
        self._own = Sums(*state["own"])
        self._incomplete = None if state["incomplete"] is None else _record(state["incomplete"])
        self._deferred = [(_record(record), Sums(*own)) for record, own in state["deferred"]]
        if state["last"] is not None:
            self._remember(state["last"])
        self.ledger.load_state_dict(state["ledger"])

    def _remember(self, last: Mapping[str, Any]) -> None:
        """A record that was complete before this process began; the ledger has those of all lanes in order."""
        self.last = _record(last)
        records = sorted({record.round: record for record in (*self.ledger.records, self.last)}.items())
        self.ledger.records = deque((record for _, record in records), KEPT)


def _record(values: Mapping[str, Any]) -> Record:
    try:
        return Record.from_dict(values)
    except ValueError as error:  # names the field, and not whose it is
        raise ValueError(f"the state is damaged: in a record, {error}") from None


def _per_worker(name: str, value: Any, n: int) -> list[Any]:
    """One value for each hosted worker: a single one is everybody's."""
    if value is None or isinstance(value, Real) or (isinstance(value, Tensor) and value.dim() == 0):
        return [value] * n
    values = value.tolist() if isinstance(value, Tensor) else value
    if isinstance(values, str) or not isinstance(values, Sequence) or len(values) != n:
        raise ValueError(f"{name} must be one number or one per hosted worker ({n}), got {value!r}")
    return list(values)
