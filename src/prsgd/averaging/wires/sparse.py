"""The largest changes alone (Aji and Heafield 2017; Stich, Cordonnier, Jaggi 2018): what is not sent is added to the
next change, so nothing is lost.

A row travels as: how many of the numbers lie in each run of 65,536, where in it each lies (2 bytes), the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prsgd.averaging.wires.base import Gathered

RUN = 1 << 16
SAMPLE = 1 << 18


@dataclass(frozen=True)
class sparse(Gathered):  # noqa: N801 - a word in the user's sentence
    """Each worker sends the ``density`` share of its change that is largest in magnitude, and keeps the rest for later.

    All workers gather all shares, so one sends (N - 1) times its own: the largest numbers of a sum are not known before
    it is added up.

    >>> sparse(0.01).num_bytes(1_000_000), 1_000_000 * 4  # 10,000 numbers in 6 bytes each; all as float32
    (60064, 4000000)
    """

    density: float = 0.01

    @property
    def takes_shards(self) -> bool:
        return True

    @property
    def keeps_residuals(self) -> bool:
        return True

    def __post_init__(self) -> None:
        if isinstance(self.density, bool) or not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density!r}")

    def num_kept(self, num_values: int) -> int:
        """Of so many numbers; at least one."""
        return min(num_values, max(1, round(self.density * num_values)))

    def num_bytes(self, num_values: int, dtype: torch.dtype = torch.float32) -> int:
        return _num_runs(num_values) * 4 + self.num_kept(num_values) * (2 + dtype.itemsize)

    def encode(self, change: Tensor, worker: int = 0, average: int = 0) -> Tensor:
        places = _largest(change.abs(), self.num_kept(len(change))).sort().values
        counts = torch.bincount(places // RUN, minlength=_num_runs(len(change))).int()
        offsets = (places % RUN).to(torch.int16)  # from 32,768 on as negative numbers
        return torch.cat([counts.view(torch.uint8), offsets.view(torch.uint8), change[places].view(torch.uint8)])

    def add(self, encoded: Tensor, total: Tensor, weight: float = 1.0) -> None:
        num_runs, kept = _num_runs(len(total)), self.num_kept(len(total))
        counts, offsets, values = encoded.split([num_runs * 4, kept * 2, kept * total.element_size()])
        runs = torch.arange(num_runs, device=total.device).repeat_interleave(counts.clone().view(torch.int32))
        places = runs * RUN + offsets.clone().view(torch.int16).long() % RUN
        total.index_add_(0, places, values.clone().view(total.dtype), alpha=weight)


def _largest(sizes: Tensor, count: int) -> Tensor:
    """The places of the ``count`` largest, sought above what a sample says: to rank all numbers would take long."""
    sample = sizes[:: max(1, len(sizes) // SAMPLE)]
    rank = round(1.5 * count / len(sizes) * len(sample)) + 50
    if rank < len(sample) // 2:
        likely = (sizes >= sample.topk(rank, sorted=True).values[-1]).nonzero().view(-1)
        if len(likely) >= count:
            return likely[sizes[likely].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices


def _num_runs(num_values: int) -> int:
    return -(-num_values // RUN)
