"""Changes in few bits: QSGD (Alistarh et al. 2017), TernGrad (Wen et al. 2017), signs with error feedback (Karimireddy
et al. 2019, after Seide et al. 2014).

A row is cut into buckets, each with a scale of its own that travels beside its codes:

    bits b     scale = largest magnitude; codes are levels from -scale to scale, rounded up or down at random so that
               the mean is right: 2^b - 1 of them, so that 0 is one (2 for b = 1)
    ternary    the same with the three levels -scale, 0, scale, five to a byte
    sign       scale = mean magnitude; one bit, and what it leaves out is added to the next change
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prsgd._check import one_of, whole_number
from prsgd.averaging.wires.base import Gathered
from prsgd.averaging.wires.packing import pack, packed_bytes, unpack

CACHED = 1 << 18
"""Numbers that fit into a core's cache, roughly."""


@dataclass(frozen=True)
class quantized(Gathered):  # noqa: N801 - a word in the user's sentence
    """Each worker sends its change since the last average in ``bits`` bits a number: 1 to 16, "ternary" or "sign".

    All workers gather all changes, so one sends (N - 1) times its own, where an all-reduce sends twice the model:
    few bits pay for few workers. Beside each ``bucket`` of numbers travels one scale. 2 bits have the three levels of
    "ternary", and take its 1.6 bits.

    >>> quantized(4).num_bytes(1024), 1024 * 4  # half a byte each and two scales; as float32
    (520, 4096)
    """

    bits: int | str = 4
    bucket: int = 512
    seed: int = 0
    """Of the rounding: each worker's numbers depend on it, the worker and the average."""

    def __post_init__(self) -> None:
        if isinstance(self.bits, str) and not self.bits.isdigit():
            one_of("bits", self.bits, ("ternary", "sign"))
        elif isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= 16:
            raise ValueError(f'bits must be a whole number from 1 to 16, "ternary" or "sign", got {self.bits!r}')
        whole_number("bucket", self.bucket, at_least=1)
        whole_number("seed", self.seed, at_least=0)

    @property
    def keeps_residuals(self) -> bool:
        return self.bits == "sign"

    @property
    def levels(self) -> int:
        """How many different numbers a code can stand for."""
        if isinstance(self.bits, str):
            return {"ternary": 3, "sign": 2}[self.bits]
        return int(max(2, 2**self.bits - 1))

    def num_bytes(self, num_values: int, dtype: torch.dtype = torch.float32) -> int:
        return self._packed_bytes(num_values) + -(-num_values // self._bucket(num_values)) * int(dtype.itemsize)

    def encode(self, change: Tensor, worker: int = 0, average: int = 0) -> Tensor:
        encoded = torch.empty(self.num_bytes(len(change), change.dtype), dtype=torch.uint8, device=change.device)
        generator = None if self.bits == "sign" else self._generator(worker, average, change.device)
        packed, scales = self._split(encoded, change)
        run, bucket = self._run(len(change)), self._bucket(len(change))
        found, at = torch.empty_like(scales), 0
        for values, place in zip(change.split(run), found.split(run // bucket)):
            codes = self._codes(_buckets(values, bucket), len(values), place, generator)
            part = pack(codes.view(-1)[: len(values)], self.levels)
            packed[at : at + len(part)] = part
            at += len(part)
        encoded[at:] = found.view(torch.uint8)
        return encoded

    def add(self, encoded: Tensor, total: Tensor, weight: float = 1.0) -> None:
        half, at = (self.levels - 1) / 2, 0
        packed, scales = self._split(encoded, total)
        run, bucket = self._run(len(total)), self._bucket(len(total))
        for inside, steps in zip(total.split(run), (scales * (weight / half)).split(run // bucket)):
            width = packed_bytes(len(inside), self.levels)
            values = unpack(packed[at : at + width], self.levels, len(inside)).to(total.dtype).sub_(half)
            at += width
            whole = len(inside) // bucket
            size = whole * bucket
            inside[:size].view(whole, bucket).addcmul_(values[:size].view(whole, bucket), steps[:whole].unsqueeze(1))
            if size < len(inside):
                inside[size:].addcmul_(values[size:], steps[-1])

    def _bucket(self, num_values: int) -> int:
        return min(self.bucket, num_values)

    def _run(self, num_values: int) -> int:
        """So many numbers at a time: whole buckets and whole bytes, and few enough to stay in a core's cache."""
        whole = 40 * self._bucket(num_values)
        return whole * max(1, CACHED // whole)

    def _packed_bytes(self, num_values: int) -> int:
        runs, rest = divmod(num_values, self._run(num_values))
        return runs * packed_bytes(self._run(num_values), self.levels) + packed_bytes(rest, self.levels)

    def _split(self, encoded: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        width = self._packed_bytes(len(like))
        return encoded[:width], encoded[width:].clone().view(like.dtype)

    def _codes(self, buckets: Tensor, count: int, scales: Tensor, generator: torch.Generator | None) -> Tensor:
        """The levels of a run of ``count`` numbers, whose scales are written to ``scales``."""
        if generator is None:  # signs
            sizes = scales.new_full((len(buckets),), buckets.shape[1])
            sizes[-1] -= buckets.numel() - count
            torch.div(buckets.abs().sum(dim=1), sizes, out=scales)
            return buckets >= 0
        torch.amax(buckets.abs(), dim=1, out=scales)
        half = (self.levels - 1) / 2
        factors = torch.where(scales >= torch.finfo(scales.dtype).tiny, half / scales, 0.0)
        places = _noise(buckets, generator).add_(half).addcmul_(buckets, factors.unsqueeze(1)).floor_()
        return places.clamp_(0, self.levels - 1).to(torch.int32 if self.levels > 256 else torch.uint8)

    def _generator(self, worker: int, average: int, device: torch.device) -> torch.Generator:
        seed = np.random.SeedSequence((self.seed, worker, average)).generate_state(1, np.uint64)[0]
        return torch.Generator(device).manual_seed(int(seed) >> 1)


def _buckets(values: Tensor, bucket: int) -> Tensor:
    """(buckets, bucket), the last one filled up with zeros."""
    missing = -len(values) % bucket
    return (torch.cat([values, values.new_zeros(missing)]) if missing else values).view(-1, bucket)


def _noise(like: Tensor, generator: torch.Generator) -> Tensor:
    """Between 0 and 1, the mean of each 1/2: 65,536 values suffice, and four of them come with one draw."""
    draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    draws.random_(-(2**63), None, generator=generator)
    return draws.view(torch.int16)[: like.numel()].view_as(like).to(like.dtype).add_(32768.5).div_(65536)
