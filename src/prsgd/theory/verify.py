"""What the paper proves, measured. A claim that does not hold when measured is reported as not holding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from prsgd.theory.bounds import (
    Problem,
    drift_bound,
    gradient_bound,
    growing_bound,
    per_worker_bound,
    period_is_guaranteed,
    speedup_lr,
)
from prsgd.theory.simulate import Array, Function, Result, opposite, run, run_growing, run_per_worker, two_wells, wells

DIMENSION = 20
NOISE = 20.0
"""sigma^2."""
ROUNDING = 1e-20
"""Squared: what float64 leaves of a drift that is none."""
EPSILON = 0.25
"""The quality at which the speed-up is read off."""
FIXED_STEPS = 4096
"""At which more workers help, or, averaged once, harm."""


@dataclass(frozen=True)
class Claim:
    """One line of the table."""

    name: str
    measured: float
    error: float
    """Two standard errors over the seeds; 0 where that makes no sense."""
    bound: float
    at_least: bool = False
    """Is the bound a lower one?"""
    note: str = ""

    @property
    def holds(self) -> bool:
        """By the measured value itself, to rounding; the error says how sure that is."""
        if self.at_least:
            return self.measured >= self.bound
        return self.measured <= self.bound + ROUNDING


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    seeds: int
    steps: int
    speedup_workers: Sequence[int]
    speedup_seeds: int
    repeats: int = 1
    """Of the slopes, with other random numbers: for an interval."""


QUICK = Effort(seeds=10, steps=1000, speedup_workers=(1, 4, 16, 64), speedup_seeds=6)
FULL = Effort(seeds=100, steps=4000, speedup_workers=(1, 2, 4, 8, 16, 32, 64), speedup_seeds=12, repeats=4)


def centre() -> Function:
    """The set-up of the measurements: 20 wells, centres in (-1, 1), from 3 everywhere."""
    return wells(np.random.default_rng(1).uniform(-1, 1, DIMENSION))


def constants(function: Function, noise: float = NOISE) -> Problem:
    """Of ``wells``: G^2 = 27/64 m + sigma^2, f* = 0."""
    m = len(function.start)
    return Problem(
        smoothness=function.smoothness,
        noise=noise,
        grad_second_moment=27 / 64 * m + noise,
        gap=float(function.value(function.start)),
    )


def claims(effort: Effort) -> Iterator[Claim]:
    """All of them, one after another."""
    for part in (lemma_1, sharpness, theorem_1, theorem_2, theorem_3, speedup, one_shot, communication):
        yield from part(effort)


@cache
def largest_drifts(seeds: int) -> dict[tuple[int, int], tuple[float, float]]:
    """(period, overlap) -> the largest drift of a run at a point where a gradient is taken, and Lemma 1's bound."""
    function = centre()
    found = {}
    for overlap in (0, 1, 4):
        for period in (1, 2, 4, 8, 16, 32):
            if overlap <= period:
                how = {"lr": 0.05, "period": period, "overlap": overlap}
                result = run(function, workers=8, steps=200, noise=NOISE, seeds=seeds, **how)  # type: ignore[arg-type]
                moment = constants(function).grad_second_moment
                bound = drift_bound(grad_second_moment=moment, **how)  # type: ignore[arg-type]
                found[period, overlap] = (float(result.drift.max()), bound)
    return found


def lemma_1(effort: Effort) -> Iterator[Claim]:
    """The drift at every point where a gradient is taken, its largest over the run, for periods and overlaps."""
    for (period, overlap), (drift, bound) in largest_drifts(effort.seeds).items():
        if period in (1, 4, 16):
            name = f"Lemma 1: largest drift, period {period}, overlap {overlap}"
            yield Claim(name, drift if drift > ROUNDING else 0.0, 0.0, bound, note=_share(drift, bound))


def opposite_drift(period: int, overlap: int) -> tuple[float, float]:
    """The largest drift of two workers that pull apart with all their might, and Lemma 1's bound for them."""
    how = {"lr": 0.05, "period": period, "overlap": overlap}
    found = run(opposite(), workers=2, steps=200, noise=0.0, seeds=1, **how)  # type: ignore[arg-type]
    return float(found.drift.max()), drift_bound(grad_second_moment=1.0, **how)  # type: ignore[arg-type]


def sharpness(_: Effort) -> Iterator[Claim]:
    """Where workers pull apart, the drift is lr^2 (I + d - 1)^2 g^2, a quarter of the bound: its form is right."""
    for period, overlap in ((16, 0), (16, 1), (16, 4)):
        drift, bound = opposite_drift(period, overlap)
        name = f"Lemma 1 is sharp: period {period}, overlap {overlap}, share"
        yield Claim(name, drift / bound, 0.0, 0.25 * (1 - 1e-9), True, "of the bound; workers that pull apart")
        assert drift <= bound


def theorem_1(effort: Effort) -> Iterator[Claim]:
    function = centre()
    problem = constants(function)
    for period, overlap in ((1, 0), (1, 1), (4, 0), (4, 1), (16, 1), (16, 4)):
        lr = speedup_lr(problem, workers=8, steps=effort.steps)
        found = run(
            function,
            workers=8,
            steps=effort.steps,
            lr=lr,
            period=period,
            overlap=overlap,
            noise=NOISE,
            seeds=effort.seeds,
        )
        bound = gradient_bound(problem, workers=8, steps=effort.steps, lr=lr, period=period, overlap=overlap)
        name = f"Theorem 1: mean |grad|^2, period {period}, overlap {overlap}"
        yield _mean(name, found, bound.total)


def theorem_2(effort: Effort) -> Iterator[Claim]:
    """As printed, where it throws the iterate away; and with scale and cap, against Algorithm 1 tuned for the run."""
    function = centre()
    problem = constants(function)
    rounds = effort.steps
    printed = run_growing(function, workers=8, rounds=rounds, noise=NOISE, seeds=effort.seeds)
    bound = growing_bound(problem, workers=8, rounds=rounds)
    scale, cap = 1 / problem.smoothness, 1 / (4 * problem.smoothness)
    early = {"workers": 8, "rounds": bound.early_rounds, "noise": NOISE, "seeds": effort.seeds}
    thrown = run_growing(function, **early)  # type: ignore[arg-type]
    kept = run_growing(function, lr_scale=scale, lr_cap=cap, **early)  # type: ignore[arg-type]
    far, near = (float(np.linalg.norm(r.end - function.start, axis=-1).mean()) for r in (thrown, kept))
    note = (
        f"after its {bound.early_rounds} rounds with lr > 1/L it is {far:.0f} from the start; with the cap {near:.1f}"
    )
    yield _mean("Theorem 2: mean |grad|^2, as printed", printed, bound.total, note)
    tamed = run_growing(function, workers=8, rounds=rounds, noise=NOISE, seeds=effort.seeds, lr_scale=scale, lr_cap=cap)
    bound = growing_bound(problem, workers=8, rounds=rounds, lr_scale=scale, lr_cap=cap)
    yield _mean("Theorem 2: mean |grad|^2, scale 1/L, cap 1/(4L)", tamed, bound.total)
    steps = bound.steps
    tuned = run(
        function, workers=8, steps=steps, lr=speedup_lr(problem, workers=8, steps=steps), period=1, noise=NOISE,
        seeds=effort.seeds,
    )  # fmt: skip
    ratio, error = _ratio(tamed.grad_squared, tuned.grad_squared)
    yield Claim(
        "Theorem 2: that, in those of Algorithm 1 for T", ratio, error, 2.0, note="times as large as the tuned run's"
    )


def theorem_3(effort: Effort) -> Iterator[Claim]:
    function = centre()
    problem = constants(function)
    periods = (16, 8, 4, 4)
    rounds = max(1, effort.steps // 8)
    lr = 0.02
    found = run_per_worker(function, periods=periods, rounds=rounds, lr=lr, noise=NOISE, seeds=effort.seeds)
    bound = per_worker_bound(problem, periods=periods, rounds=rounds, lr=lr)
    yield _mean("Theorem 3: mean |grad|^2, periods 16, 8, 4, 4", found, bound.total)
    even = run_per_worker(function, periods=(4,) * 4, rounds=rounds // 5, lr=lr, noise=NOISE, seeds=effort.seeds)
    early = run_per_worker(function, periods=periods, rounds=rounds // 5, lr=lr, noise=NOISE, seeds=effort.seeds)
    ratio, error = _ratio(function.value(early.end), function.value(even.end))
    name = "Theorem 3: early loss, in that of fixed rounds"
    yield Claim(name, ratio, error, 1.0, note="from a poor start Algorithm 3 is ahead")


def speedup(effort: Effort) -> Iterator[Claim]:
    """The slope of log T_eps against log N: -1 is a linear speed-up."""
    for period, limit, at_least in ((1, -0.95, False), (4, -0.93, False), (64, -0.85, True)):
        slopes = []
        for draw in range(effort.repeats):
            horizons = [horizon(workers, period, effort.speedup_seeds, draw) for workers in effort.speedup_workers]
            slopes.append(float(np.polyfit(np.log(effort.speedup_workers), np.log(horizons), 1)[0]))
        error = 2 * float(np.std(slopes, ddof=1)) / math.sqrt(len(slopes)) if len(slopes) > 1 else 0.0
        slope = float(np.mean(slopes))
        covered = sum(is_covered(n, period, effort) for n in effort.speedup_workers)
        what = "too rare for it, slope" if at_least else "linear speed-up, slope"
        note = f"T = {round(horizons[0]):,} ... {round(horizons[-1]):,}; guaranteed for {covered} of {len(horizons)} N"
        yield Claim(f"Corollary 1: {what}, period {period}", slope, error, limit, at_least, note)
    worse = [by_workers(n, None, effort.speedup_seeds) for n in (1, max(effort.speedup_workers))]
    name = f"one-shot at T = {FIXED_STEPS}: |grad|^2, N = {max(effort.speedup_workers)} to 1"
    note = "times as large: without averages on the way more workers make it worse"
    yield Claim(name, worse[1] / worse[0], 0.0, 1.0, True, note)


def is_covered(workers: int, period: int, effort: Effort) -> bool:
    """Does Corollary 1, part 2 cover the run of length T_eps?"""
    steps = round(horizon(workers, period, effort.speedup_seeds, 0))
    return period_is_guaranteed(workers=workers, steps=steps, period=period, overlap=0)


@cache
def by_workers(workers: int, period: int | None, seeds: int) -> float:
    """Mean squared gradient of a run of ``FIXED_STEPS`` steps with Corollary 1's lr; None: averaged only at the end."""
    function = centre()
    lr = speedup_lr(constants(function), workers=workers, steps=FIXED_STEPS)
    found = run(function, workers=workers, steps=FIXED_STEPS, lr=lr, period=period, noise=NOISE, seeds=seeds, seed=5)
    return float(found.grad_squared.mean())


@cache
def horizon(workers: int, period: int, seeds: int, draw: int, /) -> float:  # one way to call it: the cache's key
    """T_eps(N): the horizon T at which a whole run with Corollary 1's lr for that T averages ``EPSILON``.

    The start lies where f is flat, so very short runs look good too: the search begins at a long one.
    """
    if workers == 1 and period > 1:
        return horizon(1, 1, seeds, draw)  # nobody to average with
    function = centre()
    problem = constants(function)

    def quality(steps: int) -> float:
        lr = speedup_lr(problem, workers=workers, steps=steps)
        found = run(
            function, workers=workers, steps=steps, lr=lr, period=period, noise=NOISE, seeds=seeds, seed=5 + draw
        )
        return float(found.grad_squared.mean())

    return _crossing(quality, 36_000 // workers + 400, EPSILON)


def _crossing(quality: Callable[[int], float], begin: int, epsilon: float) -> float:
    """Where quality(T) is epsilon, if it falls about like 1 / sqrt(T)."""
    steps, tried = begin, dict[int, float]()
    for _ in range(12):
        tried[steps] = quality(steps) / epsilon
        nearest, ratio = min(tried.items(), key=lambda one: abs(one[1] - 1))
        if abs(ratio - 1) < 0.01:
            break
        steps = max(16, round(steps * tried[steps] ** 2))
        if steps in tried:  # it goes in circles, within its noise
            steps = round(math.sqrt(steps * nearest))
    if abs(ratio - 1) > 0.05:
        raise ArithmeticError(f"no horizon T has the quality {epsilon}: at T = {nearest} it is off by {ratio - 1:.1%}")
    return nearest * ratio**2


@cache
def excess_losses(seeds: int, steps: int) -> dict[int | None, float]:
    """period -> excess loss of the end with two wells a coordinate, in a single worker's; None: averaged once."""
    function = two_wells(DIMENSION)
    line = np.linspace(0.5, 1.5, 100_001)[:, None]
    best = DIMENSION * float(two_wells(1).value(line).min())

    def excess(workers: int, period: int | None) -> float:
        found = run(
            function, workers=workers, steps=steps, lr=0.02, period=period, noise=NOISE / DIMENSION, seeds=seeds
        )
        return float(function.value(found.end).mean()) - best

    alone = excess(1, None)
    return {period: excess(8, period) / alone for period in (1, 4, 16, 64, 256, None)}


def one_shot(effort: Effort) -> Iterator[Claim]:
    """Where averaging once fails: workers end in different wells, and their mean lies on the ridge between."""
    found = excess_losses(effort.seeds, effort.steps)
    note = "times a single worker's excess over f*: the mean of models in different wells is in none"
    yield Claim("one-shot averaging fails: excess loss", found[None], 0.0, 10.0, True, note)
    yield Claim("period 64 does not: excess loss", found[64], 0.0, 2.0, note="times a single worker's")


def communication(effort: Effort) -> Iterator[Claim]:
    """Rounds to reach the same quality, against period 1."""
    base = horizon(8, 1, effort.speedup_seeds, 0)
    for period in (4, 16):
        steps = horizon(8, period, effort.speedup_seeds, 0)
        ratio = (steps / period) / base
        note = f"{round(steps):,} steps against {round(base):,}"
        yield Claim(f"rounds to the same quality, period {period}", ratio, 0.0, 1.5 / period, note=note)


def _ratio(above: Array, below: Array) -> tuple[float, float]:
    """Of the means over the seeds, and two standard errors."""
    ratio = float(above.mean() / below.mean())
    parts = [float(part.var(ddof=1)) / len(part) / float(part.mean()) ** 2 for part in (above, below)]
    return ratio, 2 * abs(ratio) * math.sqrt(sum(parts))


def _mean(name: str, found: Result, bound: float, note: str = "") -> Claim:
    values = found.grad_squared
    error = 2 * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Claim(name, float(values.mean()), error, bound, note=note or _share(float(values.mean()), bound))


def _share(measured: float, bound: float) -> str:
    return f"{measured / bound:.2g} of the bound" if bound else "none, as it must be"
