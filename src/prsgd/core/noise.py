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
from typing import Any

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
        self._parts: list[dict[int, Tensor | None]] = [{} for _ in hosted]
        """Of the look under way, by optimizer: what its parameters come to."""
        self._found: list[list[Tensor]] = [[] for _ in hosted]
        """They stay tensors until an average asks, so that nobody waits for a device."""
        self._told: list[list[float]] = [[] for _ in hosted]
        """What has been told, and not been heard: that may have been to a look, which is no average."""
        self._warned = False

    def look(self, i: int, optimizer: Optimizer, steps: int) -> None:
        """Worker i, with so many steps behind it, is about to be updated by this optimizer, whose gradients are there
        and are its own business by now: another one's may still be scaled, or not be taken yet.

        Mostly there is nothing to do.
        """
        if steps % EVERY > 1:
            return
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
                self._found[i].append(_sum(parts))
            self._parts[i].clear()

    def told(self) -> tuple[float, float, float]:
        """The sum of what was found since an average has last heard of it, of how many looks, and the momentum at each,
        added up too: no process may go by its own where others have another."""
        for found, told in zip(self._found, self._told):
            told += [value for value in map(float, found) if math.isfinite(value)]
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
                _Places([params[k] for k in own], [parts[k].view(shapes[k]) for k in own], g)
                for g in range(len(self._optimizers[o].param_groups))
                if (own := [k for k, of in self._owned[i][o] if of == g])
            ]
        return self._cut[i][o]

    def _moved(self, i: int, o: int) -> Tensor | None:
        """Half the squared distance that the differences of these gradients carry the model apart, at lr 1 of the first
        group; None: that cannot be told."""
        optimizer, first = self._optimizers[o], float(self._optimizers[0].param_groups[0]["lr"])
        if not first:
            if any(float(group["lr"]) for own in self._optimizers for group in own.param_groups):
                self._warn("the first parameter group's lr is 0, and others train: the schedule goes by the first's")
            return None
        squares: list[Tensor] = []
        for places in self._places(i, o):
            group, states = optimizer.param_groups[places.group], [optimizer.state.get(p, {}) for p in places.params]
            if not all(_is_known(p, state, group) for p, state in zip(places.params, states)):
                self._warn(
                    "the schedule asks how far the scatter of gradients carries a model, which is known for optimizers "
                    f"of SGD's and of Adam's kind, and not for {type(optimizer).__name__}"
                )
                return None
            gradients = places.gradients(optimizer)
            differences = list(torch._foreach_sub(places.before, gradients))
            if "betas" in group:
                for difference, before, now, state in zip(differences, places.before, gradients, states):
                    difference.div_(_root(before, now, state, group))
            weight = _weight(group) * float(group["lr"]) / first
            squares.append(
                torch.stack(torch._foreach_norm(differences)).double().square().sum() * (weight * weight / 2)
            )
        return _sum(squares)

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
            "found": [[float(value) for value in of_worker] for of_worker in self._found],
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
        self._found = [
            [torch.tensor(float(value), dtype=torch.float64) for value in of_worker] for of_worker in state["found"]
        ]


@dataclass(frozen=True)
class _Places:
    """One worker's parameters in one group of an optimizer."""

    params: list[Parameter]
    before: list[Tensor]
    """Where their gradients of the step before are kept."""
    group: int
    """Its number: loading a state makes the groups anew."""

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """As they are now, in the dtype of rows; zeros where there is none."""
        grads = [_gradient(p, optimizer) for p in self.params]
        return [
            torch.zeros_like(kept) if grad is None else grad if grad.dtype == kept.dtype else grad.to(kept.dtype)
            for grad, kept in zip(grads, self.before)
        ]


def _sum(numbers: Sequence[Tensor]) -> Tensor:
    """Mostly there is one, and nothing to do."""
    return numbers[0] if len(numbers) == 1 else torch.stack(list(numbers)).sum()


def _owned(optimizer: Optimizer, named: Mapping[str, Parameter]) -> list[tuple[int, int]]:
    numbers = {id(p): k for k, p in enumerate(named.values())}
    groups = enumerate(optimizer.param_groups)
    return [(numbers[id(p)], g) for g, group in groups for p in group["params"] if id(p) in numbers]


def _gradient(p: Parameter, optimizer: Optimizer) -> Tensor | None:
    """As the optimizer will use it: GradScaler leaves it to a fused one to divide by the scale, which may have changed
    since the step before."""
    if p.grad is None:
        return None
    grad = p.grad.to_dense() if p.grad.is_sparse else local(p.grad)
    scale = getattr(optimizer, "grad_scale", None)
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


def _root(before: Tensor, now: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """By what an optimizer of Adam's kind is about to divide gradients: a mean square that has the one at hand in it,
    without which a parameter that is seldom used would seem to scatter without bounds.

    Where it starts afresh at every average its mean square is of a few gradients; if it has none, it is of these two.
    """
    kept, largest, steps = state.get("exp_avg_sq"), state.get("max_exp_avg_sq"), float(state.get("step", 0))
    if kept is not None and steps:
        past = float(group["betas"][1])
        square = torch.addcmul(past * local(kept).to(before.dtype), now, now, value=1 - past)
        if largest is not None:
            square = torch.maximum(square, local(largest).to(before.dtype))
        square /= 1 - past ** (steps + 1)
    else:
        square = torch.addcmul(before.square(), now, now).div_(2)
    return square.sqrt_().add_(max(float(group["eps"]), torch.finfo(before.dtype).tiny))
