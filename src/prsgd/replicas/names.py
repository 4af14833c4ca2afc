"""Names of parameters and buffers as a model has them that nobody has wrapped.

``torch.compile`` puts ``_orig_mod`` into them, and Fabric ``_forward_module``. Messages and files do without, so that
wrapped models and others fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

COMPILED = "_orig_mod"
"""What torch.compile calls the module that it wraps."""
WRAPPED = (COMPILED, "_forward_module")
T = TypeVar("T")


def plain(name: str) -> str:
    """
    >>> plain("_orig_mod.0._orig_mod.weight"), plain("_forward_module.0.weight"), plain("_orig_mod")
    ('0.weight', '0.weight', '')
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


def plainly(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    """By such names; by those that they have where two would be called alike.

    >>> plainly([("_orig_mod.0.weight", 1), ("_orig_mod.0.bias", 2)])
    {'0.weight': 1, '0.bias': 2}
    >>> plainly([("weight", 1), ("_orig_mod.weight", 2)])
    {'weight': 1, '_orig_mod.weight': 2}
    """
    pairs = list(named)
    found = {plain(name): value for name, value in pairs}
    return found if len(found) == len(pairs) else dict(pairs)


def bare(model: nn.Module) -> nn.Module:
    """Without the wrappers by which the processes of a worker share gradients, and that torch.compile puts on."""
    inner: nn.Module | None = model
    while inner is not None:
        model = inner
        inner = model.module if isinstance(model, DistributedDataParallel) else model._modules.get(COMPILED)
    return model


def state_of(module: nn.Module) -> dict[str, Any]:
    """Its ``state_dict``, by such names."""
    return plainly(module.state_dict().items())


def load_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load what ``state_of`` this module, or of one that is compiled where this is not, has given."""
    own = plainly((name, name) for name in module.state_dict())
    module.load_state_dict({own.get(name, name): value for name, value in state.items()}, strict=strict)
