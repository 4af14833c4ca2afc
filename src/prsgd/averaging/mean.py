"""The paper's averaging: the mean of all workers' models, in one all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing, Memory
from prsgd.averaging.changes import Arrived, Changes
from prsgd.averaging.summed import check_weights, summed, weighted_sum, weights_of
from prsgd.comm.base import Both, Communicator, Then, Work

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class mean(Averaging):  # noqa: N801 - a word in the user's sentence
    """The mean of the workers' models, each counting the same (the paper), or by its steps or samples of the round.

    ``weights="samples"`` needs ``local.log(samples=...)`` *before* each ``optimizer.step()``.
    ``dtype=torch.bfloat16`` halves the bytes: what travels is each model's change since the last average, rounded.
    ``torch.float16`` has more digits and a narrow range: what is too small or too large for it is kept, and goes with
    a later change, which takes one more row of memory per worker.

    >>> mean()
    mean(weights='uniform', dtype=None)
    """

    weights: str = "uniform"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_weights(self.weights)
        if self.dtype is not None and self.dtype not in HALF:
            raise ValueError(f"dtype must be torch.bfloat16, torch.float16 or None, got {self.dtype!r}")
        if self.dtype is torch.float16 and self.weights != "uniform":
            raise ValueError(
                f'weights "{self.weights}" times changes may be more than float16 holds: use dtype=torch.bfloat16'
            )

    def init(self, point: Tensor, hosted: int) -> Memory:
        return {} if self.dtype is None else _Rounded(self.weights, self.dtype).init(point, hosted)

    def weigh(self, header: Header) -> Sequence[float]:
        return weights_of(self.weights, header)

    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        if self.dtype is not None:
            return _Rounded(self.weights, self.dtype).launch(memory, comm, snap, header)
        return summed(comm, snap, header, self.weigh(header))


@dataclass(frozen=True)
class _Rounded(Changes):
    """Changes rounded to half precision by each worker, and summed in it; optimizer state and the header in full."""

    weights: str
    dtype: torch.dtype

    @property
    def keeps_residuals(self) -> bool:  # type: ignore[override]
        return self.dtype is torch.float16

    def _send(
        self,
        memory: Memory,
        comm: Communicator,
        snap: Tensor,
        weights: Sequence[float],
        header: Header,
        kept: dict[int, Tensor],
    ) -> Work[Arrived]:
        point, num_extras = memory["point"], header.extras.shape[1]
        changes = torch.zeros_like(point, dtype=self.dtype)
        for i, weight in enumerate(weights):
            if weight:
                change = self._change(memory, snap, i)
                rounded = self._rounded(change, weight, comm.num_workers)
                changes += rounded  # in half precision, as processes add up theirs
                if self.keeps_residuals:
                    kept[i] = change - rounded.to(point.dtype)
        extras = point.new_zeros(num_extras)
        weighted_sum(header.extras, weights, out=extras)
        full = torch.cat([extras, header.tail().to(point.dtype)])

        def arrived(_: tuple[Tensor, Tensor]) -> Arrived:
            landed = header.landed(full[:num_extras], full[num_extras:])
            landed = replace(landed, extras=landed.extras / max(landed.sums.weight, 1e-30))
            return Arrived(landed, lambda: changes.to(point.dtype))

        return Then(Both(comm.all_reduce(full), comm.all_reduce(changes)), arrived)

    def _rounded(self, change: Tensor, weight: float, num_workers: int) -> Tensor:
        if not self.keeps_residuals:
            return (change * weight if weight != 1.0 else change).to(self.dtype)
        most = torch.finfo(self.dtype).max / num_workers  # so that no sum is more than it holds
        return change.clamp(-most, most).to(self.dtype)
