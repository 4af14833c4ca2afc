"""The paper's averaging: the mean of all workers' models, in one all-reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing
from prsgd.averaging.changes import Changes, Memory
from prsgd.averaging.summed import check_weights, summed, weighted_sum, weights_of
from prsgd.comm.base import Both, Communicator, Then, Work

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class mean(Averaging):  # noqa: N801 - a word in the user's sentence
    """The mean of the workers' models, each counting the same (the paper), or by its steps or samples of the round.

    ``weights="samples"`` needs ``local.log(samples=...)`` *before* each ``optimizer.step()``.
    ``dtype=torch.bfloat16`` halves the bytes: what travels is each model's change since the last average, rounded.

    >>> mean()
    mean(weights='uniform', dtype=None)
    """

    weights: str = "uniform"
    dtype: torch.dtype | None = None
    _memory: Memory = field(default_factory=Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.dtype is not None and self.dtype not in HALF:
            raise ValueError(f"dtype must be torch.bfloat16, torch.float16 or None, got {self.dtype!r}")
        if self.dtype is torch.float16 and self.weights != "uniform":
            raise ValueError(
                f'weights "{self.weights}" times changes may be more than float16 holds: use dtype=torch.bfloat16'
            )

    def start(self, point: Tensor) -> None:
        """All workers begin here."""
        if self.dtype is not None:
            self._rounded(self.dtype).start(point)

    def launch(self, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        if self.dtype is not None:
            return self._rounded(self.dtype).launch(comm, snap, header)
        return summed(comm, snap, header, weights_of(self.weights, header))

    def final(self, comm: Communicator, snap: Tensor, header: Header) -> Landing:
        if self.dtype is not None:
            return self._rounded(self.dtype).final(comm, snap, header)
        return self.launch(comm, snap, header).wait()

    def state_dict(self) -> dict[str, Any]:
        return {} if self.dtype is None else self._rounded(self.dtype).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.dtype is not None:
            self._rounded(self.dtype).load_state_dict(state)

    def _rounded(self, dtype: torch.dtype) -> _Rounded:
        return _Rounded(self.weights, dtype, self._memory)


@dataclass(frozen=True)
class _Rounded(Changes):
    """Changes summed in half precision; optimizer state and the header in full."""

    weights: str
    dtype: torch.dtype
    _memory: Memory

    def _send(
        self, comm: Communicator, snap: Tensor, weights: Sequence[float], header: Header
    ) -> Work[tuple[Callable[[], Tensor], Header]]:
        point, num_extras = self._point(), header.extras.shape[1]
        total = torch.zeros_like(point)
        for row, weight in zip(snap, weights):
            if weight:
                total.add_(row - point, alpha=weight)
        changes = total.to(self.dtype)
        extras = point.new_zeros(num_extras)
        weighted_sum(header.extras, weights, out=extras)
        full = torch.cat([extras, header.tail().to(point.dtype)])

        def arrived(_: tuple[Tensor, Tensor]) -> tuple[Callable[[], Tensor], Header]:
            landed = header.landed(full[:num_extras], full[num_extras:])
            landed = replace(landed, extras=landed.extras / max(landed.sums.weight, 1e-30))
            return lambda: changes.to(point.dtype), landed

        return Then(Both(comm.all_reduce(full), comm.all_reduce(changes)), arrived)
