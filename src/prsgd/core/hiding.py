"""``overlap="auto"``: as many steps as hide the transfer. Pure: no torch, no clock of its own.

With every average each worker tells of the one before: its flight, and how long its steps take. A flight is the time
from launch to arrival, and the update and the snapshot before the launch, since between a launch and a landing d steps
later lie d gradients but only d - 1 updates. Who launches early waits for the others too, so the shortest flight, of
the worker that launched last, is the transfer itself, and ceil(flight / step) of that worker's steps hide it. The
overlap starts at 1:

    raised    at once, when the middle one of the last three transfers took longer: what was slow once does not count
    lowered   when fewer steps would have hidden each of the last five, with a tenth to spare

All processes hear the same numbers in the same order, so all workers choose the same for the same round; one whose own
round is shorter has that many steps, and one whose round ends by the clock lands at its end at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from prsgd.schedules.base import Round

RECENT, CALM = 3, 5
"""Transfers by which it is raised, and by which it is lowered."""
SPARE = 1.1
"""Times the transfer must be hidden by fewer steps before it is lowered to them."""
LITTLE = 0.01
"""Of a step: so much is waited for rather than hidden by one step more."""

_in_steps = attrgetter("in_steps")


@dataclass(frozen=True)
class Transfer:
    """How long an average took, and a step of the worker that launched it last."""

    flight_seconds: float
    step_seconds: float

    @property
    def in_steps(self) -> float:
        return self.flight_seconds / self.step_seconds

    def hidden_by(self, times: float = 1.0) -> int:
        """How many steps hide a transfer that takes so many times as long, at least 1.

        >>> Transfer(0.05, 0.02).hidden_by(), Transfer(0.04, 0.02).hidden_by(), Transfer(0.04, 0.02).hidden_by(1.1)
        (3, 2, 3)
        """
        return max(1, math.ceil(times * self.in_steps - LITTLE))


@dataclass
class Hiding:
    """Chooses the overlap of the rounds to come.

    >>> hiding = Hiding()
    >>> hiding.hear(flights=[0.9, 0.05], step_seconds=[0.01, 0.02])  # worker 1 launched last
    >>> hiding.of(Round(steps=8), before=1)[0], hiding.of(Round(steps=2), before=1)[0]
    (3, 2)
    """

    overlap: int = 1
    chosen_by: Transfer | None = None
    heard: list[Transfer] = field(default_factory=list)
    """The newest, at most ``CALM``."""

    def hear(self, flights: Sequence[float], step_seconds: Sequence[float]) -> None:
        """What all workers tell of an average, in seconds by worker; 0: unknown, as where nothing travels."""
        known = [(flight, step) for flight, step in zip(flights, step_seconds) if flight > 0 and step > 0]
        if not known:
            return
        self.heard = [*self.heard, Transfer(*min(known))][-CALM:]
        newest = sorted(self.heard[-RECENT:], key=_in_steps)
        middle, longest = newest[(len(newest) - 1) // 2], max(self.heard, key=_in_steps)
        if middle.hidden_by() > self.overlap:
            self.overlap, self.chosen_by = middle.hidden_by(), middle
        elif len(self.heard) == CALM and longest.hidden_by(SPARE) < self.overlap:
            self.overlap, self.chosen_by = longest.hidden_by(SPARE), longest

    def of(self, round: Round, before: int, most: int | None = None) -> tuple[int, Round]:
        """The overlap of a round that opens, never above its length (or ``most``), and the round with the reason if
        that is another than the one ``before``."""
        most = round.steps if most is None else most
        overlap = self.overlap if most is None else min(self.overlap, most)
        if overlap == before or self.chosen_by is None:
            return overlap, round
        capped = f", period {round.steps}" if overlap < self.overlap else ""
        end = ", or to the round's end" if round.steps is None else ""
        took, step = self.chosen_by.flight_seconds, self.chosen_by.step_seconds
        why = f"transfer {took:.3g} s, step {step:.3g} s{capped}: overlap {before} to {overlap}{end}"
        return overlap, replace(round, reason=f"{round.reason}; {why}" if round.reason else why)

    def state_dict(self) -> dict[str, Any]:
        by = None if self.chosen_by is None else _pair(self.chosen_by)
        return {"overlap": self.overlap, "chosen_by": by, "heard": [_pair(transfer) for transfer in self.heard]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.overlap, by = int(state["overlap"]), state["chosen_by"]
        self.chosen_by = None if by is None else Transfer(*map(float, by))
        self.heard = [Transfer(*map(float, pair)) for pair in state["heard"]]


def _pair(transfer: Transfer) -> list[float]:
    return [transfer.flight_seconds, transfer.step_seconds]
