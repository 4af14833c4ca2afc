"""Rounds that grow while the lr falls."""

from __future__ import annotations

from dataclasses import dataclass

from prsgd._check import positive
from prsgd.schedules.base import Now, Round, Schedule


@dataclass(frozen=True)
class growing(Schedule):  # noqa: N801
    """Rounds that grow while the lr falls: Algorithm 2, K^s = ceil(s^(1/3) / N) and lr N / s^(2/3).

    As printed, the first rounds' lr (N, N / 1.59, ...) is far above 1/L for most problems and throws the iterate
    away, so ``lr_scale`` multiplies it and ``lr_cap`` bounds it. The number of steps T need not be known.

    >>> schedule = growing(lr_scale=0.1, lr_cap=0.05)
    >>> schedule.open(Now(worker=0, num_workers=2, round=8, step=7, lr=0.1, last=None))
    Round(steps=1, seconds=None, lr=0.05)
    >>> schedule.open(Now(worker=0, num_workers=2, round=27, step=45, lr=0.1, last=None))
    Round(steps=2, seconds=None, lr=0.022222222222222227)
    """

    lr_scale: float = 1.0
    lr_cap: float | None = None

    def __post_init__(self) -> None:
        positive("lr_scale", self.lr_scale)
        if self.lr_cap is not None:
            positive("lr_cap", self.lr_cap)

    def open(self, now: Now) -> Round:
        # The smallest K with (K N)^3 >= s, in whole numbers: s ** (1/3) rounds up past exact cubes.
        steps = max(1, round(now.round ** (1 / 3)) // now.num_workers)
        while (steps * now.num_workers) ** 3 < now.round:
            steps += 1
        lr = self.lr_scale * now.num_workers / now.round ** (2 / 3)
        return Round(steps=steps, lr=lr if self.lr_cap is None else min(lr, self.lr_cap))

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: it is clamped to the round's length, and the record holds the one used."""
