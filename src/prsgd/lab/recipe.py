"""How the lr of a run goes, and with which optimizer, as numbers: for runs, and for reports that tell of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

LR_DROPS = (1 / 2, 11 / 12)
"""Fractions of a run at which "drops" divides the lr by 10: epochs 150 and 275 of 300 in the paper."""
COSINE_END = 0.1
"""The share of the lr with which "cosine" ends."""
RECIPES = ("drops", "cosine")


@dataclass(frozen=True)
class Usual:
    """What an optimizer is run with unless something else is given."""

    lr: float
    recipe: str
    warmup: float
    """Of the run, before the recipe's first step at the full lr."""
    weight_decay: float
    clip: float
    """Of the norm of each worker's gradient; 0: none."""


OPTIMIZERS: Mapping[str, Usual] = {
    "sgd": Usual(lr=0.1, recipe="drops", warmup=0.0, weight_decay=0.0, clip=0.0),
    "adamw": Usual(lr=1e-3, recipe="cosine", warmup=0.05, weight_decay=0.1, clip=1.0),
}
ADAM_BETA2 = 0.95
"""Of the squares; the other beta is the momentum."""


def lr_at(lr: float, step: int, num_steps: int, *, recipe: str = "drops", warmup: int = 0) -> float:
    """The lr of step ``step`` + 1 of a run: it rises in a line over ``warmup`` steps, and then

    - "drops": is divided by 10 at 1/2 and again at 11/12 of the run;
    - "cosine": falls along half a cosine to a tenth of it.

    >>> [lr_at(0.1, step, 24) for step in (0, 11, 12, 21, 22)]
    [0.1, 0.1, 0.01, 0.01, 0.001]
    >>> [round(lr_at(1.0, step, 12, recipe="cosine", warmup=2), 3) for step in (0, 1, 2, 7, 12)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    if recipe == "drops":
        return lr / (1, 10, 100)[sum(step >= fraction * num_steps for fraction in LR_DROPS)]
    gone = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return lr * (COSINE_END + (1 - COSINE_END) * (1 + math.cos(math.pi * gone)) / 2)
