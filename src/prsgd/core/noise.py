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
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from prsgd.core.resuming import check_tensor
from prsgd.replicas.rows import Rows

EVERY = 16
"""Steps from one look to the next. A look takes two steps, and the variance changes slowly."""


class GradientNoise:
    """Looks at the hosted workers' gradients now and then; beside them it keeps one row for each worker."""

    def __init__(self, optimizers: Sequence[Optimizer], rows: Rows) -> None:
        self._optimizers, self._rows = optimizers, rows
        self._before: list[Tensor | None] = [None] * len(rows.workers)
        """(P,): the gradient of the step before, where there was a look at it."""
        self._at = [-1] * len(rows.workers)
        """Steps that the worker had behind it then."""
        self._found: list[list[Tensor]] = [[] for _ in rows.workers]
        """Since the last average; they stay tensors until an average asks, so that nobody waits for a device."""

    def look(self, i: int, steps: int) -> None:
        """Worker i, with so many steps behind it, has the gradient of its next one. Mostly there is nothing to do."""
        if steps % EVERY > 1:
            return
        with torch.no_grad():
            named = self._rows.workers[i].values()
            parts = [(view, p.grad) for view, p in zip(self._views(i), named)]
            if steps % EVERY and self._at[i] == steps - 1:
                for view, grad in parts:
                    if grad is not None:
                        view.sub_(_dense(grad))
                moved = self._moved(list(named), [view for view, _ in parts])
                self._found[i] += [] if moved is None else [moved / 2]
            elif steps % EVERY == 0:
                for view, grad in parts:
                    view.zero_() if grad is None else view.copy_(_dense(grad))
        self._at[i] = steps

    def told(self) -> tuple[float, float]:
        """The sum of what was found since this was last asked, and of how many looks."""
        found = [float(value) for of_worker in self._found for value in of_worker]
        finite = [value for value in found if math.isfinite(value)]
        self._found = [[] for _ in self._found]
        return sum(finite), float(len(finite))

    def _views(self, i: int) -> Sequence[Tensor]:
        row = self._before[i]
        if row is None:
            with torch.inference_mode(False):
                row = torch.zeros(self._rows.width, dtype=self._rows.dtype, device=self._rows.device)
            self._before[i] = row
        named = self._rows.workers[i].values()
        return [part.view(p.shape) for part, p in zip(row.split([p.numel() for p in named]), named)]

    def _moved(self, params: Sequence[Parameter], differences: Sequence[Tensor]) -> Tensor | None:
        """The squared distance that gradients with these differences carry the model apart, at lr 1 of the first group;
        None: that cannot be told yet."""
        places = {id(p): k for k, p in enumerate(params)}
        first = float(self._optimizers[0].param_groups[0]["lr"])
        if not first:
            return None
        squares: list[Tensor] = []
        for optimizer in self._optimizers:
            scale = 1.0 / float(getattr(optimizer, "grad_scale", None) or 1.0)  # a fused one's gradients are scaled yet
            for group in optimizer.param_groups:
                weight = scale * _weight(group) * float(group["lr"]) / first
                for p in group["params"]:
                    if id(p) not in places:
                        continue
                    difference = _preconditioned(differences[places[id(p)]], optimizer.state.get(p, {}), group)
                    if difference is None:
                        return None
                    squares.append((torch.linalg.vector_norm(difference) * weight).square())
        return torch.stack(squares).double().sum()

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on as if it had not stopped."""
        return {
            "before": [None if row is None else row.clone() for row in self._before],
            "at": list(self._at),
            "found": [[float(value) for value in of_worker] for of_worker in self._found],
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error unless ``load_state_dict`` can take it."""
        hosted = len(self._at)
        for name in ("before", "at", "found"):
            if len(state[name]) != hosted:
                raise ValueError(f"the state has {len(state[name])} gradients {name} for {hosted} workers")
        for row in state["before"]:
            if row is not None:
                check_tensor("a gradient", row, (self._rows.width,), self._rows.dtype)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = [None if row is None else row.clone() for row in state["before"]]
        self._at = [int(steps) for steps in state["at"]]
        self._found = [
            [torch.tensor(float(value), dtype=torch.float64) for value in of_worker] for of_worker in state["found"]
        ]


def _dense(grad: Tensor) -> Tensor:
    return grad.to_dense() if grad.is_sparse else grad


def _weight(group: Mapping[str, Any]) -> float:
    """How far a gradient moves the model in the end, in units of the lr: sum_k m^k = 1 / (1 - m) with momentum m."""
    momentum = group.get("momentum") or 0.0
    return float((1 - (group.get("dampening") or 0.0)) / (1 - momentum)) if momentum < 1 else 1.0


def _preconditioned(difference: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """As an optimizer of Adam's kind divides gradients; None before its first step."""
    if "betas" not in group:
        return difference
    square = state.get("exp_avg_sq")
    if square is None:
        return None
    correction = 1 - float(group["betas"][1]) ** float(state.get("step", 0))
    if not correction:
        return None
    root: Tensor = (square / correction).sqrt()
    return difference / (root + float(group.get("eps", 0.0)))
