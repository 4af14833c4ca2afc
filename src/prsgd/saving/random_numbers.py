"""Where the random numbers of a process are: of torch, Python and, if it is imported, numpy."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Plain numbers and tensors, to go on from. What is hundreds of numbers is a tensor, which is saved much faster."""
    version, numbers, rest = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, torch.tensor(numbers), rest]}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), *rest]
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Go on from what ``random_state`` said."""
    torch.set_rng_state(state["torch"])
    version, numbers, rest = state["python"]
    random.setstate((version, tuple(_listed(numbers)), rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and "numpy" in sys.modules:
        kind, keys, *others = state["numpy"]
        sys.modules["numpy"].random.set_state((kind, _listed(keys), *others))


def _listed(numbers: torch.Tensor | Sequence[int]) -> Sequence[int]:
    """States of older versions have lists."""
    return numbers.tolist() if isinstance(numbers, torch.Tensor) else numbers
