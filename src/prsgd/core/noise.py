"""How much the workers' gradients scatter from step to step, as a schedule such as ``auto()`` asks for it.

Two gradients of one worker that follow each other are of other batches at nearly the same model, so half the squared
length of their difference is their variance. What matters for averaging is how far that would carry the model, so the
difference is weighed as the optimizer weighs gradients: with momentum m a gradient moves the model by lr / (1 - m) in
the end, and an optimizer of Adam's kind divides by the root of the mean square. Groups with another lr than the first
count by the ratio of the two. The result is for lr 1: times lr^2 it is a squared distance, as the drift is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from prsgd._warn import warn
from prsgd.core.resuming import check_tensor
from prsgd.replicas.rows import Rows, local

NOT_ONE = -1e6
"""Told for the momentum of a look where no single number says how steps repeat each other: below 0 in every mean."""
EVERY = 16
"""Steps from one look to the next. A look takes two steps, and the variance changes slowly."""


def is_due(steps: int) -> bool:
    """Is there to be a look at the gradients of a worker that has taken so many steps?"""
    return steps % EVERY <= 1


class GradientNoise:
    """Looks at the hosted workers' gradients now and then; beside them it keeps one row for each worker."""

    def __init__(self, optimizers: Sequence[Optimizer], rows: Rows) -> None:
        self._optimizers, self._rows = optimizers, rows
        hosted = range(len(rows.workers))
        self._owned = [[list(_owned(o, named)) for o in optimizers] for named in rows.workers]
        """By worker and optimizer: the numbers of its parameters in the model, and of their groups."""
        self._owners = [[o for o, owned in enumerate(mine) if owned] for mine in self._owned]
        """The optimizers that have parameters of it; its step is over with the last."""
        self._before: list[Tensor | None] = [None for _ in hosted]
        """(P,): the gradient of the step before, where there was a look at it."""
        self._cut: list[dict[int, list[_Places]]] = [{} for _ in hosted]
        """By worker and optimizer: that row, cut into the shapes of the parameters."""
        self._at = [[-1] * len(optimizers) for _ in hosted]
        """Steps that the worker had behind it then, by optimizer."""
        self._parts: list[dict[int, list[_Term] | None]] = [{} for _ in hosted]
        """Of the look under way, by optimizer: what its parameters come to."""
        self._found: list[list[list[_Term] | float]] = [[] for _ in hosted]
        """By worker, look by look. They hold tensors until an average asks, so that nobody waits for a device."""
        self._told: list[list[float]] = [[] for _ in hosted]
        """What has been told, and not been heard: that may have been to a look, which is no average."""
        self._warned = False

    def look(self, i: int, optimizer: Optimizer, steps: int) -> None:
        """Worker i, with so many steps behind it, is about to be updated by this optimizer, whose gradients are there
        and are its own business by now: another one's may still be scaled, or not be taken yet.

        Only when ``is_due``.
        """
        o = next(k for k, own in enumerate(self._optimizers) if own is optimizer)
        with torch.no_grad():
            if steps % EVERY == 0:
                self._parts[i].clear()
                for places in self._places(i, o):
                    torch._foreach_copy_(places.before, places.gradients(optimizer))
            elif self._at[i][o] == steps - 1:
                self._parts[i][o] = self._moved(i, o)
        self._at[i][o] = steps
        if steps % EVERY and o == self._owners[i][-1]:
            parts = [part for own in self._owners[i] if (part := self._parts[i].get(own)) is not None]
            if len(parts) == len(self._owners[i]):  # one that did not step twice in a row has nothing to say
                self._found[i].append([term for part in parts for term in part])
            self._parts[i].clear()

    def told(self) -> tuple[float, float, float]:
        """The sum of what was found since an average has last heard of it, of how many looks, and the momentum at each,
        added up too: no process may go by its own where others have another."""
        for found, told in zip(self._found, self._told):
            told += [value for value in map(_value, found) if math.isfinite(value)]
            found.clear()
        # Worker by worker, as processes are summed: so both say the same to the last bit.
        looks, momentum = [float(len(told)) for told in self._told], self._momentum()
        return sum(map(sum, self._told)), sum(looks), sum(momentum * count for count in looks)

    def _momentum(self) -> float:
        """The one momentum by which all parameters repeat their steps as SGD does; or ``NOT_ONE``."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if any("betas" in group or group.get("nesterov") for group in groups):
            return NOT_ONE
        first, *others = {_momentum(group) for group in groups}
        return NOT_ONE if others else first

    def heard(self) -> None:
        """It was an average to which this was told."""
        for told in self._told:
            told.clear()

    def _places(self, i: int, o: int) -> list[_Places]:
        """Worker i's parameters that the optimizer has, group by group. Cut out of its row once."""
        row = self._before[i]
        if row is None:
            with torch.inference_mode(False):
                row = torch.zeros(self._rows.width, dtype=self._rows.dtype, device=self._rows.device)
            self._before[i] = row
            self._cut[i] = {}
        if o not in self._cut[i]:
            params = list(self._rows.workers[i].values())
            shapes = [local(p).shape for p in params]
            sizes = [shape.numel() for shape in shapes]
            parts = row.split([*sizes, row.numel() - sum(sizes)])
            self._cut[i][o] = [
                _Places([params[k] for k in own], [parts[k].view(shapes[k]) for k in own], g, _joined(row, sizes, own))
                for g in range(len(self._optimizers[o].param_groups))
                if (own := [k for k, of in self._owned[i][o] if of == g])
            ]
        return self._cut[i][o]

    def _moved(self, i: int, o: int) -> list[_Term] | None:
        """Half the squared distance that the differences of these gradients carry the model apart, at lr 1 of the first
        group; None: that cannot be told. The gradients before are used up by it."""
        optimizer, first = self._optimizers[o], float(self._optimizers[0].param_groups[0]["lr"])
        if not first:
            if any(float(group["lr"]) for own in self._optimizers for group in own.param_groups):
                self._warn("as long as the first parameter group's lr is 0, and others train")
            return None
        terms: list[_Term] = []
        for places in self._places(i, o):
            group = optimizer.param_groups[places.group]
            if not places.are_known(optimizer):
                self._warn(
                    "the schedule asks how far the scatter of gradients carries a model, which is known for optimizers "
                    f"of SGD's and of Adam's kind, and not for {type(optimizer).__name__}"
                )
                return None
            before, gradients = places.before, places.gradients(optimizer)
            roots = _roots(before, gradients, places.states(optimizer), group) if "betas" in group else []
            torch._foreach_sub_(before, gradients)
            if roots:
                torch._foreach_div_(before, roots)
            norms = torch._foreach_norm(before) if places.flat is None else [torch.linalg.vector_norm(places.flat)]
            weight = _weight(group) * float(group["lr"]) / first
            terms += [_Term(norm, weight) for norm in norms]
        return terms

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            warn(
                f"{why}: auto() learns nothing, and keeps its period; use a schedule such as every(8)",
                RuntimeWarning,
            )

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as if it had not stopped."""
        return {
            "before": [None if row is None else row.clone() for row in self._before],
            "at": [list(at) for at in self._at],
            "found": [list(map(_value, of_worker)) for of_worker in self._found],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error unless ``load_state_dict`` can take it."""
        hosted = len(self._at)
        for name in ("before", "at", "found"):
            if len(state[name]) != hosted:
                raise ValueError(f"the state has {len(state[name])} gradients {name} for {hosted} workers")
        for at in state["at"]:
            if len(at) != len(self._optimizers):
                raise ValueError(f"the state is of a run with {len(at)} optimizers, this has {len(self._optimizers)}")
        for row in state["before"]:
            if row is not None:
                check_tensor("a gradient", row, (self._rows.width,), self._rows.dtype)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self._rows.device
        with torch.inference_mode(False):  # it outlives an evaluation during which it may be loaded
            self._before = [None if row is None else row.clone().to(device) for row in state["before"]]
        self._cut = [{} for _ in self._before]
        self._at = [[int(steps) for steps in at] for at in state["at"]]
        self._found = [list(map(float, of_worker)) for of_worker in state["found"]]


@dataclass
class _Places:
    """One worker's parameters in one group of an optimizer."""

    params: list[Parameter]
    before: list[Tensor]
    """Where their gradients of the step before are kept."""
    group: int
    """Its number: loading a state makes the groups anew."""
    flat: Tensor | None
    """``before`` as one vector, where they lie next to each other."""
    known: bool = False
    """Has the optimizer been seen to move all of them as SGD or Adam does?"""

    def are_known(self, optimizer: Optimizer) -> bool:
        if not self.known:
            group, states = optimizer.param_groups[self.group], self.states(optimizer)
            if not all(_is_known(p, state, group) for p, state in zip(self.params, states)):
                return False
            self.known = all(states)  # before the first step there are none
        return True

    def states(self, optimizer: Optimizer) -> list[Mapping[str, Any]]:
        return [optimizer.state.get(p, {}) for p in self.params]

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """As they are now, in the dtype of rows; zeros where there is none."""
        scale = getattr(optimizer, "grad_scale", None)
        grads = [_gradient(p, scale) for p in self.params]
        return [
            torch.zeros_like(kept) if grad is None else grad if grad.dtype == kept.dtype else grad.to(kept.dtype)
            for grad, kept in zip(grads, self.before)
        ]


class _Term(NamedTuple):
    """Some parameters' part of a look."""

    norm: Tensor
    """Of the differences of their gradients."""
    weight: float
    """How far a gradient moves them."""


def _value(found: Sequence[_Term] | float) -> float:
    """Half a squared distance."""
    if isinstance(found, float):
        return found
    lengths = [term.weight * float(term.norm) for term in found]
    return sum(length * length for length in lengths) / 2


def _joined(row: Tensor, sizes: Sequence[int], own: Sequence[int]) -> Tensor | None:
    """These parts of the row as one, where they lie next to each other."""
    if list(own) != list(range(own[0], own[-1] + 1)):
        return None
    begin = sum(sizes[: own[0]])
    return row[begin : begin + sum(sizes[k] for k in own)]


def _owned(optimizer: Optimizer, named: Mapping[str, Parameter]) -> list[tuple[int, int]]:
    numbers = {id(p): k for k, p in enumerate(named.values())}
    groups = enumerate(optimizer.param_groups)
    return [(numbers[id(p)], g) for g, group in groups for p in group["params"] if id(p) in numbers]


def _gradient(p: Parameter, scale: Tensor | None) -> Tensor | None:
    """As the optimizer will use it: GradScaler leaves it to a fused one to divide by the scale, which may have changed
    since the step before."""
    if p.grad is None:
        return None
    grad = p.grad.to_dense() if p.grad.is_sparse else local(p.grad)
    return grad if scale is None else grad.to(torch.promote_types(grad.dtype, torch.float32)) / float(scale)


def _is_known(p: Parameter, state: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Does its optimizer move a parameter as SGD or Adam does? By what it takes and keeps, as classes are many."""
    if "betas" in group:
        return "eps" in group and (not state or "exp_avg_sq" in state)
    kept = (name for name, value in state.items() if isinstance(value, Tensor) and value.shape == p.shape)
    return "eps" not in group and all(name == "momentum_buffer" or p.dim() == 0 for name in kept)


def _weight(group: Mapping[str, Any]) -> float:
    """How far a gradient moves the model in the end, in units of the lr: sum_k m^k = 1 / (1 - m) with momentum m."""
    momentum = _momentum(group)
    return (1 - float(group.get("dampening") or 0.0)) / (1 - momentum) if momentum else 1.0


def _momentum(group: Mapping[str, Any]) -> float:
    """The share of a step's move that the next one repeats."""
    momentum = float(group.get("momentum") or 0.0)
    return momentum if 0 < momentum < 1 else 0.0


def _roots(
    before: list[Tensor], now: list[Tensor], states: Sequence[Mapping[str, Any]], group: Mapping[str, Any]
) -> list[Tensor]:
    """By what an optimizer of Adam's kind is about to divide gradients: mean squares that have the ones at hand in
    them, without which a parameter that is seldom used would seem to scatter without bounds.

    Where it starts afresh at every average its mean square is of a few gradients; if it has none, it is of these two.
    """
    past, squares, olds, news = float(group["betas"][1]), [], [], []
    for gradient, state in zip(before, states):
        steps = float(state.get("step", 0)) if state.get("exp_avg_sq") is not None else 0.0
        squares.append(local(state["exp_avg_sq"]).to(gradient.dtype) if steps else gradient.square())
        share = 1 - past ** (steps + 1)  # a mean that starts at 0 has so much of its weight
        olds.append(past / share if steps else 0.5)
        news.append((1 - past) / share if steps else 0.5)
    roots = list(torch._foreach_mul(squares, olds))
    torch._foreach_addcmul_(roots, now, now, news)
    for root, state in zip(roots, states):
        if state.get("max_exp_avg_sq") is not None and (steps := float(state.get("step", 0))):
            largest = local(state["max_exp_avg_sq"]).to(root.dtype) / (1 - past ** (steps + 1))
            torch.maximum(root, largest, out=root)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, max(float(group["eps"]), torch.finfo(before[0].dtype).tiny))
    return roots
