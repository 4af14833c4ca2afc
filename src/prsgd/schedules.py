"""When to average, and at which learning rate.

A schedule is a value. Before each round the loop asks it, for each worker, how long the round lasts.
The names are lower case because users read them as words: ``LocalSGD(..., schedule=every(8))``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from prsgd._check import positive, whole_number
from prsgd.records import Record


@dataclass(frozen=True)
class Now:
    """What a schedule knows when a round opens."""

    worker: int
    num_workers: int
    round: int
    """The round that opens, counted from 1."""
    step: int
    """Steps this worker has taken so far."""
    lr: float
    last: Record | None
    """The newest complete record: that of the average before the last one."""


@dataclass(frozen=True)
class Round:
    """A round to come: it closes after ``steps`` or ``seconds``, whichever is first; neither: when the run ends.

    ``lr`` None leaves the learning rate to the user.
    """

    steps: int | None = None
    seconds: float | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", whole_number("Round.steps", self.steps, at_least=1))
        if self.seconds is not None:
            positive("Round.seconds", self.seconds)
        if self.lr is not None:
            positive("Round.lr", self.lr)


@runtime_checkable
class Schedule(Protocol):
    """When to average."""

    def open(self, now: Now) -> Round:
        """How long the round ``now.round`` of worker ``now.worker`` lasts."""
        ...

    def check(self, num_workers: int, overlap: int) -> None:
        """Raise a ValueError if this schedule cannot serve so many workers or such an overlap."""
        ...


@dataclass(frozen=True)
class every:  # noqa: N801 - a word in the user's sentence
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
class growing:  # noqa: N801
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


@dataclass(frozen=True)
class per_worker:  # noqa: N801
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
class timed:  # noqa: N801
    """Each worker takes as many steps as fit into ``seconds``, at least one: Algorithm 3 by the clock.

    The clock is looked at between steps. Fast workers take more steps and nobody waits for long; the theory
    (Theorem 3) asks for identical distributions of the workers' data.

    >>> timed(0.5).open(Now(worker=0, num_workers=2, round=1, step=0, lr=0.1, last=None))
    Round(steps=None, seconds=0.5, lr=None)
    """

    seconds: float
    by_clock: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("seconds", self.seconds)

    def open(self, now: Now) -> Round:
        if now.last is not None and now.last.round > 1 and now.last.period == 1:  # the first steps may be slow
            warnings.warn(
                f"timed({self.seconds:g}): a step takes as long as a round or longer, so rounds have one step",
                RuntimeWarning,
                stacklevel=2,
            )
        return Round(seconds=self.seconds)

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: an average lands so many steps into the next round, or when that closes."""


@dataclass(frozen=True)
class measured:  # noqa: N801
    """Steps in proportion to speed: Algorithm 3 by count. The slowest worker takes ``slowest`` steps a round.

    In the first rounds all take so many and are timed; then worker i takes slowest * (the longest step time) / (its
    own), rounded, with mean times that all workers know from the averages' headers.

    >>> measured(slowest=8).open(Now(worker=0, num_workers=2, round=1, step=0, lr=0.1, last=None))
    Round(steps=8, seconds=None, lr=None)
    """

    slowest: int = 8
    shares_speed: ClassVar[bool] = True
    """The averages' headers carry each worker's step time."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slowest", whole_number("slowest", self.slowest, at_least=1))

    def open(self, now: Now) -> Round:
        seconds = None if now.last is None else now.last.step_seconds
        if not seconds or min(seconds) <= 0:
            return Round(steps=self.slowest)
        return Round(steps=max(self.slowest, round(self.slowest * max(seconds) / seconds[now.worker])))

    def check(self, num_workers: int, overlap: int) -> None:
        if overlap > self.slowest:
            raise ValueError(f"overlap must be at most slowest {self.slowest}, got {overlap}")


@dataclass(frozen=True)
class once:  # noqa: N801
    """Average once, when the run ends: one-shot averaging (Zinkevich et al. 2010; McDonald et al. 2010).

    >>> once().open(Now(worker=0, num_workers=2, round=1, step=0, lr=0.1, last=None))
    Round(steps=None, seconds=None, lr=None)
    """

    def open(self, now: Now) -> Round:
        return Round()

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: the one average ends the run, so it is clamped to 0."""
