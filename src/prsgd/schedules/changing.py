"""Rounds whose length changes while a model trains and whose lr is the user's: at a step, or with the lr."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prsgd._check import positive, whole_number
from prsgd.schedules.base import Now, Round, Schedule

LONGEST = 10**12
"""Steps of a round of ``quadratic`` whose lr is 0 or nearly so: it closes when the run ends."""


@dataclass(frozen=True)
class post_local(Schedule):  # noqa: N801 - a word in the user's sentence
    """Average after every step for ``switch`` steps, then every ``period`` steps: post-local SGD.

    Averages land at steps 1, 2, ..., switch, then at switch + period, switch + 2 period, ... It is mini-batch SGD while
    the lr is high and local SGD afterwards, so the switch is mostly where the lr first falls (Lin, Stich, Patel, Jaggi:
    Don't Use Large Mini-Batches, Use Local SGD; 2018).

    The steps before the switch are counted by rounds, of one step each, which all workers share: also those that have
    fewer batches than others switch with them. (The average at the end of a ``local.epoch()`` with an overlap is a
    round without a step, and brings the switch one step forward.)

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with prsgd.LocalSGD(model, optimizer, schedule=prsgd.post_local(switch=3, period=4)) as local:
    ...     for _ in range(13):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 1)).sum().backward()
    ...         optimizer.step()
    >>> [record.step for record in local.records]  # the run ends with one more
    [1, 2, 3, 7, 11, 13]
    """

    switch: int
    period: int

    def __post_init__(self) -> None:
        for name in ("switch", "period"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), at_least=1))

    def open(self, now: Now) -> Round:
        return Round(steps=1 if now.round <= self.switch else self.period)

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: it is clamped to the round's length, and the record holds the one used."""


@dataclass(frozen=True)
class quadratic(Schedule):  # noqa: N801
    """Rounds of max(base, floor((alpha / lr)^2)) steps, with the lr when a round opens: they grow as the lr falls.

    This is the Quadratic Synchronization Rule, QSR (Gu, Lyu, Arora, Zhang, Huang, ICLR 2024). ``alpha`` is an lr: above
    alpha / sqrt(base) rounds have ``base`` steps, at a tenth of that 100 times as many. Rounds that open in the first
    ``warmup`` steps have ``base`` too, since the small lr of a warm-up is not one that has fallen. An lr of 0, or so
    small that a round would be longer, makes one of 10^12 steps: the run ends it.

    A round opens when the average before it has landed, within ``optimizer.step()``: it goes by the lr of that step,
    before an lr scheduler moves on. Of several parameter groups the first one's counts. All workers are taken to have
    the same lr in the same round, as they have if their lr schedulers do the same. Where they have not, their rounds
    differ as those of ``per_worker`` do: averages still match by round, and the worker that is through first waits.

    >>> schedule = quadratic(alpha=0.1, base=8)
    >>> for lr in (0.1, 0.03, 0.01, 0.0):
    ...     schedule.open(Now(worker=0, num_workers=2, round=5, step=32, lr=lr, last=None)).steps
    8
    11
    100
    1000000000000
    """

    alpha: float
    base: int
    warmup: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", positive("alpha", self.alpha))
        object.__setattr__(self, "base", whole_number("base", self.base, at_least=1))
        object.__setattr__(self, "warmup", whole_number("warmup", self.warmup, at_least=0))

    def open(self, now: Now) -> Round:
        # By rounds, which all workers share, and not by a worker's own steps, of which one with less data has fewer.
        warming_up = (now.round - 1) * self.base < self.warmup
        return Round(steps=self.base if warming_up else max(self.base, self._steps(now.lr)))

    def _steps(self, lr: float) -> int:
        if not lr > self.alpha / math.sqrt(LONGEST):
            return LONGEST
        # Rounding must not cost a step: (0.3 / 0.03)^2 may be a little less than 100.
        return math.floor((self.alpha / lr) ** 2 * (1 + 1e-9))

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: it is clamped to the round's length, and the record holds the one used."""
