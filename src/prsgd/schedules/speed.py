"""Rounds that take all workers as long, whatever their speed: Algorithm 3, by the clock or by measured counts."""

from __future__ import annotations

from dataclasses import dataclass

from prsgd._check import positive, whole_number
from prsgd._warn import warn
from prsgd.schedules.base import ByClock, Now, Round, SharesSpeed


@dataclass(frozen=True)
class timed(ByClock):  # noqa: N801
    """Each worker takes as many steps as fit into ``seconds``, at least one: Algorithm 3 by the clock.

    The clock is looked at between steps. Fast workers take more steps and nobody waits for long; the theory
    (Theorem 3) asks for identical distributions of the workers' data.

    >>> timed(0.5).open(Now(worker=0, num_workers=2, round=1, step=0, lr=0.1, last=None))
    Round(steps=None, seconds=0.5, lr=None)
    """

    seconds: float

    def __post_init__(self) -> None:
        positive("seconds", self.seconds)

    def open(self, now: Now) -> Round:
        if now.last is not None and now.last.round > 1 and now.last.period == 1:  # the first steps may be slow
            warn(
                f"timed({self.seconds:g}): a step takes as long as a round or longer, so rounds have one step",
                RuntimeWarning,
            )
        return Round(seconds=self.seconds)

    def check(self, num_workers: int, overlap: int) -> None:
        """Every overlap works: an average lands so many steps into the next round, or when that closes."""


@dataclass(frozen=True)
class measured(SharesSpeed):  # noqa: N801
    """Steps in proportion to speed: Algorithm 3 by count. The slowest worker takes ``slowest`` steps a round.

    In the first rounds all take so many and are timed; then worker i takes slowest * (the longest step time) / (its
    own), rounded, with mean times that all workers know from the averages' headers.

    >>> measured(slowest=8).open(Now(worker=0, num_workers=2, round=1, step=0, lr=0.1, last=None))
    Round(steps=8, seconds=None, lr=None)
    """

    slowest: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "slowest", whole_number("slowest", self.slowest, at_least=1))

    def open(self, now: Now) -> Round:
        seconds = None if now.last is None else now.last.step_seconds
        if not seconds or seconds[now.worker] <= 0:  # 0: unknown, or not there
            return Round(steps=self.slowest)
        return Round(steps=max(self.slowest, round(self.slowest * max(seconds) / seconds[now.worker])))

    def check(self, num_workers: int, overlap: int) -> None:
        if overlap > self.slowest:
            raise ValueError(f"overlap must be at most slowest {self.slowest}, got {overlap}")
