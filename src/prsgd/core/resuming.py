"""What must fit before a saved state is taken over: a state of another run is refused before anything changes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from prsgd._warn import warn
from prsgd.averaging.base import Averaging, Memory
from prsgd.errors import CheckpointError, PrsgdError

_MODEL = ("num_parameters", "dtype", "fragments")
_LASTING = ("workers", *_MODEL, "overlap", "optimizer_state")
"""What of a run's parts may not change, beside its optimizers: in no case, and with as many workers."""


def described(part: object) -> str:
    """A schedule or an averaging in words that are the same in every process and every run: no addresses of memory."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(part)) if is_dataclass(part) else type(part).__name__


def kinds(optimizers: Sequence[Optimizer]) -> list[str]:
    """What they are, in words that a state holds.

    >>> kinds([torch.optim.SGD([torch.zeros(1)], lr=0.1)])
    ['SGD']
    """
    return [type(optimizer).__name__ for optimizer in optimizers]


def check_optimizers(saved: Mapping[str, Any], own: Sequence[str]) -> None:
    """Refuse a setup with other kinds of optimizers: torch takes one's state for another's, and goes on with its lr and
    without what it does not have, or ends at the next step."""
    theirs = saved["optimizers"]
    if theirs != own:
        raise CheckpointError(
            f"the state is of a run with {' and '.join(map(str, theirs))}, this one has {' and '.join(own)}: an "
            "optimizer goes on from the state of its own kind only"
        )


def check_setup(saved: Mapping[str, Any], own: Mapping[str, Any], *, other_workers: bool = False) -> None:
    """Refuse what cannot go on from there, and say what goes on otherwise than it began."""
    for name in _MODEL if other_workers else _LASTING:
        if saved[name] != own[name]:
            words = name.replace("_", " ")
            raise CheckpointError(f"the state is of a run with {words} {saved[name]!r}, this one has {own[name]!r}")
    check_optimizers(saved, own["optimizers"])
    was, now = ([f"{name}()" for name in re.findall(r"(\w+)\(", setup["averaging"])] for setup in (saved, own))
    if was != now:
        raise CheckpointError(
            f"the state is of a run with {' over '.join(was) or saved['averaging']}, this one has "
            f"{' over '.join(now) or own['averaging']}"
        )
    for name in ("schedule", "averaging"):
        if saved[name] != own[name]:
            warn(
                f"the run began with the {name} {saved[name]} and goes on with {own[name]}",
                RuntimeWarning,
            )


def check_memory(averaging: Averaging, memory: Memory, fresh: Memory, width: int) -> None:
    """Does ``memory`` hold what this averaging begins with, in the same sizes, and else only rows of ``width``?"""
    for name, value in memory.items():
        if isinstance(value, Tensor) and name not in fresh and (value.dim() == 0 or value.shape[-1] != width):
            raise CheckpointError(f"the state does not fit: averaging {name!r} is {tuple(value.shape)}")
    for name, value in fresh.items():
        if name not in memory:
            raise CheckpointError(
                f"the state is of a run with another averaging than {described(averaging)}: it does not hold {name!r}"
            )
        if isinstance(value, Tensor):
            check_tensor(f"averaging {name!r}", memory[name], tuple(value.shape), value.dtype)
        elif type(memory[name]) is not type(value):
            raise CheckpointError(f"the state does not fit: averaging {name!r} is {memory[name]!r}")


def inherited(memory: Memory, fresh: Memory, width: int) -> dict[str, Any]:
    """Of what an averaging remembered over other workers, what is of all of them: numbers, and rows of ``width``. What
    is each worker's own begins as ``fresh`` as in a new run."""
    kept = {}
    for name, value in memory.items():
        row = isinstance(value, Tensor) and value.shape == (width,)
        known = name in fresh and type(value) is type(fresh[name]) and not isinstance(value, Tensor)
        if row or known:
            kept[name] = value
    return {**fresh, **saved(kept)}


def check_tensor(what: str, tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Is it a tensor of this shape and dtype?"""
    found = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    if found != shape:
        raise CheckpointError(f"the state does not fit: {what} is {found}, this run's has the shape {shape}")
    if tensor.dtype != dtype:
        raise CheckpointError(f"the state does not fit: {what} is of {tensor.dtype}, this run's of {dtype}")


@contextmanager
def damage_named() -> Iterator[None]:
    """What is missing or of another kind is one line, not an error of somebody who tried to use it."""
    try:
        yield
    except (PrsgdError, Warning):
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    except (KeyError, TypeError, AttributeError, RuntimeError, IndexError) as error:
        kind = f"{error} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
        raise CheckpointError(f"the state is damaged, or no state of LocalSGD: {kind}") from None


def saved(memory: Memory) -> dict[str, Any]:
    """A copy of what an averaging remembers."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in memory.items()}
