"""What runs of our own lost by averaging rarely. No theorem: one small network, at a few lengths.

The runs and their commands are in docs/results/length.md, the numbers in the JSON file beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

OF = "ResNet-8 on CIFAR-10 at 16x16, 8 workers, momentum 0.9"
LOST: Mapping[int, Mapping[int, float]] = {
    1_950: {4: 2.5, 8: 5.6, 16: 7.3, 32: 9.7},
    5_850: {4: 1.5, 8: 2.5, 16: 5.3, 32: 5.9},
    19_500: {4: -0.3, 8: 0.1, 16: 2.0, 32: 2.4},
    58_500: {4: -0.3, 8: 0.3, 16: 0.7, 32: 1.2},
}
"""Steps of each worker -> period -> points of test accuracy below period 1. A test compares them with the file."""


@dataclass(frozen=True)
class Seen:
    """What runs of one length lost."""

    of: str
    steps: int
    points_lost: Mapping[int, float]
    """By period."""


def seen(steps: int) -> Seen:
    """The runs whose length is nearest to ``steps``, on a logarithmic scale.

    >>> seen(10_000).steps, seen(10_000).points_lost[8]
    (5850, 2.5)
    """
    nearest = min(LOST, key=lambda length: abs(math.log(length / steps)))
    return Seen(OF, nearest, LOST[nearest])


def words(steps: int) -> str:
    """The same as sentences for whoever plans a run of ``steps`` steps."""
    found = seen(steps)
    (period, points), *rest = found.points_lost.items()
    lost = f"{points:.1f} points" if points > 0 else "nothing"
    others = "".join(f", {period} lost {points:.1f}" for period, points in rest)
    return (
        f"From our own runs, not from the theorems ({found.of}; of those at hand, {found.steps:,} steps are nearest to "
        f"yours): period {period} lost {lost} of test accuracy against period 1{others}. Longer runs "
        "lose less. `auto()`, on the command line `--method pr-sgd-auto`, finds the period while it trains."
    )
