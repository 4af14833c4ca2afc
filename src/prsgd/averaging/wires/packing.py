"""Small whole numbers packed into bytes, and back, along the last dimension.

A byte holds numbers that lie far apart in the line, not neighbours: all work is on long runs of memory, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_bytes(count: int, levels: int) -> int:
    """How many bytes ``count`` numbers below ``levels`` take.

    >>> packed_bytes(1000, 2), packed_bytes(1000, 3), packed_bytes(1000, 16), packed_bytes(1000, 256)
    (125, 200, 500, 1000)
    """
    return sum(-(-count // _per_byte(part)) for part in _parts(levels))


def pack(codes: Tensor, levels: int) -> Tensor:
    """Whole numbers below ``levels`` (at most 2^16) as bytes: (..., count) -> (..., bytes)."""
    parts, packed, shift = _parts(levels), [], 0
    for part in parts:
        digits = codes if len(parts) == 1 else (codes >> shift) & (part - 1)
        packed.append(_pack(digits.to(torch.uint8), part))
        shift += part.bit_length() - 1
    return packed[0] if len(packed) == 1 else torch.cat(packed, dim=-1)


def unpack(packed: Tensor, levels: int, count: int) -> Tensor:
    """The ``count`` numbers of each line that ``pack`` was given; uint8, or int32 where they need it."""
    parts = _parts(levels)
    if len(parts) == 1:
        return _unpack(packed, parts[0], count)
    codes = torch.zeros(*packed.shape[:-1], count, dtype=torch.int32, device=packed.device)
    at = shift = 0
    for part in parts:
        size = -(-count // _per_byte(part))
        codes += _unpack(packed[..., at : at + size], part, count).int() << shift
        at, shift = at + size, shift + part.bit_length() - 1
    return codes


def _parts(levels: int) -> list[int]:
    """Numbers of b bits as groups of 8, 4, 2 and 1 bits, each packed on its own; three levels as they are."""
    if levels == 3:
        return [3]
    bits, parts = (levels - 1).bit_length(), []
    for size in (8, 8, 4, 2, 1):
        if bits >= size:
            parts.append(1 << size)
            bits -= size
    return parts


def _per_byte(levels: int) -> int:
    return 5 if levels == 3 else 8 // (levels.bit_length() - 1)


def _pack(digits: Tensor, levels: int) -> Tensor:
    per_byte = _per_byte(levels)
    if per_byte == 1:
        return digits
    lanes = _lanes(digits, per_byte)
    packed = lanes[-1]
    for lane in reversed(lanes[:-1]):  # Horner's rule: the first lane is the lowest digit
        packed = torch.add(lane, packed, alpha=levels)
    return packed


def _unpack(packed: Tensor, levels: int, count: int) -> Tensor:
    per_byte, width = _per_byte(levels), packed.shape[-1]
    if per_byte == 1:
        return packed[..., :count]
    lanes = torch.empty(*packed.shape[:-1], per_byte, width, dtype=torch.uint8, device=packed.device)
    rest = packed
    for lane in lanes.unbind(-2)[:-1]:
        if levels == 3:
            above = ((rest.int() * 171) >> 9).to(torch.uint8)  # a third, exact below 256
            torch.sub(rest, above * 3, out=lane)
        else:
            above = rest >> (levels.bit_length() - 1)
            torch.bitwise_and(rest, levels - 1, out=lane)
        rest = above
    lanes.select(-2, -1).copy_(rest)
    return lanes.flatten(-2)[..., :count]


def _lanes(digits: Tensor, per_byte: int) -> tuple[Tensor, ...]:
    missing = -digits.shape[-1] % per_byte
    if missing:
        digits = torch.cat([digits, digits.new_zeros(*digits.shape[:-1], missing)], dim=-1)
    return digits.reshape(*digits.shape[:-1], per_byte, -1).unbind(-2)
