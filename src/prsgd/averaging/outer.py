"""An outer optimizer on what the workers' mean has changed: SlowMo and DiLoCo.

With x the point from which all workers started the round and m the mean of their models, the *outer gradient* is
x - m, and the workers move to the point that SGD with momentum makes of it:

    u <- momentum u + (x - m) / s        x <- x - lr s (u, or with Nesterov (x - m) / s + momentum u)

s is 1 (DiLoCo, Douillard et al. 2023: lr 0.7, Nesterov momentum 0.9) or the workers' own lr (SlowMo, Wang et al. 2020:
lr 1, momentum 0.7), which keeps u in the scale of gradients while that lr falls. lr 1 without momentum is the mean.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from prsgd._check import from_zero_to, positive
from prsgd.averaging.base import Averaging, Header, Landing
from prsgd.averaging.summed import check_weights, summed, weights_of
from prsgd.comm.base import Communicator, Then, Work


@dataclass
class _Memory:
    """What all workers know alike: the point they last agreed on, and the momentum."""

    point: Tensor | None = None
    velocity: Tensor | None = None


@dataclass(frozen=True)
class outer(Averaging):  # noqa: N801 - a word in the user's sentence
    """The mean of the workers' models is a step of an outer optimizer, with momentum over the rounds.

    The defaults are DiLoCo's, made for rounds of hundreds of steps of AdamW. With short rounds, or with momentum inside
    too, the two multiply: take a smaller ``momentum``. A run that ends within a round ends with the mean.

    >>> outer()
    outer(lr=0.7, momentum=0.9, nesterov=True, by_inner_lr=False, weights='uniform')
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    by_inner_lr: bool = False
    """Is the momentum kept in units of the workers' own lr? SlowMo does."""
    weights: str = "uniform"
    _memory: _Memory = field(default_factory=_Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        from_zero_to("momentum", self.momentum, 1.0)
        check_weights(self.weights)

    def start(self, point: Tensor) -> None:
        """All workers begin here."""
        self._memory.point, self._memory.velocity = point.clone(), None

    def launch(self, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        work = summed(comm, snap, header, weights_of(self.weights, header))
        return Then(work, lambda landing: self._step(landing, header.lr, comm.num_workers))

    def final(self, comm: Communicator, snap: Tensor, header: Header) -> Landing:
        return summed(comm, snap, header, weights_of(self.weights, header)).wait()

    def _step(self, landing: Landing, inner_lr: float, num_workers: int) -> Landing:
        if landing.target is None or (self.lr == 1 and not self.momentum):
            return landing
        if landing.header.sums.done == num_workers:  # what is left at the end is no round
            return landing
        began = time.perf_counter()
        memory = self._memory
        assert memory.point is not None, "LocalSGD calls start()"
        scale = inner_lr if self.by_inner_lr else 1.0
        change = (memory.point - landing.target) / scale
        memory.velocity = change.clone() if memory.velocity is None else self.momentum * memory.velocity + change
        direction = change + self.momentum * memory.velocity if self.nesterov else memory.velocity
        memory.point = memory.point - self.lr * scale * direction
        seconds = landing.copy_seconds + time.perf_counter() - began
        return replace(landing, target=memory.point.clone(), mean=landing.target, copy_seconds=seconds)

    def state_dict(self) -> dict[str, Any]:
        memory = self._memory
        named = {"point": memory.point, "velocity": memory.velocity}
        return {name: value.clone() for name, value in named.items() if value is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memory.point, self._memory.velocity = (
            None if state.get(name) is None else state[name].clone() for name in ("point", "velocity")
        )
