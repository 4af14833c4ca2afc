"""An outer optimizer on what the workers' mean has changed: SlowMo and DiLoCo.

With x the point from which all workers started the round and m the mean of their models, the *outer gradient* is
x - m, and the workers move to the point that SGD with momentum makes of it:

    u <- momentum u + (x - m) / s        x <- x - lr s (u, or with Nesterov (x - m) / s + momentum u)

s is 1 (DiLoCo, Douillard et al. 2023: lr 0.7, Nesterov momentum 0.9) or the workers' own lr (SlowMo, Wang et al. 2020:
lr 1, momentum 0.7), which keeps u in the scale of gradients while that lr falls. lr 1 without momentum is the mean. In
a round that closes with an lr of 0, or so small that x - m is the rounding of a mean (warm-up, the end of a cosine), s
says nothing: workers move to the mean, u waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from prsgd._check import from_zero_to, positive
from prsgd.averaging.base import Averaging, Header, Landing, Memory, Setting
from prsgd.averaging.mean import mean
from prsgd.averaging.weights import Brought
from prsgd.comm.base import Communicator, Then, Work


@dataclass(frozen=True)
class outer(Averaging):  # noqa: N801 - a word in the user's sentence
    """The mean of the workers' models is a step of an outer optimizer, with momentum over the rounds.

    The defaults are DiLoCo's, made for rounds of hundreds of steps of AdamW. With short rounds, or with momentum inside
    too, the two multiply: take a smaller ``momentum``. A run that ends within a round ends with the mean.

    Weights and the wire are the mean's: ``outer(1.0, 0.0, of=mean(wire=sparse(0.02, bits=2)))`` is SparseLoCo,
    where what a worker has left out takes the place of momentum.

    >>> outer(momentum=0.5)
    outer(lr=0.7, momentum=0.5, nesterov=True, by_inner_lr=False, of=mean(weights='uniform', wire=None, clip=None))
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    by_inner_lr: bool = False
    """Is the momentum kept in units of the workers' own lr? SlowMo does."""
    of: mean = field(default_factory=mean)
    """The mean that it steps along, with its weights and its wire."""

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        from_zero_to("momentum", self.momentum, 1.0)
        if not isinstance(self.of, mean):
            raise ValueError(f"of must be a mean(), got {self.of!r}")

    @property
    def knows_drift(self) -> bool:
        return self.of.knows_drift

    @property
    def is_one_sum(self) -> bool:
        return self.of.is_one_sum

    @property
    def takes_shards(self) -> bool:
        return self.of.takes_shards

    @property
    def parts_evenly(self) -> bool:
        return self.of.parts_evenly

    @property
    def tells(self) -> bool:
        return self.of.tells

    def tell(self, brought: Brought) -> float:
        return self.of.tell(brought)

    def hear(self, known: tuple[float, ...], told: tuple[float, ...]) -> tuple[float, ...]:
        return self.of.hear(known, told)

    def distrusts(self, brought: Brought) -> bool:
        return self.of.distrusts(brought)

    def left_out(self, told: tuple[float, ...]) -> tuple[int, ...]:
        return self.of.left_out(told)

    def measure(self, memory: Memory, snap: Tensor) -> tuple[Callable[[], float | None], ...]:
        return self.of.measure(memory, snap)

    def check(self, setting: Setting) -> None:
        self.of.check(setting)

    def init(self, point: Tensor, hosted: int) -> Memory:
        """What the mean remembers, whose ``point`` is where outer steps lead; ``velocity`` from the first one on."""
        return {"point": point.clone(), **self.of.init(point, hosted)}

    def met(self, memory: Memory, point: Tensor) -> Memory:
        return {**memory, "point": point}

    def weigh(self, header: Header) -> Sequence[float]:
        return self.of.weigh(header)

    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        work = self.of.launch(memory, comm, snap, header)
        return Then(work, lambda landing: self._step(memory, landing, len(comm.members)))

    def _step(self, memory: Memory, landing: Landing, num_workers: int) -> Landing:
        if landing.target is None or (self.lr == 1 and not self.momentum):
            return landing
        began = time.perf_counter()
        inside = {**memory, **(landing.memory or {})}
        change = memory["point"] - landing.target
        scale = landing.header.sums.mean_lr(num_workers) if self.by_inner_lr else 1.0  # the same for all
        if self.by_inner_lr and (not scale or _is_noise(change, landing.target, landing.header, num_workers)):
            return replace(landing, memory={**inside, "point": landing.target.clone()})
        change /= scale
        velocity = change.clone() if "velocity" not in memory else self.momentum * memory["velocity"] + change
        direction = change + self.momentum * velocity if self.nesterov else velocity
        point = memory["point"] - self.lr * scale * direction
        seconds = landing.copy_seconds + time.perf_counter() - began
        return replace(
            landing, target=point, memory={**inside, "point": point, "velocity": velocity}, copy_seconds=seconds
        )


def _is_noise(change: Tensor, mean: Tensor, header: Header, num_workers: int) -> bool:
    """Is it no more than what the mean of so many equal models is off by rounding?"""
    rounding = torch.finfo(mean.dtype).eps * num_workers**0.5
    length, of_mean = (header.whole_length(float(torch.linalg.vector_norm(row))) for row in (change, mean))
    return bool(length <= rounding * of_mean)
