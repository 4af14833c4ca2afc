"""Changes in few bits: QSGD (Alistarh et al. 2017), TernGrad (Wen et al. 2017), signs with error feedback (Karimireddy
et al. 2019, after Seide et al. 2014).

A row is cut into buckets. Each travels as a line of bytes, its codes and then a scale of its own:

    bits b     scale = largest magnitude; codes are levels from -scale to scale, rounded up or down at random so that
               the mean is right: 2^b - 1 of them, so that 0 is one (2 for b = 1)
    ternary    the same with the three levels -scale, 0, scale, five to a byte
    sign       scale = mean magnitude; one bit, and what it leaves out is added to the next change
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from prsgd._check import one_of, whole_number
from prsgd.averaging.wires.base import CACHED, Change, fresh
from prsgd.averaging.wires.packing import pack, packed_bytes, unpack
from prsgd.averaging.wires.scattered import WAYS, Scattered


@dataclass(frozen=True)
class quantized(Scattered):  # noqa: N801 - a word in the user's sentence
    """Each worker sends its change since the last average in ``bits`` bits a number: 1 to 16, "ternary" or "sign".

    Beside each ``bucket`` of numbers travels one scale. 2 bits have the three levels of "ternary", and take its 1.6
    bits. Two workers gather both changes. More of them add up a part each, and pack the sum again for all others: then
    each sends 2 (N - 1) / N of its change, as in an all-reduce, and numbers are rounded twice, both times right on
    average. With ``way="gather"``, and where a model has no bucket for every worker, each sends its own change (N - 1)
    times, rounded once. Sums of signs travel in 4 bits.

    >>> quantized(4).num_bytes(1024), 1024 * 4  # half a byte each and two scales; as float32
    (520, 4096)
    """

    bits: int | str = 4
    bucket: int = 512
    seed: int = 0
    """Of the rounding: each worker's numbers depend on it, the worker and the average."""
    way: str = "auto"
    """How changes are added up: all workers "gather" all, or they "scatter" them, each part to one; "auto": whichever
    sends less, but small models, of which there is no bucket for everybody, are gathered."""

    def __post_init__(self) -> None:
        if isinstance(self.bits, str) and not self.bits.isdigit():
            one_of("bits", self.bits, ("ternary", "sign"))
        elif isinstance(self.bits, bool) or not isinstance(self.bits, int) or not 1 <= self.bits <= 16:
            raise ValueError(f'bits must be a whole number from 1 to 16, "ternary" or "sign", got {self.bits!r}')
        whole_number("bucket", self.bucket, at_least=1)
        whole_number("seed", self.seed, at_least=0)
        one_of("way", self.way, WAYS)

    @property
    def takes_shards(self) -> bool:
        return True

    @property
    def keeps_residuals(self) -> bool:
        return self.bits == "sign"

    @property
    def levels(self) -> int:
        """How many different numbers a code can stand for."""
        if isinstance(self.bits, str):
            return {"ternary": 3, "sign": 2}[self.bits]
        return int(max(2, 2**self.bits - 1))

    @property
    def line_values(self) -> int:
        return self.bucket

    @property
    def of_sums(self) -> quantized:
        return replace(self, bits=4) if self.bits == "sign" else self  # signs of sums would need a memory of their own

    def num_bytes(self, num_values: int, dtype: torch.dtype = torch.float32) -> int:
        whole, rest = divmod(num_values, self.bucket)
        return whole * self._line_bytes(self.bucket, dtype) + (self._line_bytes(rest, dtype) if rest else 0)

    def encode(self, change: Tensor, worker: int = 0, average: int = 0, *, again: bool = False) -> Tensor:
        encoded = torch.empty(self.num_bytes(len(change), change.dtype), dtype=torch.uint8, device=change.device)
        room = self._room(change, (worker, average, *[1] * again))
        for part, place, count in self._runs(len(change), change.dtype):
            self._pack(change[part].view(count, -1), encoded[place].view(count, -1), room)
        return encoded

    def write(self, change: Change, like: Tensor, out: Tensor) -> Tensor | None:
        if self.keeps_residuals:
            return super().write(change, like, out)
        room = self._room(like, (change.worker, change.average))
        values = torch.empty_like(like[: len(room.noise)])
        for part, place, count in self._runs(len(like), like.dtype):
            made = change.values(part, values[: part.stop - part.start])
            self._pack(made.view(count, -1), out[place].view(count, -1), room)
        return None

    def add(self, encoded: Tensor, total: Tensor, weight: float = 1.0) -> None:
        room = torch.empty_like(total[: self._most(len(total))])
        for part, place, count in self._runs(len(total), total.dtype):
            inside = total[part].view(count, -1)
            inside.addcmul_(*self._unpacked(encoded[place].view(count, -1), weight, room[: inside.numel()]))

    def decode_sum(self, rows: Sequence[Tensor], weights: Sequence[float], like: Tensor) -> Tensor:
        total = torch.empty_like(like)
        for _ in self._sums(rows, weights, total):
            pass
        return total

    def moved(self, point: Tensor, rows: Sequence[Tensor], weights: Sequence[float], weight: float) -> Tensor:
        target, by = fresh(point), point.new_tensor(weight)
        for part, total in self._sums(rows, weights, torch.empty_like(point[: self._most(len(point))]), len(point)):
            torch.addcdiv(point[part], total, by, out=target[part])
        return target

    def _sums(
        self, rows: Sequence[Tensor], weights: Sequence[float], out: Tensor, num_values: int | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """By runs, all rows of one before the next, as long as it is in the cache: where it lies, and the sum of what
        the rows stand for, which lies there in ``out``, or of ``num_values``, if they are more, at its beginning."""
        each = [(row, weight) for row, weight in zip(rows, weights) if weight]
        room = torch.empty_like(out[: self._most(len(out))])
        for part, place, count in self._runs(num_values or len(out), out.dtype):
            total = out[part] if num_values is None else out[: part.stop - part.start]
            lines = total.view(count, -1)
            for i, (row, weight) in enumerate(each):
                values, steps = self._unpacked(row[place].view(count, -1), weight, room[: len(total)])
                torch.mul(values, steps, out=lines) if i == 0 else lines.addcmul_(values, steps)
            yield part, total if each else total.zero_()

    def _unpacked(self, lines: Tensor, weight: float, room: Tensor) -> tuple[Tensor, Tensor]:
        """The codes of lines, 0 in the middle, in ``room``, and what one more is worth."""
        half, scale_bytes = (self.levels - 1) / 2, room.element_size()
        scales = lines[:, -scale_bytes:].clone(memory_format=torch.contiguous_format).view(room.dtype)
        values = room.view(len(lines), -1)
        values.copy_(unpack(lines[:, :-scale_bytes], self.levels, values.shape[1]))
        return values.sub_(half), scales * (weight / half)

    def _runs(self, num_values: int, dtype: torch.dtype) -> Iterator[tuple[slice, slice, int]]:
        """Where so many numbers lie, where the bytes that stand for them, in how many lines: whole lines that stay in a
        core's cache, then the last one, which may be shorter."""
        run, at, place = self._most(num_values), 0, 0
        while at < num_values:
            left = num_values - at
            size = min(run, left - left % self.bucket) or left
            width = self.num_bytes(size, dtype)
            yield slice(at, at + size), slice(place, place + width), max(1, size // self.bucket)
            at, place = at + size, place + width

    def _most(self, num_values: int) -> int:
        """How many of so many numbers a run has at most."""
        return min(num_values, max(1, CACHED // self.bucket) * self.bucket)

    def _line_bytes(self, num_values: int, dtype: torch.dtype) -> int:
        return packed_bytes(num_values, self.levels) + int(dtype.itemsize)

    def _room(self, like: Tensor, drawn_for: tuple[int, ...]) -> _Room:
        most = self._most(len(like))
        # torch is slow to make uint8 of floating-point numbers.
        codes = like.new_empty(most, dtype=torch.int8 if self.levels < 128 else torch.int32)
        return _Room(
            _generator(np.random.SeedSequence((self.seed, *drawn_for)), like.device), like.new_empty(most), codes
        )

    def _pack(self, values: Tensor, lines: Tensor, room: _Room) -> None:
        """Numbers (count, bucket) as lines of bytes."""
        scales, codes = self._signs(values) if self.bits == "sign" else self._levels(values, room)
        packed = pack(codes, self.levels)
        lines[:, : packed.shape[1]] = packed
        lines[:, packed.shape[1] :] = scales.view(torch.uint8)

    def _signs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The scale of each line (count, 1), and its codes."""
        return values.abs().sum(dim=1, keepdim=True).div_(values.shape[1]), values >= 0

    def _levels(self, values: Tensor, room: _Room) -> tuple[Tensor, Tensor]:
        sizes, codes = (part[: values.numel()].view_as(values) for part in (room.noise, room.codes))
        scales = torch.amax(torch.abs(values, out=sizes), dim=1, keepdim=True)
        half = (self.levels - 1) / 2
        factors = half / scales
        factors = torch.where(torch.isfinite(factors), factors, 0.0)  # of what is next to nothing too
        places = room.draw(values, half).addcmul_(values, factors)
        if self.levels > 31:  # with fewer, rounding is less than the 2^-17 by which a draw stays below 1
            places.clamp_(max=self.levels - 1)
        codes.copy_(places)  # what is below 0 by rounding is cut off with the fractions
        if self.levels > 256:
            return scales, codes
        return scales, codes.view(torch.uint8) if codes.dtype == torch.int8 else codes.to(torch.uint8)


@dataclass(frozen=True)
class _Room:
    """Memory for a run of numbers: fresh memory for each would cost more than what is done in it."""

    generator: np.random.BitGenerator | torch.Generator
    noise: Tensor
    codes: Tensor

    def draw(self, like: Tensor, above: float) -> Tensor:
        """``above``, and 0 to 1 more, the mean of each 1/2: 65,536 values suffice, and four come with one draw."""
        draws = _drawn(self.generator, -(-like.numel() // 4)).view(torch.int16)
        noise = self.noise[: like.numel()].view_as(like).copy_(draws[: like.numel()].view_as(like))
        return torch.add(noise.new_tensor(above + 0.5 + 2.0**-17), noise, alpha=2.0**-16, out=noise)


def _generator(seed: np.random.SeedSequence, device: torch.device) -> np.random.BitGenerator | torch.Generator:
    """numpy's takes half the time of torch's, which makes them where they are needed."""
    if device.type == "cpu":
        return np.random.SFC64(seed)
    return torch.Generator(device).manual_seed(int(seed.generate_state(1, np.uint64)[0]) >> 1)


def _drawn(generator: np.random.BitGenerator | torch.Generator, count: int) -> Tensor:
    """So many whole numbers of 64 bits, all of them alike."""
    if isinstance(generator, torch.Generator):
        room = torch.empty(count, dtype=torch.int64, device=generator.device)
        return room.random_(-(2**63), None, generator=generator)
    return torch.from_numpy(generator.random_raw(count).view(np.int64))
