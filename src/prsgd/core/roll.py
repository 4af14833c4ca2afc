"""Who takes part, who counts, who is done: this process's workers as their averages know them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any


class Roll:
    """The hosted workers, by place. Lanes share it."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self.done = [False] * len(ids)
        """It has run out of data."""
        self.waits = [False] * len(ids)
        """It may not take a step before the others of this process have closed their rounds."""
        self.takes_part = [False] * len(ids)
        """It is part of the optimizer.step() under way, or was of the newest."""
        self.ailing: list[set[int]] = [set() for _ in ids]
        """The fragments of its model that are to be replaced, since another was not finite."""

    def running(self) -> list[int]:
        """Those that still have data."""
        return [i for i, done in enumerate(self.done) if not done]

    @property
    def all_done(self) -> bool:
        return all(self.done)

    def may_step(self, i: int) -> bool:
        return not self.done[i] and not self.waits[i]

    def call(self, stopped: Set[int]) -> None:
        """Done are those whose ids are in ``stopped``."""
        self.done = [id in stopped for id in self.ids]

    def dismiss(self) -> None:
        """This process has no more data."""
        self.done = [True] * len(self.ids)

    def mend(self, i: int, fragment: int, *, lost: bool, fragments: int) -> None:
        """An average of this fragment has landed on it, and replaced what was ``lost``."""
        if lost and not self.ailing[i]:
            self.ailing[i] = set(range(fragments))
        self.ailing[i].discard(fragment)

    def reopen(self) -> None:
        """All have data again."""
        self.done, self.waits = [False] * len(self.ids), [False] * len(self.ids)


@dataclass
class Account:
    """What the averages of one lane have seen of one worker."""

    moved: bool = False
    """An optimizer has stepped it since its newest snapshot."""
    rested: int = 0
    """Steps since then that it took part in without moving."""
    snapped_rested: int = 0
    """The same of its newest snapshot, of the steps that no average has seen."""
    snapped_samples: int = 0
    """Samples it had trained on at its newest snapshot."""
    seen: int = 0
    """Steps (and samples) of the newest snapshot that an average has seen."""
    seen_samples: int = 0
    counted: bool = False
    """Did its model count in the newest average that has landed on it?"""
    pooled: int = 0
    """Steps that its BatchNorm statistics had when they were last pooled."""

    def snap(self, samples: int) -> None:
        """Its snapshot is taken now."""
        self.snapped_samples, self.moved = samples, False
        self.snapped_rested, self.rested = self.snapped_rested + self.rested, 0

    def land(self, at: int, counted: bool) -> None:
        """An average of the snapshot that was taken after ``at`` steps has landed on it."""
        self.seen, self.seen_samples, self.counted, self.snapped_rested = at, self.snapped_samples, counted, 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        vars(self).update({name: state[name] for name in vars(self)})


@dataclass(frozen=True)
class Brought:
    """What one hosted worker brings to an average."""

    steps: int
    """That no average has seen."""
    samples: int
    counts: bool
    """Does its model count? One that is not finite does not, nor one that is done and has nothing new."""
    pools: bool
    """Do its buffers count? If they have news and its model does, or did in the newest average that landed on it."""


def brought(account: Account, *, at: int, samples: int, bad: bool, answers: bool, everybody: bool = False) -> Brought:
    """Of a worker whose model has ``at`` steps behind it, and ``samples`` that no average has seen; ``everybody``: it
    counts with news or without. One that has only rested since then has none, and lacks optimizer state to bring."""
    steps = at - account.seen - account.snapped_rested
    counts = not bad and (steps > 0 or everybody or not (answers or account.snapped_rested))
    pools = not bad and at > account.pooled and (counts or account.counted)
    return Brought(steps, samples, counts, pools)
