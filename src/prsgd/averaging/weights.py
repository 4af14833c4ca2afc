"""How much each worker counts in a mean.

A weight may depend on what a worker knows itself, and on one number of each worker that all know one average later:
``Weights.tell`` gives that number, and ``Brought.told`` has those of the average before, by worker, or what
``Weights.hear`` has made of all that were told.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from prsgd._check import one_of


@dataclass(frozen=True)
class Brought:
    """What a worker brings to an average.

    >>> import prsgd
    >>> weigh = prsgd.mean(weights=lambda brought: brought.steps ** 0.5).weights
    >>> weigh(Brought(worker=0, steps=16, samples=128))
    4.0
    """

    worker: int
    steps: int
    """That no average has seen."""
    samples: int
    """Logged for them."""
    told: tuple[float, ...] = ()
    """What every worker told with the average before, as ``Weights.hear`` keeps it; empty before the second, and unless
    the weights ``tells``."""
    _loss: Callable[[], float | None] = field(default=lambda: None, repr=False)
    _change: Callable[[], float | None] = field(default=lambda: None, repr=False)

    @property
    def loss(self) -> float | None:
        """Mean of what was logged in the round so far; None if nothing was."""
        return self._loss()

    @property
    def change(self) -> float | None:
        """How far its model is from where the workers last agreed; None if it does not count, or if nobody remembers
        that point (weights that ``measures`` have it remembered)."""
        return self._change()


class Weights(ABC):
    """How much a worker counts.

    >>> class ByLoss(Weights):
    ...     def weigh(self, brought):
    ...         return 1.0 if brought.loss is None else 1.0 / brought.loss
    >>> import prsgd
    >>> averaging = prsgd.mean(weights=ByLoss())
    >>> averaging.weights.weigh(Brought(worker=0, steps=4, samples=0, _loss=lambda: 0.5))
    2.0
    """

    tells: ClassVar[bool] = False
    """Does ``tell`` say something?"""
    measures: ClassVar[bool] = False
    """Do they go by ``Brought.change``? That takes one more row of memory, and a pass over the model."""

    @abstractmethod
    def weigh(self, brought: Brought) -> float:
        """The worker's weight, 0 or more; only proportions matter."""

    def tell(self, brought: Brought) -> float:
        """A number that all workers know one average later."""
        return 0.0

    def hear(self, known: tuple[float, ...], told: tuple[float, ...]) -> tuple[float, ...]:
        """What ``Brought.told`` is next: ``told`` are the workers' numbers that travelled with an average, by worker,
        ``known`` is what it was until then. It is saved with the run."""
        return told

    def distrusts(self, brought: Brought) -> bool:
        """Are the worker's buffers to be left out of the average too, not only its model?"""
        return False

    def left_out(self, told: tuple[float, ...]) -> tuple[int, ...]:
        """The workers that were left out of the average with which ``told`` travelled: they are given the mean and
        fresh optimizer state, and what they did since is dropped."""
        return ()


@dataclass(frozen=True)
class Uniform(Weights):
    """All the same: the paper."""

    def weigh(self, brought: Brought) -> float:
        return 1.0


@dataclass(frozen=True)
class BySteps(Weights):
    """By the steps of the round."""

    def weigh(self, brought: Brought) -> float:
        return float(brought.steps)


@dataclass(frozen=True)
class BySamples(Weights):
    """By the samples of the round."""

    def weigh(self, brought: Brought) -> float:
        if brought.steps and not brought.samples:
            raise ValueError('weights="samples" needs local.log(samples=...) before each optimizer.step()')
        return float(brought.samples)


@dataclass(frozen=True)
class ByFunction(Weights):
    """By a function of what the worker brings."""

    function: Callable[[Brought], float]

    def weigh(self, brought: Brought) -> float:
        return self.function(brought)


NAMED: dict[str, Weights] = {"uniform": Uniform(), "steps": BySteps(), "samples": BySamples()}

AnyWeights = str | Weights | Callable[[Brought], float]
"""As users give them: a name, a function of what a worker brings, or ``Weights``."""


def found(weights: AnyWeights) -> Weights:
    """The weights that are meant, or a ValueError.

    >>> found("steps").weigh(Brought(worker=0, steps=8, samples=256))
    8.0
    >>> found(lambda brought: 1 / (1 + brought.steps)).weigh(Brought(worker=0, steps=1, samples=0))
    0.5
    """
    if isinstance(weights, Weights):
        return weights
    if callable(weights) and not isinstance(weights, type):
        return ByFunction(weights)
    return NAMED[one_of("weights", weights, NAMED)]


def weighed(weights: Weights, brought: Brought) -> float:
    """The worker's weight, or a ValueError if somebody's function fails, or gives what cannot be a weight.

    >>> weighed(ByFunction(lambda brought: 1 / brought.loss), Brought(worker=1, steps=8, samples=0))
    Traceback (most recent call last):
    ValueError: no weight for worker 1, whose loss is None: local.log(loss=...) comes before optimizer.step()
    """
    try:
        weight = weights.weigh(brought)
    except TypeError as error:
        if brought.loss is not None:
            raise
        raise ValueError(
            f"no weight for worker {brought.worker}, whose loss is None: local.log(loss=...) comes before "
            "optimizer.step()"
        ) from error
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"a weight must be a number >= 0, got {weight!r} for worker {brought.worker}")
    return float(weight)
