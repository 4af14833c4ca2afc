"""Buffers that are no BatchNorm statistics: masks, caches, counters, the ranges of observers, ...

- Floating and complex buffers: the mean of the workers' changes since all last agreed is added, so that a constant
  keeps its bits. Infinity stands for "nothing seen yet": a number that was not finite when all last agreed, such as an
  observer's range before the first batch, becomes the mean of the workers that have a finite one by now. A number that
  turns infinite is worker 0's if it does so there (a mask, filled at the first batch), and no change on another
  worker. A worker with a NaN that was none is bad.
- Counters, that is integers without a dimension: the largest.
- All other integers and booleans: as worker 0 has them.

What travels is exact for integers of any size, and has the same size on all workers, whatever happens to the buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from prsgd.replicas.names import plain

LARGE = 2.0**126
"""A number from here on, like infinity, has no place in a sum: float32 ends at 2^128."""

LIMBS, LIMB_BITS = 3, 22
"""A word of 64 bits travels as so many whole numbers, each exact in float32."""


class Home(NamedTuple):
    """Where a buffer lives (not the tensor itself: a module may be given another), and what it was at first."""

    buffers: dict[str, Tensor | None]
    key: str
    name: str
    shape: torch.Size
    dtype: torch.dtype
    persistent: bool


def home_of(module: nn.Module, key: str, prefix: str) -> Home:
    """Of the buffer that a module has under ``key``; ``prefix`` is the module's own name."""
    name = plain(f"{prefix}.{key}" if prefix else key)
    tensor = module._buffers[key]
    assert tensor is not None
    if is_lazy(tensor):
        raise ValueError(f"buffer {name!r} has no shape yet: run the model once before averaging it")
    persistent = key not in module._non_persistent_buffers_set
    return Home(module._buffers, key, name, tensor.shape, tensor.dtype, persistent)


def found(home: Home, worker: int) -> Tensor | None:
    """The buffer as it is now; None: it is left to its worker. An error if it can be neither."""
    tensor = home.buffers.get(home.key)
    if tensor is not None and tensor.shape == home.shape:
        return tensor.detach()
    if not home.persistent:
        return None
    raise wrong_shape(home, worker)


def wrong_shape(home: Home, worker: int) -> ValueError:
    tensor = home.buffers.get(home.key)
    shape = None if tensor is None else list(tensor.shape)
    return ValueError(
        f"worker {worker}: buffer {home.name!r} must keep its shape to be averaged, it was {list(home.shape)} when "
        f"LocalSGD was made and is {shape}: run the model once on a batch before that, if this gives the buffer its "
        "shape, or register it with persistent=False, and each worker keeps its own"
    )


def is_dense(tensor: Tensor) -> bool:
    """Is it a tensor as most are, be it one without a shape yet?"""
    return is_lazy(tensor) or (tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_nested)


def places(tensor: Tensor, like: Tensor) -> Tensor:
    """Of a tensor with the shape of ``like`` the part that has places of its own there: ``like`` may be expanded."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride())):
        if size > 1 and not stride:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class OtherBuffers:
    """The hosted workers' buffers at ``homes``.

    What all last agreed on is the caller's to keep, and given to each call: the floats in a dtype that holds all of
    them exactly, and [counters | words of other integers].
    """

    def __init__(self, homes: Sequence[Sequence[Home]], workers: range, num_workers: int) -> None:
        self._workers, self._num_workers = workers, num_workers
        self._floats = [[h for h in own if _is_float(h)] for own in homes]
        self._counters = [[h for h in own if _is_counter(h)] for own in homes]
        self._wholes = [[h for h in own if not _is_float(h) and not _is_counter(h)] for own in homes]
        self.homes = homes
        self._float_sizes = [h.shape.numel() * (1 + h.dtype.is_complex) for h in self._floats[0]]
        self._word_sizes = [_num_words(h) for h in self._wholes[0]]
        self._integer_sizes = [len(self._counters[0]), sum(self._word_sizes)]
        self.num_floats, self.num_integers = sum(self._float_sizes), sum(self._integer_sizes)
        self.width = self.num_floats + len(self._float_sizes)
        """Of a packed row: [changes | for each buffer, has it seen something where all had nothing?]"""
        self._integer_sum_sizes = [num_workers * LIMBS * self._integer_sizes[0], LIMBS * self._integer_sizes[1]]
        self.integer_sum_width = sum(self._integer_sum_sizes)
        """[counters of worker 0 | ... of worker N-1 | words of worker 0]"""

    def settled(self, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The floats and integers of the first hosted worker, which are those of all."""
        floats = torch.zeros(self.num_floats, dtype=self.float_dtype(dtype), device=device)
        integers = torch.zeros(self.num_integers, dtype=torch.long, device=device)
        return self._floats_of(0, floats), self._integers_of(0, integers)

    # Floats

    def float_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The one in which all floats are kept as they are, beside rows of ``dtype``."""
        wide = any(home.dtype in (torch.float64, torch.complex128) for home in self._floats[0])
        return torch.float64 if wide else dtype

    def pack(self, i: int, out: Tensor, agreed: Tensor) -> None:
        """out <- worker i's changes, and which buffers have seen something; finite unless it is bad."""
        if not self.width:
            return
        changes, seen = out.split([self.num_floats, len(self._float_sizes)])
        now = self._floats_of(i, agreed)
        change = torch.where(now == agreed, 0.0, now - agreed)
        changes.copy_(change)
        seen.zero_()
        if not (change.abs() < LARGE).all():
            self._pack_infinities(i, now, agreed, changes, seen)

    def _pack_infinities(self, i: int, now: Tensor, agreed: Tensor, changes: Tensor, seen: Tensor) -> None:
        """The same where a number is or was not finite, or so large that it cannot be summed."""
        was, is_number = agreed.abs() < LARGE, now.abs() < LARGE
        turned = _coded(now.to(changes.dtype)) if self._workers[i] == 0 else torch.zeros_like(changes)
        changes.copy_(torch.where(is_number, changes, turned))
        parts = (tensor.split(self._float_sizes) for tensor in (changes, was, is_number, now))
        for place, (change, known, number, value) in enumerate(zip(*parts)):
            # Of a buffer that has seen something the numbers themselves travel; where it has none, the sum is spoilt.
            sees = bool((number & ~known).any())
            seen[place] = sees
            first = torch.where(number, value.to(change.dtype), LARGE) if sees else torch.zeros_like(change)
            change.copy_(torch.where(known, change, first))
        changes.masked_fill_(now.isnan() & ~agreed.isnan(), float("nan"))

    def pooled_floats(self, sums: Tensor, count: Tensor, agreed: Tensor) -> Tensor:
        """From the sum of ``count`` workers' packed rows."""
        changes, seen = sums.split([self.num_floats, len(self._float_sizes)])
        moved = torch.where(changes == 0, agreed, agreed + changes / count)  # -0.0 + 0.0 would be 0.0
        summed = changes.abs() < LARGE
        if not seen.any() and summed.all():
            return moved
        seen = seen.repeat_interleave(torch.tensor(self._float_sizes, device=seen.device))
        first = torch.where(summed & (seen > 0), (changes / seen).to(agreed.dtype), agreed)
        turned = _decoded(changes).to(agreed.dtype)
        return torch.where(agreed.abs() < LARGE, torch.where(summed, moved, turned), first)

    def not_finite(self, i: int, agreed: Tensor) -> str | None:
        """The name of the first buffer for which worker i is bad."""
        if self._float_sizes:
            lost = self._floats_of(i, agreed).isnan() & ~agreed.isnan()
            for home, part in zip(self._floats[i], lost.split(self._float_sizes)):
                if part.any():
                    return home.name
        return None

    def _floats_of(self, i: int, agreed: Tensor) -> Tensor:
        """As they are now; those that are left to their worker, as agreed."""
        parts = list(agreed.split(self._float_sizes))
        for place, home in enumerate(self._floats[i]):
            tensor = found(home, self._workers[i])
            if tensor is not None:
                tensor = tensor.to(home.dtype)  # it may have been given another dtype since
                real = torch.view_as_real(tensor.resolve_conj()) if home.dtype.is_complex else tensor
                parts[place] = real.reshape(-1).to(agreed)
        return torch.cat(parts) if parts else agreed

    # Integers

    def integer_sums(self, agreed: Tensor, like: Tensor) -> Tensor:
        """The counters of the hosted workers above the agreed ones, and the bits in which worker 0's words differ."""
        counters, words = agreed.split(self._integer_sizes)
        slots = like.new_zeros(self._num_workers, LIMBS * len(counters))
        for i, worker in enumerate(self._workers if len(counters) else ()):
            slots[worker] = _to_limbs(self._counters_of(i, counters) - counters, like.dtype)
        turned = like.new_zeros(LIMBS * len(words))
        if len(words) and 0 in self._workers:
            own = self._words_of(self._workers.index(0), words)
            if not torch.equal(own, words):
                turned = _to_limbs(own ^ words, like.dtype)
        return torch.cat([slots.view(-1), turned])

    def pooled_integers(self, sums: Tensor, agreed: Tensor) -> Tensor:
        """From the sum of all workers' ``integer_sums``."""
        slots, turned = sums.split(self._integer_sum_sizes)
        counters, words = agreed.split(self._integer_sizes)
        if len(counters):
            counters = counters + _from_limbs(slots.view(self._num_workers, -1)).amax(dim=0)
        if turned.any():
            words = words ^ _from_limbs(turned)
        return torch.cat([counters, words])

    def _integers_of(self, i: int, agreed: Tensor) -> Tensor:
        counters, words = agreed.split(self._integer_sizes)
        return torch.cat([self._counters_of(i, counters), self._words_of(i, words)])

    def _counters_of(self, i: int, agreed: Tensor) -> Tensor:
        parts = list(agreed)
        for place, home in enumerate(self._counters[i]):
            tensor = found(home, self._workers[i])
            if tensor is not None:
                parts[place] = tensor.to(agreed)
        return torch.stack(parts) if parts else agreed

    def _words_of(self, i: int, agreed: Tensor) -> Tensor:
        words = agreed.clone()
        for home, part in zip(self._wholes[i], words.split(self._word_sizes)):
            tensor = found(home, self._workers[i])
            if tensor is not None:
                part.copy_(_to_words(tensor.to(home.dtype)))
        return words

    # Both

    def write(self, i: int, floats: Tensor, integers: Tensor) -> None:
        """Give worker i the buffers of all. What it has already is not touched, constants above all."""
        values: list[tuple[Home, Tensor]] = []
        own = self._floats_of(i, floats).split(self._float_sizes)
        for home, now, new in zip(self._floats[i], own, floats.split(self._float_sizes)):
            if not torch.equal(now.view(torch.uint8), new.view(torch.uint8)):  # two NaN are the same
                value = torch.complex(*new.view(-1, 2).unbind(1)) if home.dtype.is_complex else new
                values.append((home, value.view(home.shape)))
        counters, words = integers.split(self._integer_sizes)
        for home, now, new in zip(self._counters[i], self._counters_of(i, counters), counters):
            if not torch.equal(now, new):
                values.append((home, new))
        own = self._words_of(i, words).split(self._word_sizes)
        for home, now, new in zip(self._wholes[i], own, words.split(self._word_sizes)):
            if not torch.equal(now, new):
                values.append((home, _from_words(new, home)))
        pairs = [(t, value) for home, value in values if (t := found(home, self._workers[i])) is not None]
        if pairs:
            torch._foreach_copy_([places(t, t) for t, _ in pairs], [places(value, t) for t, value in pairs])


def _is_float(home: Home) -> bool:
    return home.dtype.is_floating_point or home.dtype.is_complex


def _is_counter(home: Home) -> bool:
    return not home.shape and not _is_float(home) and home.dtype != torch.bool


def _infinity(dtype: torch.dtype) -> float:
    """What infinity travels as: the largest number but one. The largest is in use, in masks."""
    largest = torch.tensor(torch.finfo(dtype).max, dtype=dtype)
    return float(largest.nextafter(torch.zeros_like(largest)))


def _coded(numbers: Tensor) -> Tensor:
    return torch.where(numbers.isinf(), numbers.sign() * _infinity(numbers.dtype), numbers)


def _decoded(numbers: Tensor) -> Tensor:
    return torch.where(numbers.abs() == _infinity(numbers.dtype), numbers.sign() * float("inf"), numbers)


def _num_words(home: Home) -> int:
    """Of 64 bits; a boolean is one of them."""
    bits = home.shape.numel() * (1 if home.dtype == torch.bool else 8 * home.dtype.itemsize)
    return -(-bits // 64)


def _to_words(tensor: Tensor) -> Tensor:
    words = _words(tensor.contiguous().view(-1).view(torch.uint8))
    # Eight bytes of 0 or 1 are a word: the product's highest byte has them as its bits, the first one lowest.
    return _words(((words * 0x0102040810204080) >> 56).to(torch.uint8)) if tensor.dtype == torch.bool else words


def _words(content: Tensor) -> Tensor:
    return torch.nn.functional.pad(content, (0, -len(content) % 8)).view(torch.long)


def _from_words(words: Tensor, home: Home) -> Tensor:
    content = words.view(torch.uint8)
    if home.dtype == torch.bool:
        content = (content.unsqueeze(1) >> torch.arange(8, device=words.device)).to(torch.uint8).view(-1) & 1
    return content[: home.shape.numel() * home.dtype.itemsize].view(home.dtype).view(home.shape)


def _to_limbs(words: Tensor, dtype: torch.dtype) -> Tensor:
    shifts = torch.arange(LIMBS, device=words.device) * LIMB_BITS
    return ((words.unsqueeze(-1) >> shifts) & ((1 << LIMB_BITS) - 1)).to(dtype).flatten(-2)


def _from_limbs(limbs: Tensor) -> Tensor:
    shifts = torch.arange(LIMBS, device=limbs.device) * LIMB_BITS
    words: Tensor = (limbs.unflatten(-1, (-1, LIMBS)).long() << shifts).sum(dim=-1)
    return words
