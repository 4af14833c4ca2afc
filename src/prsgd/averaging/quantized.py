"""Changes in few bits: QSGD (Alistarh et al. 2017), TernGrad (Wen et al. 2017), signs with error feedback (Karimireddy
et al. 2019, after Seide et al. 2014).

A row is cut into buckets, each with a scale of its own that travels beside its codes:

    bits b     scale = largest magnitude; codes are levels from -scale to scale, rounded up or down at random so that
               the mean is right: 2^b - 1 of them, so that 0 is one (2 for b = 1)
    ternary    the same with the three levels -scale, 0, scale, five to a byte
    sign       scale = mean magnitude; one bit, and what it leaves out is added to the next change
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from prsgd._check import one_of, whole_number
from prsgd.averaging.changes import Gathered, Memory
from prsgd.averaging.packing import pack, packed_bytes, unpack
from prsgd.averaging.summed import check_weights


@dataclass(frozen=True)
class quantized(Gathered):  # noqa: N801 - a word in the user's sentence
    """Each worker sends its change since the last average in ``bits`` bits a number: 1 to 16, "ternary" or "sign".

    All workers gather all changes, so one sends (N - 1) times its own, where an all-reduce sends twice the model:
    few bits pay for few workers. Beside each ``bucket`` of numbers travels one scale.

    >>> quantized(4).num_bytes(1024), 1024 * 4  # half a byte each and two scales; as float32
    (520, 4096)
    """

    bits: int | str = 4
    bucket: int = 512
    weights: str = "uniform"
    seed: int = 0
    """Of the rounding: each worker's numbers depend on it, the worker and the average."""
    _memory: Memory = field(default_factory=Memory, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.bits, str):
            one_of("bits", self.bits, ("ternary", "sign"))
        elif isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= 16:
            raise ValueError(f'bits must be a whole number from 1 to 16, "ternary" or "sign", got {self.bits!r}')
        whole_number("bucket", self.bucket, at_least=1)
        whole_number("seed", self.seed, at_least=0)
        check_weights(self.weights)

    @property
    def keeps_residuals(self) -> bool:  # type: ignore[override]
        return self.bits == "sign"

    @property
    def levels(self) -> int:
        """How many different numbers a code can stand for."""
        if isinstance(self.bits, str):
            return {"ternary": 3, "sign": 2}[self.bits]
        return int(max(2, 2**self.bits - 1))

    def num_bytes(self, num_values: int, dtype: torch.dtype = torch.float32) -> int:
        return packed_bytes(num_values, self.levels) + self._num_buckets(num_values) * int(dtype.itemsize)

    def encode(self, change: Tensor, worker: int = 0) -> Tensor:
        buckets = self._buckets(change)
        if self.bits == "sign":
            scales = buckets.abs().sum(dim=1) / self._sizes(change)
            codes = buckets >= 0
        else:
            scales = buckets.abs().amax(dim=1)
            half = (self.levels - 1) / 2
            factors = torch.where(scales >= torch.finfo(change.dtype).tiny, half / scales, 0.0)
            noise = torch.rand(buckets.shape, generator=self._generator(worker, change), dtype=change.dtype,
                               device=change.device)  # fmt: skip
            noise.add_(half).addcmul_(buckets, factors.unsqueeze(1))
            codes = noise.floor_().clamp_(0, self.levels - 1).to(torch.int32 if self.levels > 256 else torch.uint8)
        packed = pack(codes.view(-1)[: len(change)], self.levels)
        return torch.cat([packed, scales.to(change.dtype).view(torch.uint8)])

    def add(self, encoded: Tensor, total: Tensor, weight: float = 1.0) -> None:
        num_values = len(total)
        width = packed_bytes(num_values, self.levels)
        codes = unpack(encoded[:width], self.levels, num_values)
        half = (self.levels - 1) / 2
        steps = encoded[width:].clone().view(total.dtype) * (weight / half)
        values = codes.to(total.dtype).sub_(half)
        whole = num_values // self.bucket * self.bucket
        if whole:
            inside = total[:whole].view(-1, self.bucket)
            inside.addcmul_(values[:whole].view(-1, self.bucket), steps[: whole // self.bucket].unsqueeze(1))
        if whole < num_values:
            total[whole:].addcmul_(values[whole:], steps[-1])

    def _num_buckets(self, num_values: int) -> int:
        return -(-num_values // self.bucket)

    def _buckets(self, change: Tensor) -> Tensor:
        """(buckets, bucket), the last one filled up with zeros."""
        missing = self._num_buckets(len(change)) * self.bucket - len(change)
        padded = torch.cat([change, change.new_zeros(missing)]) if missing else change
        return padded.view(-1, self.bucket)

    def _sizes(self, change: Tensor) -> Tensor:
        """How many numbers each bucket has."""
        num_buckets = self._num_buckets(len(change))
        sizes = change.new_full((num_buckets,), self.bucket)
        sizes[-1] -= num_buckets * self.bucket - len(change)
        return sizes

    def _generator(self, worker: int, change: Tensor) -> torch.Generator:
        seed = np.random.SeedSequence((self.seed, worker, self._memory.averages)).generate_state(1, np.uint64)[0]
        return torch.Generator(change.device).manual_seed(int(seed) >> 1)
