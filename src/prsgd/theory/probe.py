"""The constants of a real problem, estimated where training has been so far.

None of them is a constant in practice: the curvature changes many times over along a path of training, so look again
and again (``since=``) and keep the largest. A look at the start alone misleads.

    L        the largest eigenvalue of the Hessian in magnitude, by Lanczos. Here, on these batches: few batches
             overstate it, and elsewhere on the path it may be larger
    sigma^2  the variance of a mini-batch gradient
    G^2      the largest mean squared norm of a mini-batch gradient seen: a lower estimate
    gap      f(x) - f* at the first look, f* = 0 unless it is given (right for cross-entropy)
    seconds  of a step's forward and backward pass; in a process group also of one average of the model
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from prsgd._check import whole_number
from prsgd.replicas.fleet import random_state, set_random_state
from prsgd.theory.bounds import Problem

LossFn = Callable[[Any, Any], Tensor]
CONVERGED = 0.05
"""A Ritz value whose residual is below this share of it."""
FEW = 8
"""Fewer batches give no interval for the noise."""


@dataclass(frozen=True)
class Estimate:
    """A number with an interval, and what it can and cannot say."""

    value: float
    low: float
    high: float
    says: str

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class Probed:
    """What is known of a problem after one or more looks."""

    smoothness: Estimate
    noise: Estimate
    """For batches of the size that the loader gives."""
    grad_second_moment: Estimate
    gap: Estimate
    loss: float
    """Now."""
    step_seconds: float
    """Of one forward and backward pass, the median; in a process group the slowest rank's."""
    average_seconds: float | None
    """Of one blocking average of the model; None outside a process group."""
    parameters: int
    """How many numbers train."""
    batch_size: int | None
    """Of the batches looked at; None where they have no length."""
    looks: int

    @property
    def problem(self) -> Problem:
        """For ``prsgd.theory.bounds``. The noise is a part of G^2, so that is at least as large."""
        return Problem(
            smoothness=self.smoothness.value,
            noise=self.noise.value,
            grad_second_moment=max(self.grad_second_moment.value, self.noise.value),
            gap=self.gap.value,
        )


def probe(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[tuple[Any, Any]],
    *,
    max_batches: int = 64,
    curvature_batches: int | None = None,
    lanczos_steps: int = 10,
    best_value: float = 0.0,
    since: Probed | None = None,
    seed: int = 0,
) -> Probed:
    """Look at ``loss_fn(model(x), y)`` where the model is now; the model is left as it was.

    ``loader`` gives batches (x, y) of the size that a worker trains with; up to ``max_batches`` are looked at, those of
    another size than the first left out, and ``curvature_batches`` of them (all) for the curvature. Pass the last
    result as ``since`` to keep the largest values along the path, and the first look's gap. In a process group it is a
    collective: every rank looks at its own batches, and how long an average takes is measured too. For times that
    mean something, set torch's threads as in training.

    >>> import torch, prsgd
    >>> from prsgd.tasks import synthetic
    >>> model, data = synthetic.Wells(), synthetic.load()
    >>> batches = [(data.train_x[i : i + 8], data.train_y[i : i + 8]) for i in range(0, 512, 8)]
    >>> found = prsgd.probe(model, synthetic.mean_value, batches)
    >>> round(found.gap.value, 2) == round(synthetic.constants().start_value, 2)
    True
    """
    max_batches = whole_number("max_batches", max_batches, at_least=2)
    if curvature_batches is not None:
        whole_number("curvature_batches", curvature_batches, at_least=2)
    if not math.isfinite(best_value):
        raise ValueError(f"best_value must be finite, got {best_value!r}")
    lanczos_steps = whole_number("lanczos_steps", lanczos_steps, at_least=2)
    with _random_numbers_kept():  # a loader that shuffles draws some
        batches = _whole_batches(loader, max_batches)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model must have parameters that train")
    with _left_alone(model):
        losses: list[float] = []
        gradients: list[Tensor] = []
        times: list[float] = []
        for x, y in batches:
            begin = time.perf_counter()
            loss = loss_fn(model(x), y)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise ValueError("loss_fn must give one number that depends on the model's parameters, as a tensor")
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            losses.append(float(loss.detach()))
            times.append(time.perf_counter() - begin)
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss must be finite, got {losses[-1]} on batch {len(losses) - 1}")
            gradients.append(_flat(found, parameters))
            if not torch.isfinite(gradients[-1]).all():
                raise ValueError(f"the gradient must be finite, got one that is not on batch {len(losses) - 1}")
        hessian = _Hessian(model, loss_fn, parameters)
        smoothness = _smoothness(hessian, batches[:curvature_batches], lanczos_steps, seed, losses[0])
    noise, moment = _noise(gradients), _moment(gradients)
    loss_now = fmean(losses)
    error = 2 * stdev(losses) / math.sqrt(len(losses))
    if since is None and loss_now + error < best_value:
        raise ValueError(f"best_value must be at most the loss, {loss_now:.4g} here, got {best_value:g}")
    gap = Estimate(
        max(0.0, loss_now - best_value),
        max(0.0, loss_now - best_value - error),
        max(0.0, loss_now - best_value + error),
        f"the loss at the first look, above f* = {best_value:g}",
    )
    size = sum(p.numel() for p in parameters)
    step_seconds, average_seconds = _in_the_group(median(times), size, parameters[0].device)
    batch_size = _size(batches[0])
    now = Probed(smoothness, noise, moment, gap, loss_now, step_seconds, average_seconds, size, batch_size, 1)
    return now if since is None else merged(since, now)


def merged(since: Probed, now: Probed) -> Probed:
    """Two looks at one path: the largest values, the first one's gap, the last one's loss."""
    return Probed(
        smoothness=max(since.smoothness, now.smoothness, key=lambda e: e.value),
        noise=max(since.noise, now.noise, key=lambda e: e.value),
        grad_second_moment=max(since.grad_second_moment, now.grad_second_moment, key=lambda e: e.value),
        gap=since.gap,
        loss=now.loss,
        step_seconds=now.step_seconds,
        average_seconds=now.average_seconds,
        parameters=now.parameters,
        batch_size=now.batch_size,
        looks=since.looks + now.looks,
    )


def exact_noise(model: nn.Module, loss_fn: LossFn, x: Tensor, y: Tensor, *, batch_size: int, chunk: int = 256) -> float:
    """sigma^2 of batches drawn without replacement from these samples, by one pass over all their gradients.

    (mean ||g_s||^2 - ||mean g_s||^2) / B * (n - B) / (n - 1). Late in training, where the mean gradient is far smaller
    than the noise, tens of thousands of batches would be needed to see the same. The loss must be a mean over samples
    that do not know of each other: no BatchNorm in training mode.
    """
    whole_number("batch_size", batch_size, at_least=1)
    if len(x) < max(2, batch_size):
        raise ValueError(f"x must have at least max(2, batch_size) samples, got {len(x)}")
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(functional_call(model, parameters, (x.unsqueeze(0),)), y.unsqueeze(0))

    each = vmap(grad(loss), in_dims=(None, 0, 0))
    squares, total = 0.0, None
    with _left_alone(model):
        for begin in range(0, len(x), chunk):
            found = each(parameters, x[begin : begin + chunk], y[begin : begin + chunk])
            flat = torch.cat([g.flatten(1) for g in found.values()], dim=1).double()
            squares += float(flat.square().sum())
            total = flat.sum(dim=0) if total is None else total + flat.sum(dim=0)
    assert total is not None
    n = len(x)
    variance = squares / n - float((total / n).square().sum())
    return variance / batch_size * (n - batch_size) / (n - 1)


def _noise(gradients: list[Tensor]) -> Estimate:
    """E||g - E g||^2, from the spread about the mean of n of them, which is n / (n - 1) too small."""
    n = len(gradients)
    mean = torch.stack(gradients).mean(dim=0)
    squares = [float((g - mean).square().sum()) * n / (n - 1) for g in gradients]
    value = fmean(squares)
    if n < FEW:  # two batches are equally far from their mean, whatever the noise: the spread says nothing
        return Estimate(value, 0.0, math.inf, f"variance over {n} batches only: no interval below {FEW}, take more")
    error = 2 * stdev(squares) / math.sqrt(n)
    return Estimate(value, max(0.0, value - error), value + error, f"variance over {n} batches, two standard errors")


def _moment(gradients: list[Tensor]) -> Estimate:
    squares = [float(g.square().sum()) for g in gradients]
    value, error = fmean(squares), 2 * stdev(squares) / math.sqrt(len(squares))
    return Estimate(
        value,
        max(0.0, value - error),
        math.inf,
        "the largest mean seen: the supremum, which theorems ask for, is above",
    )


def _smoothness(hessian: _Hessian, batches: Sequence[tuple[Any, Any]], steps: int, seed: int, loss: float) -> Estimate:
    """The largest eigenvalue on all batches, within its residual; and below, free of having chosen the direction by
    the same batches, the curvature that the other half of them has along the direction found on one half."""
    top, residual, _ = _largest(lambda v: hessian.times(v, batches), hessian, steps, seed)
    if top == 0:
        raise ValueError(f"the loss ({loss:.4g}) has no curvature here, its Hessian is zero: L cannot be estimated")
    _, _, direction = _largest(lambda v: hessian.times(v, batches[::2]), hessian, steps, seed)
    elsewhere = abs(float(direction @ hessian.times(direction, batches[1::2])))
    says = f"the largest curvature of {len(batches)} batches; elsewhere on the path it may be larger"
    if residual > CONVERGED * top:
        says = f"not converged after {steps} Lanczos steps (residual {residual:.2g}): take more; {says}"
    return Estimate(top, max(0.0, min(top - residual, elsewhere)), math.inf, says)


class _Hessian:
    """Of the mean loss of some batches, times a vector."""

    def __init__(self, model: nn.Module, loss_fn: LossFn, parameters: Sequence[Tensor]) -> None:
        self._model, self._loss_fn, self._parameters = model, loss_fn, parameters
        self.size = sum(p.numel() for p in parameters)
        self.device = parameters[0].device
        self.rounding = min(1e-4, 100 * torch.finfo(parameters[0].dtype).eps)
        self._drawn = random_state(self.device)

    def times(self, vector: Tensor, batches: Sequence[tuple[Any, Any]]) -> Tensor:
        product = torch.zeros(self.size, dtype=vector.dtype, device=self.device)
        set_random_state(self._drawn, self.device)  # with dropout, one Hessian for all products
        for x, y in batches:
            loss = self._loss_fn(self._model(x), y)
            gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, allow_unused=True)
            along = _dot(gradients, vector, self._parameters)
            if along is not None:
                second = torch.autograd.grad(along, self._parameters, allow_unused=True)
                product += _flat(second, self._parameters) / len(batches)
        if not torch.isfinite(product).all():
            raise ValueError("the loss has a curvature that is not finite here: L cannot be estimated")
        return product


def _largest(
    times: Callable[[Tensor], Tensor], hessian: _Hessian, steps: int, seed: int
) -> tuple[float, float, Tensor]:
    """By Lanczos: the largest eigenvalue in magnitude, its residual, and its direction."""
    vector = torch.randn(hessian.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    basis, diagonal, beside = [(vector / vector.norm()).to(hessian.device)], list[float](), list[float]()
    for _ in range(min(steps, hessian.size)):
        product = times(basis[-1])
        diagonal.append(float(basis[-1] @ product))
        for known in (*basis, *basis):  # twice is enough to stay orthogonal to rounding
            product -= (known @ product) * known
        beside.append(float(product.norm()))
        if beside[-1] < hessian.rounding * max(1e-30, *map(abs, diagonal)):
            break  # what is left is rounding: the space that the vector reaches is used up
        basis.append(product / beside[-1])
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, value in enumerate(beside[: len(diagonal) - 1]):
        small[i, i + 1] = small[i + 1, i] = value
    values, vectors = torch.linalg.eigh(small)
    top = int(values.abs().argmax())
    direction = torch.stack(basis[: len(diagonal)], dim=1) @ vectors[:, top].to(hessian.device)
    return float(values[top].abs()), abs(beside[-1] * float(vectors[-1, top])), direction


def _dot(gradients: Iterable[Tensor | None], vector: Tensor, parameters: Sequence[Tensor]) -> Tensor | None:
    parts = vector.split([p.numel() for p in parameters])
    terms = [
        (g * part.to(g.dtype).view_as(g)).sum()
        for g, part in zip(gradients, parts)
        if g is not None and g.requires_grad
    ]
    return torch.stack(terms).sum() if terms else None


def _flat(tensors: Iterable[Tensor | None], parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if t is None else t).detach().flatten().double() for t, p in zip(tensors, parameters)]
    )


def _in_the_group(step_seconds: float, size: int, device: torch.device) -> tuple[float, float | None]:
    """The slowest rank's step, and the median of a few averages of ``size`` numbers after a first one."""
    if not (dist.is_available() and dist.is_initialized()):
        return step_seconds, None
    slowest = torch.tensor(step_seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    flat, times = torch.zeros(size, device=device), []
    for _ in range(6):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(flat)
        flat[0].item()  # on a GPU, until it is there
        times.append(time.perf_counter() - begin)
    return float(slowest), median(times[1:])


def _whole_batches(loader: Iterable[tuple[Any, Any]], most: int) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    for batch in loader:
        if not isinstance(batch, Sequence) or len(batch) != 2:
            raise ValueError(f"loader must give pairs (x, y), got {type(batch).__name__}")
        if not found or _size(batch) == _size(found[0]):
            found.append((batch[0], batch[1]))
        if len(found) == most:
            break
    if len(found) < 2:
        raise ValueError(f"loader must give at least two batches of one size, got {len(found)}")
    return found


def _size(batch: tuple[Any, Any]) -> int | None:
    return len(batch[0]) if isinstance(batch[0], Sized) else None


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Buffers that forward changes are put back; gradients are not touched, and random numbers are as before."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with _random_numbers_kept():
        try:
            yield
        finally:
            for buffer, value in kept:
                buffer.copy_(value)
