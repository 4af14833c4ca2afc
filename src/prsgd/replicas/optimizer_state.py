"""Optimizer state that is averaged with the models: momentum and the like."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from prsgd.replicas.rows import local, room


class OptimizerState:
    """The hosted workers' optimizer state, each worker's as one row.

    ``every``: by what the optimizers call it, in every how many averages it travels; None: all of it, in each.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        workers: Sequence[Mapping[str, Parameter]],
        *,
        mode: str,
        every: Mapping[str, int] | None = None,
    ) -> None:
        self._optimizers = optimizers
        if mode != "keep":
            _check_whole(optimizers, mode)
        self._workers = [list(named.values()) for named in workers]
        keys: dict[Parameter, list[tuple[Optimizer, str]]] = {}
        for optimizer in optimizers if mode == "average" else ():
            for group, names in zip(optimizer.param_groups, state_keys(optimizer)):
                for p in group["params"]:
                    keys.setdefault(p, []).extend((optimizer, name) for name in names)
        self._places = [[(o, p, k) for p in ps for o, k in keys.get(p, [])] for ps in self._workers]
        self._every = dict.fromkeys((k for _, _, k in self._places[0]), 1) if every is None else every
        if every is not None:
            self._keep_all_but(every, sorted({key for kept in keys.values() for _, key in kept}))
        self.width = sum(room(p) for _, p, _ in self._places[0])  # in all processes that have shards of a model

    def describe(self) -> list[str]:
        return [f"optimizer state {key!r} {list(p.shape)}" for _, p, key in self._places[0]]

    def width_of(self, average: int) -> int:
        """How much of it travels with the average of this number."""
        return sum(room(p) for _, p, _ in self._due(0, average))

    def pack(self, i: int, out: Tensor, average: int) -> None:
        """out <- worker i's state that travels with this average; zeros before its first step."""
        out[sum(local(p).numel() for _, p, _ in self._due(i, average)) :] = 0
        for value, _, part in self._parts(i, out, average):
            part.zero_() if value is None else part.copy_(local(value))

    def write(self, i: int, row: Tensor, average: int) -> None:
        """Give worker i the state of a row of this average; one that has not stepped yet has none and stays so."""
        for value, _, part in self._parts(i, row, average):
            if value is not None:
                local(value).copy_(part)

    def forget(self, i: int) -> None:
        """Let worker i start afresh."""
        for p in self._workers[i]:
            for optimizer in self._optimizers:
                optimizer.state.pop(p, None)

    def _keep_all_but(self, every: Mapping[str, int], known: Sequence[str]) -> None:
        """What is not named stays with each worker; a ValueError if something named is not ``known``."""
        for key in every:
            if key not in known:
                kept = ", ".join(known) or "nothing"
                raise ValueError(f"optimizer_state names {key!r}, and the optimizer keeps {kept}")
        self._places = [[place for place in places if place[2] in every] for places in self._places]

    def _due(self, i: int, average: int) -> list[tuple[Optimizer, Parameter, str]]:
        return [place for place in self._places[i] if average % self._every[place[2]] == 0]

    def _parts(self, i: int, row: Tensor, average: int) -> list[tuple[Tensor | None, Parameter, Tensor]]:
        places = self._due(i, average)
        shapes = [local(p).shape for _, p, _ in places]
        sizes = [shape.numel() for shape in shapes]
        views = row.split([*sizes, row.numel() - sum(sizes)]) if places else ()
        return [(o.state.get(p, {}).get(key), p, v.view(s)) for (o, p, key), v, s in zip(places, views, shapes)]


def _check_whole(optimizers: Sequence[Optimizer], mode: str) -> None:
    for optimizer in optimizers:
        for name, value in vars(optimizer).items():
            if isinstance(value, Optimizer) and value is not optimizer:
                kind, inner = type(optimizer).__name__, type(value).__name__
                raise ValueError(
                    f'optimizer_state="{mode}" sees what {kind} keeps itself, and not the state of the {inner} in its '
                    f'{name!r}: use optimizer_state="keep"'
                )


def state_keys(optimizer: Optimizer) -> list[list[str]]:
    """Per parameter group, the names of the optimizer's floating state of a parameter's shape (momentum and the like).

    Found by letting a copy of the optimizer step stand-ins, since the real state is born with the first step and
    workers must agree on what travels before that. The real parameters, their gradients and the real state stay as
    they are, to the last bit.
    """
    with _without_gradients(optimizer):
        return [_keys(optimizer, group) for group in optimizer.param_groups]


def _keys(optimizer: Optimizer, group: Mapping[str, Any]) -> list[str]:
    kinds = {(local(p).shape, p.dtype, p.device) for p in group["params"]}
    stand_ins = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
    for stand_in in stand_ins:
        stand_in.requires_grad_().grad = torch.zeros_like(stand_in)
    trial = _trial(optimizer, group, stand_ins)
    name = type(optimizer).__name__
    try:
        _bare_step(type(optimizer))(trial)
    except TypeError:
        raise ValueError(
            f'optimizer_state="average" needs an optimizer whose step() takes no closure, got {name}'
        ) from None
    except Exception as error:
        raise ValueError(
            f'optimizer_state="average" cannot tell what state {name} keeps: its step() of stand-ins with zero '
            f"gradients failed ({error})"
        ) from error
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


def _trial(optimizer: Optimizer, group: Mapping[str, Any], stand_ins: list[Tensor]) -> Optimizer:
    """An optimizer like this one, but over the stand-ins, without state and without anybody's hooks."""
    trial = object.__new__(type(optimizer))
    # Not a "step" of the instance: lr schedulers and users put one there that is bound to the real optimizer.
    trial.__dict__.update({name: _copied(value) for name, value in vars(optimizer).items() if name != "step"})
    trial.state = defaultdict(dict)
    hyper = {name: _copied(value) for name, value in group.items()}
    # How a step is recorded changes nothing in what it keeps, and stand-ins cannot be stepped so everywhere.
    for options in (hyper, trial.defaults):
        options.update({flag: False for flag in ("capturable", "differentiable") if flag in options})
    trial.param_groups = [{**hyper, "params": stand_ins}]
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    return trial


def _bare_step(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """The class's step, without the wrapper in which torch calls the hooks that users set for all optimizers."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _copied(value: Any) -> Any:
    """Its own copy of what a step may change in place; other objects are shared."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, dict | list | set) else value


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Nobody can step the real parameters: an optimizer that holds another one would let that one do it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        yield
    finally:
        for p, gradient in zip(parameters, gradients):
            p.grad = gradient
