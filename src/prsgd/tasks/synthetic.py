"""A smooth, non-convex problem whose constants are known, to hold the theory against.

    f(x) = a sum_j w(x_j - c_j),  w(u) = u^2 / (1 + u^2),     F(x; xi) = f(x) + <xi, x>

with noise vectors xi that are the data: their mean is zero to rounding, so f is the mean of F over them. They come in
groups (their labels) with means of their own: workers that share all groups minimise the same function, workers with
different groups (a Dirichlet split) different ones, whose mean is still f.

w has |w'| <= 9 / (8 sqrt 3), reached at u = 1 / sqrt 3, and -1/2 <= w'' <= 2, so

    L = 2 a,    ||grad f||^2 <= 27/64 a^2 m,    E||grad F - grad f||^2 = mean ||xi||^2 = sigma^2,    f* = 0 at x = c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prsgd.tasks.base import Data, Task

DIMENSION = 32
NUM_SAMPLES = 4096
NUM_GROUPS = 8
NOISE = 0.2
"""Standard deviation of each coordinate of xi within its group."""
TILT = 0.1
"""Of each coordinate of the groups' means."""
SCALE = 1.0
"""a."""


@dataclass(frozen=True)
class Constants:
    """What the theorems ask for; ``noise`` and ``grad_second_moment`` for batches of one sample drawn from all."""

    smoothness: float
    """L"""
    noise: float
    """sigma^2"""
    grad_second_moment: float
    """G^2"""
    start_value: float
    """f(x^0)"""
    best_value: float = 0.0
    """f*"""


def _centre() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.empty(DIMENSION).uniform_(0.5, 2.0, generator=generator)


def wells(u: Tensor) -> Tensor:
    """u^2 / (1 + u^2).

    >>> wells(torch.tensor([0.0, 1.0, 3.0]))
    tensor([0.0000, 0.5000, 0.9000])
    """
    squared = u.square()
    return squared / (1 + squared)


class Wells(nn.Module):
    """x, which starts at 0; called with noise vectors (n, m) it gives F(x; xi) of each: (n,)."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(DIMENSION))
        self.register_buffer("centre", _centre(), persistent=False)

    def forward(self, noise: Tensor) -> Tensor:
        return SCALE * wells(self.x - self.centre).sum() + noise @ self.x


def mean_value(values: Tensor, _: Any) -> Tensor:
    """The loss of a model that returns its losses."""
    return values.mean()


def load() -> Data:
    """Noise vectors and their groups; the test set is one vector of zeros, so that the test loss is f itself."""
    generator = torch.Generator().manual_seed(8)
    groups = torch.arange(NUM_SAMPLES) % NUM_GROUPS
    tilts = TILT * torch.randn(NUM_GROUPS, DIMENSION, generator=generator, dtype=torch.float64)
    noise = NOISE * torch.randn(NUM_SAMPLES, DIMENSION, generator=generator, dtype=torch.float64) + tilts[groups]
    noise = (noise - noise.mean(dim=0)).float()
    return Data(noise, groups, torch.zeros(1, DIMENSION), torch.zeros(1, dtype=torch.long))


def constants() -> Constants:
    """The constants of this problem.

    >>> found = constants()
    >>> found.smoothness, round(found.grad_second_moment - found.noise, 6)
    (2.0, 13.5)
    """
    sigma2 = float(load().train_x.double().square().sum(dim=1).mean())
    start = float(SCALE * wells(-_centre().double()).sum())
    return Constants(2 * SCALE, sigma2, 27 / 64 * SCALE**2 * DIMENSION + sigma2, start)


TASK = Task(
    name="synthetic",
    summary="a smooth non-convex function with known L, sigma^2, G^2 and f*",
    models={"wells": Wells},
    load=load,
    loss_fn=mean_value,
    metric=None,
    defaults={"batch_size": 8, "epochs": 20, "momentum": 0.0},
)
