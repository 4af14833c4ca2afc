"""Rounds of known length: every so many steps, by worker, or one for the whole run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prsgd._check import whole_number
from prsgd.schedules.base import Now, Round, Schedule


@dataclass(frozen=True)
class every(Schedule):  # noqa: N801 - a word in the user's sentence
    """Average every ``period`` steps: Algorithm 1. Landings fall on steps period, 2 period, 3 period, ...

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4)) as local:
    ...     for _ in range(14):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 1)).sum().backward()
    ...         optimizer.step()
    >>> [record.step for record in local.records]  # 4, 8, 12; the run ends with one more
    [4, 8, 12, 14]
    """

    period: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "period", whole_number("period", self.period, at_least=1))

    def open(self, now: Now) -> Round:
        return Round(steps=self.period)

    def check(self, num_workers: int, overlap: int) -> None:
        if overlap > self.period:
            raise ValueError(f"overlap must be at most the period {self.period}, got {overlap}")


@dataclass(frozen=True)
class per_worker(Schedule):  # noqa: N801
    """Worker i takes ``periods[i]`` steps a round: Algorithm 3 by count. A worker twice as fast takes twice as many.

    >>> per_worker([16, 8]).open(Now(worker=1, num_workers=2, round=1, step=0, lr=0.1, last=None)).steps
    8
    """

    periods: Sequence[int]

    def __post_init__(self) -> None:
        if isinstance(self.periods, str) or not isinstance(self.periods, Sequence) or not self.periods:
            raise ValueError(f"periods must be a list with one period per worker, got {self.periods!r}")
        checked = tuple(whole_number(f"periods[{i}]", p, at_least=1) for i, p in enumerate(self.periods))
        object.__setattr__(self, "periods", checked)

    def open(self, now: Now) -> Round:
        return Round(steps=self.periods[now.worker])

    def check(self, num_workers: int, overlap: int) -> None:
        if len(self.periods) != num_workers:
            raise ValueError(f"periods must have one entry per worker: {num_workers} workers, got {len(self.periods)}")
        if overlap > min(self.periods):
            raise ValueError(f"overlap must be at most the smallest period {min(self.periods)}, got {overlap}")


@dataclass(frozen=True)
class once(Schedule):  # noqa: N801
    """Average once, when the run ends: one-shot averaging (Zinkevich et al. 2010; McDonald et al. 2010).

    >>> once().open(Now(worker=0, num_workers=2, round=1, step=0, lr=0.1, last=None))
    Round(steps=None, seconds=None, lr=None)
    """

    def open(self, now: Now) -> Round:
        return Round()

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: the one average ends the run, so it is clamped to 0."""
