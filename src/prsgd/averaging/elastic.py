"""Elastic averaging (Zhang, Choromanska, LeCun 2015): workers are pulled towards a centre that follows their mean.

    x_i <- x_i - alpha (x_i - centre)        centre <- centre + beta (mean_i x_i - centre)

both with what was before. Workers keep apart, and explore; alpha is beta / N unless it is given, so that a worker pulls
the centre as much as the centre pulls the worker. A run ends with one exact mean.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing
from prsgd.averaging.summed import summed
from prsgd.comm.base import Communicator, Then, Work


@dataclass
class _Memory:
    """The centre variable: all processes keep the same."""

    centre: Tensor | None = None


@dataclass(frozen=True)
class elastic(Averaging):  # noqa: N801 - a word in the user's sentence
    """Pull each worker by ``alpha`` of its way towards a centre (None: beta / N), and the centre by ``beta`` of its way
    towards the workers' mean.

    >>> elastic(alpha=0.1)
    elastic(alpha=0.1, beta=0.9)
    """

    alpha: float | None = None
    beta: float = 0.9
    _memory: _Memory = field(default_factory=_Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("alpha", self.alpha), ("beta", self.beta)):
            if name == "alpha" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
                raise ValueError(f"{name} must be in (0, 1), got {value!r}")

    def start(self, point: Tensor) -> None:
        """All workers and the centre begin here."""
        self._memory.centre = point.clone()

    def launch(self, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        own = snap.clone()  # a lone model's lies where the sum will
        alpha = self.beta / comm.num_workers if self.alpha is None else self.alpha
        n = comm.num_workers
        return Then(summed(comm, snap, header), lambda landing: self._pull(landing, own, alpha, header.counts, n))

    def final(self, comm: Communicator, snap: Tensor, header: Header) -> Landing:
        return summed(comm, snap, header).wait()

    def _pull(self, landing: Landing, own: Tensor, alpha: float, counts: tuple[bool, ...], num_workers: int) -> Landing:
        if landing.target is None or landing.header.sums.done == num_workers:  # a run ends with the mean
            return landing
        began = time.perf_counter()
        centre = self._memory.centre
        assert centre is not None, "LocalSGD calls start()"
        targets = own.add_(centre - own, alpha=alpha)
        self._memory.centre = centre + self.beta * (landing.target - centre)
        for row, count in zip(targets, counts):
            if not count:  # not finite, or without news: at the centre
                row.copy_(self._memory.centre)
        seconds = landing.copy_seconds + time.perf_counter() - began
        return replace(landing, target=targets, mean=landing.target, copy_seconds=seconds)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._memory.centre is None else {"centre": self._memory.centre.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._memory.centre = None if state.get("centre") is None else state["centre"].clone()
