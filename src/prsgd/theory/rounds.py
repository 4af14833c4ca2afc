"""The rounds of Algorithm 2 as numbers, without the loop."""

from __future__ import annotations

from collections.abc import Iterator

from prsgd._check import positive, whole_number
from prsgd.schedules.base import Now
from prsgd.schedules.growing import growing


def growing_rounds(
    *, workers: int, rounds: int, lr_scale: float = 1.0, lr_cap: float | None = None
) -> Iterator[tuple[int, float]]:
    """(K^s, lr_s) for s = 1 ... ``rounds``, as the schedule ``growing`` gives them.

    >>> list(growing_rounds(workers=1, rounds=2))
    [(1, 1.0), (2, 0.6299605249474366)]
    """
    workers = whole_number("workers", workers, at_least=1)
    schedule = growing(lr_scale=positive("lr_scale", lr_scale), lr_cap=lr_cap)
    for number in range(1, whole_number("rounds", rounds, at_least=1) + 1):
        found = schedule.open(Now(worker=0, num_workers=workers, round=number, step=0, lr=1.0, last=None))
        assert found.steps is not None
        assert found.lr is not None
        yield found.steps, found.lr


def rounds_for_steps(*, workers: int, steps: int) -> int:
    """The most rounds whose K^s add up to at most ``steps``, and at least one.

    >>> rounds_for_steps(workers=1, steps=3)
    2
    """
    steps = whole_number("steps", steps, at_least=1)
    taken = count = 0
    for length, _ in growing_rounds(workers=workers, rounds=steps):
        taken += length
        if taken > steps:
            break
        count += 1
    return max(1, count)
