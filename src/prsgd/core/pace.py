"""One worker's timetable: when a round opens, closes, and when its average lands. Pure: no torch, no clock of its own.

A round closes so early that its average lands, ``overlap`` own steps later, where the round ends:

    every(4), overlap 0:   1 2 3 4|         closes after step 4 and lands there
    every(4), overlap 1:   1 2 3|4          closes after step 3, lands in step 4, between its gradient and its update

Rounds that end by the clock close when their time is up, and the average lands so many steps into the next one.

Where a model travels in fragments, each has a timetable, and their rounds end one after the other: that of fragment k
of F (from 1) after k / F of the schedule's round. So each of its rounds is what was left of the schedule's last one,
and k / F of the new one.

    every(4), overlap 0, 2 fragments:   1 2|3 4|5 6|7 8|      the first lands at 2, 6, ..., the second at 4, 8, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from prsgd.schedules.base import Round


@dataclass
class Snap:
    """A snapshot of the worker's model."""

    at: int
    """Steps it had."""
    lands_at: int
    """The own step in which the average of it lands."""
    period: int | None
    """Steps of the round that it closed; None: its landing tells."""
    launched: bool = False
    reason: str = field(default="", repr=False)
    """Why the round that it closed was as long as it was, if its schedule said so."""


@dataclass(frozen=True)
class Landed:
    """Where an average came down."""

    step: int
    period: int
    overlap: int
    reason: str = ""


@dataclass
class Pace:
    """Where one worker is in its round. All workers that are given the same rounds have the same timetable.

    >>> pace = Pace(overlap=1)
    >>> pace.open(Round(steps=2), seconds=0.0)
    >>> pace.steps = 1
    >>> pace.due(seconds=0.0), pace.close(1), pace.snap
    (1, False, Snap(at=1, lands_at=2, period=None, launched=False))
    """

    overlap: int
    """At most so many steps are between a closed round and its landing; of each round, if it changes."""
    steps: int = 0
    rounds: int = 0
    """Opened."""
    round: Round | None = None
    """The open one; None: closed, and the next opens when the average lands."""
    opened_at: int = 0
    """Steps it had when the round opened, and the clock's seconds."""
    opened_seconds: float = 0.0
    snap: Snap | None = None
    """What waits to be averaged, or is under way."""
    left_steps: int = 0
    """Of the schedule's last round, where this one ends before it; and seconds, of one by the clock."""
    left_seconds: float = 0.0

    @property
    def may_open(self) -> bool:
        return self.round is None and self.snap is None

    @property
    def boards(self) -> bool:
        """Is its snapshot taken and not launched, since another worker of this process has not closed its round?"""
        return self.snap is not None and not self.snap.launched

    @property
    def lands_now(self) -> bool:
        """Does the average land in the step whose gradient is there?"""
        return self.snap is not None and self.snap.launched and self.snap.lands_at == self.steps + 1

    def staggered(self, round: Round, place: int, fragments: int) -> Round:
        """The next round of a fragment's timetable, from the schedule's; ``place``: in the order of their landing."""
        if fragments == 1:
            return round
        steps, seconds = round.steps, round.seconds
        if steps is not None:
            part = -(-steps * place // fragments)
            steps, self.left_steps = self.left_steps + part, steps - part
        if seconds is not None:
            part_seconds = seconds * place / fragments
            seconds, self.left_seconds = self.left_seconds + part_seconds, seconds - part_seconds
        return replace(round, steps=steps, seconds=seconds)

    def open(self, round: Round, seconds: float, overlap: int | None = None) -> None:
        """Begin a round, with this overlap or the same as before. Of one worker it is always 0 or never."""
        self.round, self.rounds = round, self.rounds + 1
        self.overlap = self.overlap if overlap is None else overlap
        self.opened_at, self.opened_seconds = self.steps, seconds

    def due(self, seconds: float) -> int | None:
        """The overlap to close the open round with; None: not yet."""
        if self.round is None:
            return None
        taken, known = self.steps - self.opened_at, self.round.steps
        if known is not None and taken >= known - min(self.overlap, known):
            return min(self.overlap, known)  # so early that landings fall on the multiples
        if self.round.seconds is not None and taken and seconds - self.opened_seconds >= self.round.seconds:
            return self.overlap
        return None

    def is_turn(self, clock: Callable[[int], float], worker: int) -> bool:
        """Is there anything to do between these two steps? Mostly not. Only rounds that end by the clock read it."""
        round = self.round
        if round is None or self.snap is not None:
            return True
        if round.seconds is not None:
            return self.due(clock(worker)) is not None
        return round.steps is not None and self.steps - self.opened_at >= round.steps - min(self.overlap, round.steps)

    def close(self, overlap: int) -> bool:
        """Take the snapshot. Is the next round to open at once? If time goes on; one of known length opens when the
        average has landed."""
        assert self.round is not None
        assert not self.boards
        taken, known = self.steps - self.opened_at, self.round.steps
        by_clock = known is None or taken + overlap < known
        self.snap = Snap(self.steps, self.steps + overlap, taken if by_clock else None, reason=self.round.reason)
        self.round = None
        return by_clock and self.overlap > 0

    def waits(self, seconds: float) -> bool:
        """May it take no other step before its snapshot is launched?"""
        if self.snap is None or self.snap.launched:
            return False
        return self.steps + 1 >= self.snap.lands_at or self.due(seconds) is not None

    def answer(self) -> None:
        """It has run out of data, and brings what it has to an average of the others."""
        self.snap, self.round = Snap(self.steps, self.steps, None, launched=True), None

    def land(self, *, in_step: bool = False) -> Landed:
        """The average has come down, in the step that is under way or between two."""
        snap, self.snap = self.snap, None
        assert snap is not None
        step = self.steps + in_step
        period = step - self.opened_at if snap.period is None else snap.period
        return Landed(step, period, step - snap.at, snap.reason)

    def state_dict(self, seconds: float) -> dict[str, Any]:
        """Plain numbers; ``seconds`` is the clock now."""
        state = asdict(self)
        state["opened_seconds"] = seconds - self.opened_seconds
        return state

    def load_state_dict(self, state: Mapping[str, Any], seconds: float) -> None:
        self.steps, self.rounds, self.opened_at = state["steps"], state["rounds"], state["opened_at"]
        self.overlap, self.left_steps, self.left_seconds = state["overlap"], state["left_steps"], state["left_seconds"]
        self.round = None if state["round"] is None else Round(**state["round"])
        self.opened_seconds = seconds - state["opened_seconds"]
        self.snap = None if state["snap"] is None else Snap(**state["snap"])
