"""The three algorithms on functions of a vector, for many seeds at once: fast enough to measure what theorems say.

The rules are those of ``LocalSGD``, in a few lines of numpy; a test holds the two against each other step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prsgd._check import whole_number
from prsgd.theory.rounds import growing_rounds

Array = NDArray[np.float64]

BLOCK = 1 << 16
"""So many numbers at once: they stay in a core's cache."""


@dataclass(frozen=True)
class Function:
    """f and its gradient, for points (..., m)."""

    value: Callable[[Array], Array]
    gradient: Callable[[Array], Array]
    start: Array
    """x^0 (m,)."""
    smoothness: float


@dataclass(frozen=True)
class Result:
    """What one or more seeds saw."""

    grad_squared: Array
    """(seeds,): mean over the run of ||grad f(x-bar)||^2, weighted as the theorem says."""
    drift: Array
    """(steps,): mean over workers and seeds of ||x_i - x-bar||^2 where each gradient is taken."""
    end: Array
    """(seeds, m): the consensus in the end."""


def wells(centre: Array) -> Function:
    """sum_j w(x_j - c_j), w(u) = u^2 / (1 + u^2); from 3 everywhere. L = 2."""
    return Function(
        value=lambda x: _w(x - centre).sum(axis=-1),
        gradient=lambda x: _dw(x - centre),
        start=np.full(len(centre), 3.0),
        smoothness=2.0,
    )


def opposite(dimension: int = 1) -> Function:
    """Two workers whose gradients are +1 and -1 everywhere, in each coordinate: nothing drifts apart faster."""
    signs = np.array([1.0, -1.0])[:, None]
    return Function(
        value=lambda x: np.zeros(x.shape[:-1]),
        gradient=lambda x: signs * np.ones_like(x) if x.ndim == 3 else np.zeros_like(x),
        start=np.zeros(dimension),
        smoothness=1.0,
    )


def two_wells(dimension: int) -> Function:
    """sum_j w(2 (x_j + 1)) + w(2 (x_j - 1)), from the ridge between the wells. L <= 16."""
    return Function(
        value=lambda x: (_w(2 * (x + 1)) + _w(2 * (x - 1))).sum(axis=-1),
        gradient=lambda x: 2 * (_dw(2 * (x + 1)) + _dw(2 * (x - 1))),
        start=np.zeros(dimension),
        smoothness=16.0,
    )


def run(
    function: Function,
    *,
    workers: int,
    steps: int,
    lr: float,
    period: int | None,
    overlap: int = 0,
    noise: float,
    seeds: int,
    seed: int = 0,
) -> Result:
    """Algorithm 1; ``period`` None averages once, at the end. ``noise`` is sigma^2, Gaussian."""
    if period is not None and overlap > period:
        raise ValueError(f"overlap must be at most the period {period}, got {overlap}")
    lrs = np.full(whole_number("steps", steps, at_least=1), lr)
    ends = set(range(period, steps + 1, period)) if period is not None else set()
    return _run(function, workers, lrs, ends, overlap, noise, seeds, seed)


def run_growing(
    function: Function,
    *,
    workers: int,
    rounds: int,
    noise: float,
    seeds: int,
    seed: int = 0,
    lr_scale: float = 1.0,
    lr_cap: float | None = None,
) -> Result:
    """Algorithm 2, overlap 0; the mean is weighted by the lrs."""
    plan = list(growing_rounds(workers=workers, rounds=rounds, lr_scale=lr_scale, lr_cap=lr_cap))
    lrs = np.concatenate([np.full(length, lr) for length, lr in plan])
    ends = set(np.cumsum([length for length, _ in plan]).tolist())
    return _run(function, workers, lrs, ends, 0, noise, seeds, seed)


def run_per_worker(
    function: Function,
    *,
    periods: Sequence[int],
    rounds: int,
    lr: float,
    noise: float,
    seeds: int,
    seed: int = 0,
) -> Result:
    """Algorithm 3, overlap 0: a worker that has taken its steps stands still. The mean is weighted by j_k / N."""
    lengths = np.asarray(periods)
    random = np.random.default_rng(seed)
    m = len(function.start)
    x = np.broadcast_to(function.start, (seeds, len(lengths), m)).copy()
    total, weight = np.zeros(seeds), 0.0
    drift = []
    for _ in range(rounds):
        for k in range(1, int(lengths.max()) + 1):
            active = lengths >= k
            total += active.mean() * _squared(function.gradient(x.mean(axis=1)))
            weight += active.mean()
            drift.append(_drift(x))
            gradient = function.gradient(x) + np.sqrt(noise / m) * random.standard_normal(x.shape)
            x -= lr * gradient * active[:, None]
        x[:] = x.mean(axis=1, keepdims=True)
    return Result(total / weight, np.array(drift), x.mean(axis=1))


def _run(
    function: Function,
    workers: int,
    lrs: Array,
    ends: set[int],
    overlap: int,
    noise: float,
    seeds: int,
    seed: int,
) -> Result:
    random = np.random.default_rng(seed)
    m = len(function.start)
    x = np.broadcast_to(function.start, (seeds, workers, m)).copy()
    snapshot = x.copy()
    total = np.zeros(seeds)
    drift = np.empty(len(lrs))
    closes = {end - overlap for end in ends} if workers > 1 else set()  # one alone has nobody to average with
    # The arrays are small, and a call into numpy costs more than its arithmetic: what does not depend on the step
    # before, random numbers and what is measured, is done for a block of steps, with the same numbers as one by one.
    block = max(1, BLOCK // x.size)
    for begin in range(0, len(lrs), block):
        now = lrs[begin : begin + block]
        noises = random.standard_normal((len(now), *x.shape))
        noises *= np.sqrt(noise / m)
        seen = np.empty_like(noises)
        for i, lr in enumerate(now):
            t = begin + i + 1
            seen[i] = x
            gradient = function.gradient(x)
            gradient += noises[i]
            if overlap and t in ends:  # between the gradient and the update
                x += snapshot.mean(axis=1, keepdims=True) - snapshot
            gradient *= lr
            x -= gradient
            if t in closes:
                if overlap:
                    snapshot = x.copy()
                else:
                    x[:] = np.add.reduce(x, axis=1, keepdims=True) / workers  # x.mean() in half the time
        mean = seen.mean(axis=2, keepdims=True)
        squared = _squared(function.gradient(mean.reshape(-1, m))).reshape(-1, seeds)
        for part in now[:, None] * squared:
            total += part
        seen -= mean
        drift[begin : begin + block] = _squared(seen).reshape(len(now), -1).mean(axis=-1)
    return Result(total / lrs.sum(), drift, x.mean(axis=1))


def _squared(gradient: Array) -> Array:
    squared: Array = np.square(gradient).sum(axis=-1)
    return squared


def _drift(x: Array) -> float:
    return float(np.square(x - x.mean(axis=1, keepdims=True)).sum(axis=-1).mean())


def _w(u: Array) -> Array:
    return u * u / (1 + u * u)


def _dw(u: Array) -> Array:
    return 2 * u / np.square(1 + u * u)
