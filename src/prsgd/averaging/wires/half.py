"""Changes in half precision: rounded by each worker, and summed in it; optimizer state and the header in full."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prsgd.averaging.base import Header
from prsgd.averaging.summed import weighted_sum
from prsgd.averaging.wires.base import Arrived, Changes, Wire, fresh, runs
from prsgd.comm.base import Both, Communicator, Then, Work

DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class half(Wire):  # noqa: N801 - a word in the user's sentence
    """Two bytes a number: ``torch.bfloat16``, or ``torch.float16``, which has more digits and a narrow range: what is
    too small or too large for it is kept, and goes with a later change, for one more row of memory per worker.

    >>> half()
    half(dtype=torch.bfloat16)
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be torch.bfloat16 or torch.float16, got {self.dtype!r}")

    @property
    def keeps_residuals(self) -> bool:
        return self.dtype is torch.float16

    @property
    def takes_shards(self) -> bool:
        return True

    def check_weights(self, weights: object) -> None:
        if self.dtype is torch.float16 and weights != "uniform":
            raise ValueError(
                f"weights {weights!r} times changes may be more than float16 holds: use half(torch.bfloat16)"
            )

    def send(self, comm: Communicator, changes: Changes, like: Tensor, header: Header) -> Work[Arrived]:
        num_extras = header.extras.shape[1]
        weights, kept = [0.0] * len(header.bad), {}
        total = fresh(like, self.dtype)
        if not changes:
            total.zero_()
        for nth, change in enumerate(changes):
            weights[change.place] = change.weight
            if self.keeps_residuals:
                kept[change.place] = fresh(like)
            for run in runs(len(like)):
                values = change.values(run)
                rounded = self._rounded(values, change.weight, comm.num_workers)
                total[run] = rounded if nth == 0 else total[run] + rounded  # in half precision, as processes add theirs
                if self.keeps_residuals:
                    torch.sub(values, rounded, out=kept[change.place][run])
        extras = like.new_zeros(num_extras)
        weighted_sum(header.extras, weights, out=extras)
        full = torch.cat([extras, header.tail().to(like.dtype)])

        def arrived(_: tuple[Tensor, Tensor]) -> Arrived:
            landed = header.landed(full[:num_extras], full[num_extras:])
            landed = replace(landed, extras=landed.extras / (landed.sums.weight or 1.0))
            return Arrived(landed, lambda point: _moved(point, total, landed.sums.weight), kept)

        return Then(Both(comm.all_reduce(full), comm.all_reduce(total)), arrived)

    def _rounded(self, change: Tensor, weight: float, num_workers: int) -> Tensor:
        if not self.keeps_residuals:
            return (change * weight if weight != 1.0 else change).to(self.dtype)
        most = torch.finfo(self.dtype).max / num_workers  # so that no sum is more than it holds
        return change.clamp(-most, most).to(self.dtype)


def _moved(point: Tensor, total: Tensor, weight: float) -> Tensor:
    """point + total / weight, run by run: a row of the total in full precision would be mapped only to be read once."""
    target, by = fresh(point), point.new_tensor(weight)
    for run in runs(len(point)):
        torch.addcdiv(point[run], total[run].to(point.dtype), by, out=target[run])
    return target
