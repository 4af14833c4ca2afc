"""What a worker tells another: plain numbers and tensors, as two tensors of bytes. Nothing is ever unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_TENSOR = "tensor:"
"""What stands for one in the JSON, with its dtype, its shape and where its bytes begin."""


def packed(state: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Its words, as JSON, and the bytes of its tensors, one after another.

    >>> words, numbers = packed({"round": 3, "point": torch.ones(2), "lrs": (0.1, 0.2)})
    >>> len(numbers), unpacked(words, numbers)
    (8, {'round': 3, 'point': tensor([1., 1.]), 'lrs': [0.1, 0.2]})
    """
    parts: list[Tensor] = []

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            dtype, begin = str(value.dtype).removeprefix("torch."), sum(len(part) for part in parts)
            parts.append(value.detach().cpu().contiguous().view(-1).view(torch.uint8))
            return {_TENSOR: [dtype, list(value.shape), begin]}
        if isinstance(value, Mapping):
            return {str(name): plain(of_it) for name, of_it in value.items()}
        return [plain(of_it) for of_it in value] if isinstance(value, list | tuple) else value

    words = json.dumps(plain(state)).encode()
    return _bytes(words), torch.cat([torch.empty(0, dtype=torch.uint8), *parts])


def unpacked(words: Tensor, numbers: Tensor) -> dict[str, Any]:
    """Back from what was ``packed``; a ValueError if it cannot be that."""

    def found(value: Any) -> Any:
        if isinstance(value, list):
            return [found(of_it) for of_it in value]
        if not isinstance(value, dict):
            return value
        if _TENSOR not in value:
            return {name: found(of_it) for name, of_it in value.items()}
        name, shape, begin = value[_TENSOR]
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a tensor of dtype {name!r} was sent")
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= begin <= begin + size <= len(numbers):
            raise ValueError(f"a tensor of {size} bytes was announced, and {len(numbers) - begin} came")
        return numbers[begin : begin + size].clone().view(dtype).view(shape)

    state = found(json.loads(bytes(words.tolist())))
    if not isinstance(state, dict):
        raise ValueError(f"a {type(state).__name__} was sent in place of a state")
    return state


def _bytes(words: bytes) -> Tensor:
    return torch.frombuffer(bytearray(words), dtype=torch.uint8)
