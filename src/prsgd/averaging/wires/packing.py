"""Small whole numbers packed into bytes, and back.

A byte holds numbers that lie far apart in the row, not neighbours: all work is on long runs of memory, on any device.
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
    """Whole numbers below ``levels`` (at most 2^16) as bytes."""
    packed, shift = [], 0
    for part in _parts(levels):
        digits = codes if part == levels else (codes >> shift) & (part - 1)
        packed.append(_pack(digits.to(torch.uint8), part))
        shift += part.bit_length() - 1
    return packed[0] if len(packed) == 1 else torch.cat(packed)


def unpack(packed: Tensor, levels: int, count: int) -> Tensor:
    """The first ``count`` numbers that ``pack`` was given; uint8, or int32 where they need it."""
    parts = _parts(levels)
    if len(parts) == 1:
        return _unpack(packed, parts[0], count)
    codes = torch.zeros(count, dtype=torch.int32, device=packed.device)
    at = shift = 0
    for part in parts:
        size = -(-count // _per_byte(part))
        codes += _unpack(packed[at : at + size], part, count).int() << shift
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
    packed = lanes[-1].clone()
    for lane in lanes[:-1].flip(0):  # Horner's rule: the first lane is the lowest digit
        packed.mul_(levels).add_(lane)
    return packed


def _unpack(packed: Tensor, levels: int, count: int) -> Tensor:
    per_byte = _per_byte(levels)
    if per_byte == 1:
        return packed[:count]
    lanes = torch.empty(per_byte, len(packed), dtype=torch.uint8, device=packed.device)
    rest = packed
    for lane in lanes:
        if levels == 3:
            above = ((rest.int() * 171) >> 9).to(torch.uint8)  # a third, exact below 256
            torch.sub(rest, above * 3, out=lane)
        else:
            above = rest >> (levels.bit_length() - 1)
            torch.bitwise_and(rest, levels - 1, out=lane)
        rest = above
    return lanes.view(-1)[:count]


def _lanes(digits: Tensor, per_byte: int) -> Tensor:
    width = -(-len(digits) // per_byte)
    missing = width * per_byte - len(digits)
    padded = torch.cat([digits, digits.new_zeros(missing)]) if missing else digits
    return padded.view(per_byte, width)
