"""One hosted worker's place in its round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prsgd.core.tally import Tally
from prsgd.schedules.base import Round


@dataclass
class Worker:
    """Where one hosted worker is in its round."""

    id: int
    steps: int = 0
    moved: bool = False
    """An optimizer has stepped it since its newest snapshot."""
    takes_part: bool = False
    """It is part of the optimizer.step() under way, or was of the newest."""
    in_step: bool = False
    """It has the gradient of its next step."""
    rounds: int = 0
    """Rounds opened."""
    round: Round | None = None
    """The open one; None: closed, and the next opens when the average lands."""
    opened_at: int = 0
    """Steps it had when the round opened, and the clock's seconds."""
    opened_seconds: float = 0.0
    closed: bool = False
    """Its snapshot is taken and the average not launched: another hosted worker has not closed."""
    waits: bool = False
    """It may not take another step before that."""
    skips: bool = False
    """This optimizer.step() is no step of its: its gradient was not finite."""
    lands_at: int | None = None
    """The own step in which the average of the closed round lands."""
    snapped_at: int = 0
    """Steps (and samples) of the newest snapshot; those of the newest snapshot that an average has seen."""
    snapped_samples: int = 0
    seen: int = 0
    seen_samples: int = 0
    counted: bool = False
    """Did its model count in the newest average that has landed on it?"""
    pooled: int = 0
    """Steps that its BatchNorm statistics had when they were last pooled."""
    samples: int = 0
    period: int | None = None
    """Length of the closed round, unless only its landing tells."""
    done: bool = False
    last: Tally = field(default_factory=Tally)
    """Logged in the round before the open one, whose numbers travel with the next average; and in the open one."""
    now: Tally = field(default_factory=Tally)
    last_sent: bool = False

    @property
    def answers(self) -> bool:
        """Has it run out of data, so that it brings what it has to whatever the others do? One that had closed its
        round before takes part in that round's average as it would have in a process of its own."""
        return self.done and not self.closed

    def snap(self) -> None:
        """Its snapshot is taken now."""
        self.snapped_at, self.snapped_samples, self.moved = self.steps, self.samples, False

    def end_round(self) -> None:
        """Its numbers are complete, and those of the next round begin."""
        self.opened_at, self.last, self.now, self.last_sent = self.steps, self.now, Tally(), False

    def state_dict(self, clock: Callable[[int], float]) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if k not in ("round", "last", "now", "opened_seconds", "done")}
        state["round"] = None if self.round is None else asdict(self.round)
        state["elapsed_seconds"] = clock(self.id) - self.opened_seconds
        for name, tally in (("last", self.last), ("now", self.now)):
            state[name] = {"loss": float(tally.loss), "losses": int(tally.losses), "samples": tally.samples}
        return state

    @staticmethod
    def from_state(state: Mapping[str, Any], clock: Callable[[int], float]) -> Worker:
        fields = {k: v for k, v in state.items() if k not in ("round", "last", "now", "elapsed_seconds")}
        return Worker(
            **fields,
            round=None if state["round"] is None else Round(**state["round"]),
            opened_seconds=clock(state["id"]) - state["elapsed_seconds"],
            last=Tally(**state["last"]),
            now=Tally(**state["now"]),
        )
