"""The largest changes alone (Aji and Heafield 2017; Stich, Cordonnier, Jaggi 2018): what is not sent is added to the
next change, so nothing is lost.

A row travels as: how many of the numbers lie in each run of 65,536, where in it each lies (2 bytes), the numbers. In
few bits a number is its sign and one of 2^(bits - 1) levels: all magnitudes are cut in two at their mean, each part at
its own mean, and so on, and a level is the mean of a part. There are no small numbers among the largest, so that two
levels already say them well; what they say wrong is added to the next change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prsgd._check import whole_number
from prsgd.averaging.wires.base import Gathered
from prsgd.averaging.wires.packing import pack, packed_bytes, unpack

RUN = 1 << 16
SAMPLE = 1 << 18


@dataclass(frozen=True)
class sparse(Gathered):  # noqa: N801 - a word in the user's sentence
    """Each worker sends the ``density`` share of its change that is largest in magnitude, and keeps the rest for later.

    All workers gather all shares, so one sends (N - 1) times its own: the largest numbers of a sum are not known before
    it is added up. With ``bits``, 1 to 8, it sends so many of each number, as SparseLoCo does with 2, and keeps for
    later what they leave out too.

    >>> sparse(0.01).num_bytes(1_000_000), 1_000_000 * 4  # 10,000 numbers in 6 bytes each; all as float32
    (60064, 4000000)
    >>> sparse(0.01, bits=2).num_bytes(1_000_000)  # in 2 1/4 bytes each, and two levels
    22572
    """

    density: float = 0.01
    bits: int | None = None

    @property
    def takes_shards(self) -> bool:
        return True

    @property
    def keeps_residuals(self) -> bool:
        return True

    def __post_init__(self) -> None:
        if isinstance(self.density, bool) or not isinstance(self.density, int | float) or not 0 < self.density <= 1:
            raise ValueError(f"density must be in (0, 1], got {self.density!r}")
        if self.bits is not None:
            whole_number("bits", self.bits, at_least=1, at_most=8)

    def num_kept(self, num_values: int) -> int:
        """How many of a model's ``num_values`` numbers are sent: that share of them, and at least one."""
        return min(num_values, max(1, round(self.density * num_values)))

    def num_bytes(self, num_values: int, dtype: torch.dtype = torch.float32) -> int:
        kept = self.num_kept(num_values)
        return _num_runs(num_values) * 4 + kept * 2 + self._value_bytes(kept, dtype)

    def _value_bytes(self, kept: int, dtype: torch.dtype) -> int:
        one = int(dtype.itemsize)
        return kept * one if self.bits is None else packed_bytes(kept, 2**self.bits) + (1 << self.bits - 1) * one

    def encode(self, change: Tensor, worker: int = 0, average: int = 0) -> Tensor:
        places = _largest(change.abs(), self.num_kept(len(change))).sort().values
        counts = torch.bincount(places // RUN, minlength=_num_runs(len(change))).int()
        offsets = (places % RUN).to(torch.int16)  # from 32,768 on as negative numbers
        return torch.cat([counts.view(torch.uint8), offsets.view(torch.uint8), self._packed(change[places])])

    def add(self, encoded: Tensor, total: Tensor, weight: float = 1.0) -> None:
        num_runs, kept = _num_runs(len(total)), self.num_kept(len(total))
        counts, offsets, values = encoded.split([num_runs * 4, kept * 2, self._value_bytes(kept, total.dtype)])
        runs = torch.arange(num_runs, device=total.device).repeat_interleave(counts.clone().view(torch.int32))
        places = runs * RUN + offsets.clone().view(torch.int16).long() % RUN
        total.index_add_(0, places, self._unpacked(values.clone(), kept, total.dtype), alpha=weight)

    def _packed(self, values: Tensor) -> Tensor:
        if self.bits is None:
            return values.view(torch.uint8)
        parts, levels = _parted(values.abs(), self.bits - 1)
        return torch.cat([pack(2 * parts + (values < 0), 2**self.bits), levels.view(torch.uint8)])

    def _unpacked(self, encoded: Tensor, kept: int, dtype: torch.dtype) -> Tensor:
        if self.bits is None:
            return encoded.view(dtype)
        packed, levels = encoded.split([packed_bytes(kept, 2**self.bits), 2 ** (self.bits - 1) * dtype.itemsize])
        codes = unpack(packed, 2**self.bits, kept).long()
        values = levels.clone().view(dtype)[codes >> 1]
        return torch.where(codes % 2 == 1, -values, values)


def _parted(sizes: Tensor, cuts: int) -> tuple[Tensor, Tensor]:
    """To which of 2^cuts parts each belongs, cut in two at its mean so often, and the mean of each part."""
    parts = torch.zeros_like(sizes, dtype=torch.long)
    for cut in range(cuts):
        parts = 2 * parts + (sizes > _means(sizes, parts, 2**cut)[parts])
    return parts, _means(sizes, parts, 2**cuts)


def _means(sizes: Tensor, parts: Tensor, num_parts: int) -> Tensor:
    """Of each part; 0 where there is none. Summed in float64, since float32 may not hold the sum of what it holds."""
    totals = torch.zeros(num_parts, dtype=torch.float64, device=sizes.device).index_add_(0, parts, sizes.double())
    return (totals / torch.bincount(parts, minlength=num_parts).clamp(min=1)).to(sizes.dtype)


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
