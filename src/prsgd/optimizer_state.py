"""Optimizer state that is averaged with the models: momentum and the like."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence

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

    Found by letting a copy of the optimizer step a stand-in, since the real state is born with the first step and
    workers must agree on what travels before that.
    """
    keys = []
    for group in optimizer.param_groups:
        stand_in = torch.zeros(2, 3, requires_grad=True)
        stand_in.grad = torch.zeros(2, 3)
        trial = copy.copy(optimizer)
        trial.state = defaultdict(dict)
        hyper = {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items()}
        trial.param_groups = [{**hyper, "params": [stand_in]}]
        trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        try:
            trial.step()
        except TypeError:
            name = type(optimizer).__name__
            raise ValueError(
                f'optimizer_state="average" needs an optimizer whose step() takes no closure, got {name}'
            ) from None
        state = trial.state[stand_in]
        keys.append(
            [k for k, v in state.items() if isinstance(v, Tensor) and v.shape == (2, 3) and v.is_floating_point()]
        )
    return keys
