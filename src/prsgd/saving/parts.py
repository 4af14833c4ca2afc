"""What is saved beside a run: models, optimizers, lr schedules, and dicts of the user's own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from prsgd.errors import CheckpointError
from prsgd.replicas import names
from prsgd.saving.states import Packed


def check_parts(parts: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the first that cannot be saved: now, and not after the first fifty rounds."""
    for name, part in parts.items():
        stateful = callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))
        if not stateful and not isinstance(part, MutableMapping):
            raise ValueError(f"{name} must have state_dict() and load_state_dict(), or be a dict, got {part!r}")
        try:
            Packed.of(state_of(part))
        except TypeError as error:
            raise ValueError(f"{name} has a state that cannot be saved: {error}") from None


def state_of(part: Any) -> Any:
    """As it is now."""
    if isinstance(part, MutableMapping):
        return dict(part)
    return names.state_of(part) if isinstance(part, nn.Module) else part.state_dict()


def check_names(states: Mapping[str, Any], parts: Mapping[str, Any], folder: Path) -> None:
    """Raise a CheckpointError unless these states are of these parts."""
    if set(states) != set(parts):
        raise CheckpointError(f"the states in {folder} are of {sorted(states)}, this run has {sorted(parts)}")


def load_parts(
    states: Mapping[str, Any], parts: Mapping[str, Any], folder: Path, *, fresh_optimizers: bool = False
) -> None:
    """Give each part its state; a dict is updated."""
    for name, part in parts.items():
        try:
            if isinstance(part, Optimizer) and fresh_optimizers:
                part.load_state_dict({**states[name], "state": {}})
            elif isinstance(part, MutableMapping):
                part.update(states[name])
            elif isinstance(part, nn.Module):
                names.load_state(part, states[name])
            else:
                part.load_state_dict(states[name])
        except (KeyError, ValueError, RuntimeError, TypeError, IndexError) as error:
            raise CheckpointError(
                f"the state of {name!r} in {folder} does not fit: {_why(part, states[name], error)}; go on with "
                "the same one, or begin anew in another folder"
            ) from None


def _why(part: Any, state: Mapping[str, Any], error: Exception) -> str:
    """In a line: torch lists every tensor of a model."""
    if isinstance(part, nn.Module):
        own = names.state_of(part)
        missing, strange = ([name for name in one if name not in other] for one, other in ((own, state), (state, own)))
        if missing or strange:
            both = (("it", missing), ("this one", strange))
            return ", and ".join(f"{whose} has no {_listed(found)}" for whose, found in both if found)
        for name, value in own.items():
            theirs = state[name]
            if isinstance(value, Tensor) and isinstance(theirs, Tensor) and theirs.shape != value.shape:
                return f"{name!r} is {list(theirs.shape)}, in this run it is {list(value.shape)}"
    line = " ".join(str(error).split())
    return f"it has no {line}" if isinstance(error, KeyError) else line


def _listed(found: list[str]) -> str:
    return f"{found[0]!r}{f' and {len(found) - 1} more' if len(found) > 1 else ''}"
