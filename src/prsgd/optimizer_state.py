"""Optimizer state that is averaged with the models: momentum and the like."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer


class OptimizerState:
    """The hosted workers' optimizer state, each worker's as one row."""

    def __init__(
        self, optimizers: Sequence[Optimizer], workers: Sequence[Mapping[str, Parameter]], *, travels: bool
    ) -> None:
        self._optimizers = optimizers
        self._workers = [list(named.values()) for named in workers]
        keys: dict[Parameter, list[tuple[Optimizer, str]]] = {}
        for optimizer in optimizers if travels else ():
            for group, names in zip(optimizer.param_groups, state_keys(optimizer)):
                for p in group["params"]:
                    keys.setdefault(p, []).extend((optimizer, name) for name in names)
        self._places = [[(o, p, k) for p in ps for o, k in keys.get(p, [])] for ps in self._workers]
        self.width = sum(p.numel() for _, p, _ in self._places[0])

    def describe(self) -> list[str]:
        return [f"optimizer state {key!r} {list(p.shape)}" for _, p, key in self._places[0]]

    def pack(self, i: int, out: Tensor) -> None:
        """out <- worker i's state; zeros before its first step."""
        for value, _, part in self._parts(i, out):
            part.zero_() if value is None else part.copy_(value)

    def write(self, i: int, row: Tensor) -> None:
        """Give worker i the state of a row; one that has not stepped yet has none and stays so."""
        for value, _, part in self._parts(i, row):
            if value is not None:
                value.copy_(part)

    def forget(self, i: int) -> None:
        """Let worker i start afresh."""
        for p in self._workers[i]:
            for optimizer in self._optimizers:
                optimizer.state.pop(p, None)

    def _parts(self, i: int, row: Tensor) -> list[tuple[Tensor | None, Parameter, Tensor]]:
        places = self._places[i]
        views = row.split([p.numel() for _, p, _ in places]) if places else ()
        return [(o.state.get(p, {}).get(key), p, v.view(p.shape)) for (o, p, key), v in zip(places, views)]


def state_keys(optimizer: Optimizer) -> list[list[str]]:
    """Per parameter group, the names of the optimizer's floating state of a parameter's shape (momentum and the like).

    Found by letting a copy of the optimizer step stand-ins, since the real state is born with the first step and
    workers must agree on what travels before that.
    """
    return [_keys(optimizer, group) for group in optimizer.param_groups]


def _keys(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    stand_ins = [torch.zeros(shape, requires_grad=True) for shape in {p.shape for p in group["params"]}]
    for stand_in in stand_ins:
        stand_in.grad = torch.zeros_like(stand_in)
    trial = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.state = defaultdict(dict)
    hyper = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
    trial.param_groups = [{**hyper, "params": stand_ins}]
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    name = type(optimizer).__name__
    try:
        trial.step()
    except TypeError:
        raise ValueError(
            f'optimizer_state="average" needs an optimizer whose step() takes no closure, got {name}'
        ) from None
    found: dict[str, None] = {}
    for stand_in in stand_ins:
        for key, value in trial.state[stand_in].items():
            if not isinstance(value, Tensor) or not value.is_floating_point() or key == "step":
                continue  # each worker keeps its own count of steps
            if value.shape != stand_in.shape:
                raise ValueError(
                    f'optimizer_state="average" needs state of the parameters\' shapes, {name} keeps {key!r} of shape '
                    f"{list(value.shape)} for a parameter of shape {list(stand_in.shape)}"
                )
            found[key] = None
    return list(found)
