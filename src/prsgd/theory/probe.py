"""The constants of a real problem, estimated where training has been so far.

None of them is a constant in practice: the curvature changes many times over along a path of training, so look again
and again (``since=``) and keep the largest. A look at the start alone misleads.

    L        the largest eigenvalue of the Hessian in magnitude, by Lanczos: a lower estimate of the supremum
    sigma^2  the variance of a mini-batch gradient
    G^2      the largest mean squared norm of a mini-batch gradient seen: a lower estimate
    gap      f(x) - f* at the first look, f* = 0 unless it is given (right for cross-entropy)
    seconds  of a step's forward and backward pass; in a process group also of one average of the model
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from prsgd._check import whole_number
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
    looks: int

    @property
    def problem(self) -> Problem:
        """For ``prsgd.theory.bounds``."""
        return Problem(
            smoothness=self.smoothness.value,
            noise=self.noise.value,
            grad_second_moment=self.grad_second_moment.value,
            gap=self.gap.value,
        )


def probe(
    model: nn.Module,
    loss_fn: LossFn,
    loader: Iterable[tuple[Any, Any]],
    *,
    max_batches: int = 64,
    curvature_batches: int = 4,
    lanczos_steps: int = 10,
    best_value: float = 0.0,
    since: Probed | None = None,
    seed: int = 0,
) -> Probed:
    """Look at ``loss_fn(model(x), y)`` where the model is now; the model is left as it was.

    ``loader`` gives batches (x, y) of the size that a worker trains with; up to ``max_batches`` are looked at. Pass the
    last result as ``since`` to keep the largest values along the path, and the first look's gap. In a process group it
    is a collective: every rank looks at its own batches, and how long an average takes is measured too.

    >>> import torch, prsgd
    >>> from prsgd.tasks import synthetic
    >>> model, data = synthetic.Wells(), synthetic.load()
    >>> batches = [(data.train_x[i : i + 8], data.train_y[i : i + 8]) for i in range(0, 512, 8)]
    >>> found = prsgd.probe(model, synthetic.mean_value, batches)
    >>> round(found.gap.value, 2) == round(synthetic.constants().start_value, 2)
    True
    """
    max_batches = whole_number("max_batches", max_batches, at_least=2)
    curvature_batches = whole_number("curvature_batches", curvature_batches, at_least=1)
    lanczos_steps = whole_number("lanczos_steps", lanczos_steps, at_least=2)
    with _random_numbers_kept():  # a loader that shuffles draws some
        batches = [batch for _, batch in zip(range(max_batches), loader)]
    if len(batches) < 2:
        raise ValueError(f"loader must give at least two batches, got {len(batches)}")
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
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            losses.append(float(loss.detach()))
            times.append(time.perf_counter() - begin)
            if not math.isfinite(losses[-1]):
                raise ValueError(f"the loss must be finite, got {losses[-1]} on batch {len(losses) - 1}")
            gradients.append(_flat(found, parameters))
        curvature, residual = _curvature(
            model, loss_fn, batches[:curvature_batches], parameters, lanczos_steps, torch.Generator().manual_seed(seed)
        )
    smoothness = _smoothness(curvature, residual, lanczos_steps)
    noise, moment = _noise(gradients), _moment(gradients)
    loss_now = fmean(losses)
    error = 2 * stdev(losses) / math.sqrt(len(losses))
    gap = Estimate(
        max(0.0, loss_now - best_value),
        max(0.0, loss_now - best_value - error),
        loss_now - best_value + error,
        f"the loss at the first look, above f* = {best_value:g}",
    )
    size = sum(p.numel() for p in parameters)
    step_seconds, average_seconds = _in_the_group(median(times), size, parameters[0].device)
    now = Probed(smoothness, noise, moment, gap, loss_now, step_seconds, average_seconds, size, 1)
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


def _smoothness(curvature: float, residual: float, steps: int) -> Estimate:
    """The largest Ritz value in magnitude lies within its residual of an eigenvalue."""
    if curvature == 0:
        raise ValueError("the loss has no curvature here (its Hessian is zero): L cannot be estimated")
    says = "the largest curvature seen: the supremum along the path is above"
    if residual > CONVERGED * curvature:
        says = f"not converged after {steps} Lanczos steps (residual {residual:.2g}): take more; {says}"
    return Estimate(curvature, max(0.0, curvature - residual), math.inf, says)


def _curvature(
    model: nn.Module,
    loss_fn: LossFn,
    batches: list[tuple[Any, Any]],
    parameters: Sequence[Tensor],
    steps: int,
    generator: torch.Generator,
) -> tuple[float, float]:
    """The largest eigenvalue in magnitude of the mean loss's Hessian, by Lanczos, and its residual."""
    size = sum(p.numel() for p in parameters)
    steps = min(steps, size)
    device, dtype = parameters[0].device, torch.float64
    noise_level = min(1e-4, 100 * torch.finfo(parameters[0].dtype).eps)

    drawn = torch.get_rng_state()

    def times(vector: Tensor) -> Tensor:
        product = torch.zeros(size, dtype=dtype, device=device)
        torch.set_rng_state(drawn)  # with dropout, one Hessian for all products
        for x, y in batches:
            gradients = torch.autograd.grad(loss_fn(model(x), y), parameters, create_graph=True, allow_unused=True)
            along = _dot(gradients, vector, parameters)
            if along is not None:
                second = torch.autograd.grad(along, parameters, allow_unused=True)
                product += _flat(second, parameters).to(dtype) / len(batches)
        return product

    vector = torch.randn(size, generator=generator, dtype=dtype).to(device)
    vector /= vector.norm()
    basis, diagonal, beside = [vector], list[float](), list[float]()
    for _ in range(steps):
        product = times(basis[-1])
        diagonal.append(float(basis[-1] @ product))
        for known in (*basis, *basis):  # twice is enough to stay orthogonal to rounding
            product -= (known @ product) * known
        length = float(product.norm())
        beside.append(length)
        if length < noise_level * max(1e-30, *map(abs, diagonal)):
            break  # what is left is rounding: the space that the vector reaches is used up
        basis.append(product / length)
    small = torch.diag(torch.tensor(diagonal, dtype=dtype))
    for i, value in enumerate(beside[: len(diagonal) - 1]):
        small[i, i + 1] = small[i + 1, i] = value
    values, vectors = torch.linalg.eigh(small)
    largest = int(values.abs().argmax())
    return float(values[largest].abs()), abs(beside[-1] * float(vectors[-1, largest]))


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


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
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
