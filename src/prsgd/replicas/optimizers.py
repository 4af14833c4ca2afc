"""Optimizers as they come: proxies, and whose parameters each of them has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.parameter import Parameter
from torch.optim import Optimizer

_HOOKS = "_optimizer_step_pre_hooks"


def unwrapped(optimizer: Any) -> Any:
    """The optimizer whose step is the step: of a proxy, such as accelerate's, the one that it holds and steps."""
    while not _takes_hooks(optimizer):
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, Optimizer) and hasattr(optimizer, "zero_grad"):  # an lr scheduler holds one too
            optimizer = inner
        elif isinstance(optimizer, Optimizer):
            kind = type(optimizer).__name__
            raise ValueError(
                f"optimizer must be a torch.optim.Optimizer, {kind} has no hooks and no .optimizer with them"
            )
        else:
            break
    return optimizer


def _takes_hooks(optimizer: Any) -> bool:
    """Is it an optimizer of torch's own kind? A proxy may be one by class, but its constructor never ran, or it has
    copied what the other one holds, as Fabric's does: then the hooks are the other one's."""
    if not isinstance(optimizer, Optimizer):
        return False
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:
        return False
    inner = getattr(optimizer, "optimizer", None)
    return not isinstance(inner, Optimizer) or vars(inner).get(_HOOKS) is not getattr(optimizer, _HOOKS)


def owners(optimizers: Sequence[Optimizer], workers: Sequence[Mapping[str, Parameter]]) -> dict[Optimizer, list[int]]:
    """Which hosted workers' parameters each optimizer has, or a ValueError."""
    if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
        raise ValueError(f"optimizer must be a torch.optim.Optimizer or a list of them, got {optimizers!r}")
    home = {id(p): i for i, named in enumerate(workers) for p in named.values()}
    owned = {o: [p for group in o.param_groups for p in group["params"] if p.requires_grad] for o in optimizers}
    everything = {id(p) for ps in owned.values() for p in ps}
    for named in workers:
        for name, p in named.items():
            if id(p) not in everything:
                raise ValueError(
                    f"optimizer must own the model's parameters, {name!r} is in none: make the optimizer from "
                    "model.parameters() (fleet.parameters()), after fully_shard(model) if it is called, or freeze the "
                    "parameter with requires_grad_(False)"
                )
    for params in owned.values():
        if any(id(p) not in home for p in params):
            shape = next(list(p.shape) for p in params if id(p) not in home)
            raise ValueError(
                f"optimizer must own only the model's parameters, one of shape {shape} is not in the model and would "
                "never be averaged: put both into one module, or give that parameter an optimizer of its own"
            )
    return {o: sorted({home[id(p)] for p in params}) for o, params in owned.items()}
