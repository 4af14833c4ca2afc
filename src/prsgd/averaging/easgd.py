"""Elastic averaging (Zhang, Choromanska, LeCun 2015): workers are pulled towards a centre that follows their mean.

    x_i <- x_i - alpha (x_i - centre)        centre <- centre + beta (mean_i x_i - centre)

both with what was before. Workers keep apart, and explore; alpha is beta / N unless it is given, so that a worker pulls
the centre as much as the centre pulls the worker. A run ends with one exact mean.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing, Memory
from prsgd.averaging.summed import summed
from prsgd.comm.base import Communicator, Then, Work


@dataclass(frozen=True)
class easgd(Averaging):  # noqa: N801 - a word in the user's sentence
    """Pull each worker by ``alpha`` of its way towards a centre, and the centre by ``beta`` of its way towards the
    workers' mean. ``alpha`` is beta / N unless given.

    >>> easgd(alpha=0.1)
    easgd(alpha=0.1, beta=0.9)
    """

    alpha: float | None = None
    beta: float = 0.9

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if name == "alpha" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), got {value!r}")

    @property
    def takes_shards(self) -> bool:
        return True

    def init(self, point: Tensor, hosted: int) -> Memory:
        return {"centre": point.clone()}

    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        own = snap.clone()  # a lone model's lies where the sum will
        alpha = self.beta / len(comm.members) if self.alpha is None else self.alpha
        return Then(summed(comm, snap, header), lambda landing: self._pull(memory, landing, own, alpha, header.counts))

    def _pull(self, memory: Memory, landing: Landing, own: Tensor, alpha: float, counts: tuple[bool, ...]) -> Landing:
        if landing.target is None:
            return landing
        began = time.perf_counter()
        before = memory["centre"]
        targets = own.add_(before - own, alpha=alpha)
        centre = before + self.beta * (landing.target - before)
        for row, count in zip(targets, counts):
            if not count:  # not finite, or without news: at the centre
                row.copy_(centre)
        seconds = landing.copy_seconds + time.perf_counter() - began
        return replace(landing, target=targets, memory={"centre": centre}, copy_seconds=seconds)
