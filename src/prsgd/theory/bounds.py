"""What the paper guarantees, term by term, for any overlap.

Legend (paper -> here): N ``workers``, T ``steps``, I ``period``, S ``rounds``, K^s ``length of round s``,
gamma ``lr``, L ``smoothness``, sigma^2 ``noise``, G^2 ``grad_second_moment``, f(x^0) - f* ``gap``, d ``overlap``.

All of it is for plain SGD with uniform weights: momentum is not covered. The bounds are on squared norms of the
gradient at the consensus, averaged over the run. Theorem 1 is printed for Algorithm 1, which is overlap 1. Its proof
needs of the overlap only how many steps lie between a snapshot and a gradient that is taken before the next one lands:
at most I + d - 1 (docs/theory.md). So the paper's formulas hold with I + d - 1 in the place of I, and for d = 1 they
are the printed ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prsgd._check import positive, whole_number


@dataclass(frozen=True)
class Problem:
    """The constants of Assumption 1, of one worker's stochastic gradients.

    >>> Problem(smoothness=2.0, noise=1.0, grad_second_moment=4.0, gap=3.0).gap
    3.0
    """

    smoothness: float
    """L: gradients of each f_i change by at most L times the distance."""
    noise: float
    """sigma^2: E||grad F_i - grad f_i||^2 is at most this."""
    grad_second_moment: float
    """G^2: E||grad F_i||^2 is at most this."""
    gap: float
    """f(x^0) - f*."""

    def __post_init__(self) -> None:
        positive("smoothness", self.smoothness)
        for name in ("noise", "grad_second_moment", "gap"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


@dataclass(frozen=True)
class Bound:
    """A bound as the sum of its terms, and what must be said of it.

    >>> bound = Bound(initial=1.0, drift=20.25, noise=0.5)
    >>> bound.total, bound.dominant, bound.applies
    (21.75, 'drift', True)
    """

    initial: float
    """What is left of the distance from the start: falls with the number of steps."""
    drift: float
    """That the workers are at different points: grows with the period."""
    noise: float
    """Of the gradients: falls with the number of workers."""
    caveats: tuple[str, ...] = ()
    """Assumptions that do not hold, in plain words; empty if the theorem applies."""

    @property
    def total(self) -> float:
        return self.initial + self.drift + self.noise

    @property
    def applies(self) -> bool:
        """Does the theorem promise here what it is quoted for?"""
        return not self.caveats

    @property
    def dominant(self) -> str:
        """The largest term: "initial", "drift" or "noise"."""
        return max(("initial", "drift", "noise"), key=lambda name: float(getattr(self, name)))


def drift_bound(*, lr: float, period: int, overlap: int, grad_second_moment: float) -> float:
    """Bound on the workers' mean squared distance from the consensus after a landing (Lemma 1, any overlap).

    4 lr^2 (I + d - 1)^2 G^2, with E||g_i||^2 <= G^2. It holds at every point where a gradient is taken.

    >>> drift_bound(lr=0.5, period=2, overlap=1, grad_second_moment=1.0)
    4.0
    """
    lr = positive("lr", lr)
    return 4 * lr**2 * _reach(period, overlap) ** 2 * grad_second_moment


def snapshot_drift_bound(*, lr: float, period: int, grad_second_moment: float) -> float:
    """The same at the snapshots, where a ``Record`` measures it: 4 lr^2 I^2 G^2, whatever the overlap.

    >>> snapshot_drift_bound(lr=0.5, period=2, grad_second_moment=1.0)
    4.0
    """
    lr = positive("lr", lr)
    return 4 * lr**2 * whole_number("period", period, at_least=1) ** 2 * grad_second_moment


def gradient_bound(problem: Problem, *, workers: int, steps: int, lr: float, period: int, overlap: int = 1) -> Bound:
    """Theorem 1: (1/T) sum_t E||grad f(x-bar^{t-1})||^2 for Algorithm 1 with a constant lr <= 1/L.

        2 (f(x^0) - f*) / (lr T)  +  4 lr^2 (I + d - 1)^2 G^2 L^2  +  L lr sigma^2 / N

    >>> problem = Problem(smoothness=2.0, noise=8.0, grad_second_moment=9.0, gap=5.0)
    >>> gradient_bound(problem, workers=4, steps=80, lr=0.125, period=3)
    Bound(initial=1.0, drift=20.25, noise=0.5, caveats=())
    """
    workers, steps = whole_number("workers", workers, at_least=1), whole_number("steps", steps, at_least=1)
    lr = positive("lr", lr)
    reach = _reach(period, overlap)
    smoothness = problem.smoothness
    return Bound(
        initial=2 * problem.gap / (lr * steps),
        drift=4 * lr**2 * reach**2 * problem.grad_second_moment * smoothness**2,
        noise=smoothness * lr * problem.noise / workers,
        caveats=_lr_caveats(lr, smoothness),
    )


def speedup_lr(problem: Problem, *, workers: int, steps: int) -> float:
    """Corollary 1's lr for a linear speed-up, sqrt(N) / (L sqrt(T)); at most 1/L if T >= N.

    >>> speedup_lr(Problem(smoothness=2.0, noise=1.0, grad_second_moment=1.0, gap=1.0), workers=4, steps=10_000)
    0.01
    """
    workers, steps = whole_number("workers", workers, at_least=1), whole_number("steps", steps, at_least=1)
    return math.sqrt(workers) / (problem.smoothness * math.sqrt(steps))


def speedup_bound(problem: Problem, *, workers: int, steps: int, period: int, overlap: int = 1) -> Bound:
    """Corollary 1, part 1: Theorem 1 with that lr.

        2 L (f(x^0) - f*) / sqrt(N T)  +  4 N (I + d - 1)^2 G^2 / T  +  sigma^2 / sqrt(N T)

    The first and the last fall with N: N workers need T/N steps. The middle one grows with N; it is no larger in order
    than the others if T > N^3 (constant period), and if the period is at most ``largest_period`` (part 2) it is
    at most 4 G^2 / sqrt(N T).

    >>> problem = Problem(smoothness=2.0, noise=8.0, grad_second_moment=9.0, gap=5.0)
    >>> bound = speedup_bound(problem, workers=4, steps=10_000, period=1)
    >>> bound.initial, bound.drift, bound.noise
    (0.1, 0.0144, 0.04)
    """
    workers, steps = whole_number("workers", workers, at_least=1), whole_number("steps", steps, at_least=1)
    root = math.sqrt(workers * steps)
    caveats = []
    if steps < workers:
        caveats.append(f"T = {steps} is below N = {workers}: the lr of Corollary 1 is above 1/L")
    covered = period_is_guaranteed(workers=workers, steps=steps, period=period, overlap=overlap)
    if steps <= workers**3 and not covered:
        caveats.append(f"T = {steps} is not above N^3 = {workers**3}: with period {period} there is no linear speed-up")
    found = Bound(
        initial=2 * problem.smoothness * problem.gap / root,
        drift=4 * workers * _reach(period, overlap) ** 2 * problem.grad_second_moment / steps,
        noise=problem.noise / root,
    )
    if not covered and steps > workers**3 and found.drift > found.initial + found.noise:
        caveats.append(f"the drift, {found.drift:.3g}, is larger than the terms that fall with N: no speed-up yet")
    return replace(found, caveats=tuple(caveats))


def largest_period(*, workers: int, steps: int, overlap: int = 1) -> int:
    """Corollary 1, part 2: the largest period with the rate O(1 / sqrt(N T)).

    I + d - 1 <= T^(1/4) / N^(3/4). Where that leaves no period (it is at least 1, and at least the overlap), it is the
    smallest that there can be, and ``period_is_guaranteed`` is False for it.

    The paper's own experiment, 8 workers, ResNet-20 on CIFAR-10 with batch 32:

    >>> [largest_period(workers=8, steps=epochs * 195) for epochs in (10, 300)]
    [1, 3]
    """
    workers, steps = whole_number("workers", workers, at_least=1), whole_number("steps", steps, at_least=1)
    overlap = whole_number("overlap", overlap, at_least=0)
    reach = math.isqrt(math.isqrt(steps // workers**3))  # the largest r with r^4 <= T / N^3, in whole numbers
    return max(1, overlap, reach + 1 - overlap)


def period_is_guaranteed(*, workers: int, steps: int, period: int, overlap: int = 1) -> bool:
    """Is (I + d - 1)^4 N^3 <= T, and N <= T, so that Corollary 1, part 2 covers this period?

    >>> period_is_guaranteed(workers=8, steps=58_500, period=3), period_is_guaranteed(workers=8, steps=58_500, period=4)
    (True, False)
    """
    steps = whole_number("steps", steps, at_least=1)
    return steps_for_speedup(workers=workers, period=period, overlap=overlap) <= steps


def steps_for_speedup(*, workers: int, period: int, overlap: int = 1) -> int:
    """The smallest T for which Corollary 1, part 2 covers this period: (I + d - 1)^4 N^3, and at least N for its lr.

    >>> steps_for_speedup(workers=8, period=4)
    131072
    """
    workers = whole_number("workers", workers, at_least=1)
    return max(workers, _reach(period, overlap) ** 4 * workers**3)


@dataclass(frozen=True)
class GrowingBound(Bound):
    """Theorem 2's, with its series summed. It allows for an lr above 1/L in the first rounds, at a price.

    >>> bound = GrowingBound(initial=8.0, drift=0.0, noise=2.0, early=3.0, early_rounds=1, steps=1)
    >>> bound.total, bound.initial - bound.early  # what the early rounds cost is a part of initial
    (10.0, 5.0)
    """

    early: float = 0.0
    """That price: 2 C / W, a part of ``initial``."""
    early_rounds: int = 0
    """How many rounds have lr > 1/L."""
    steps: int = 0
    """T = sum of the K^s."""


def growing_bound(
    problem: Problem,
    *,
    workers: int,
    rounds: int,
    overlap: int = 0,
    lr_scale: float = 1.0,
    lr_cap: float | None = None,
) -> GrowingBound:
    """Theorem 2: the lr-weighted mean of E||grad f(x-bar)||^2 for Algorithm 2, its series summed exactly.

    The paper says that constants exist; here they are added up. With W = sum_s K^s lr_s, and r_s <= K^s + d - 1 steps
    between a snapshot and a gradient of round s, at lrs of at most g_s,

        2 (f(x^0) - f* + C) / W  +  4 G^2 L^2 sum_s K^s lr_s (g_s r_s)^2 / W  +  L sigma^2 sum_s K^s lr_s^2 / (N W),
        C = sum over the rounds with lr_s > 1/L of K^s (lr_s^2 L - lr_s) G^2 / 2:

    in those rounds the term that the proof drops has the other sign, and is bounded by G^2. As printed (``lr_scale`` 1,
    no cap) C is huge. ``rounds`` is S.

    >>> problem = Problem(smoothness=1.0, noise=2.0, grad_second_moment=3.0, gap=4.0)
    >>> bound = growing_bound(problem, workers=1, rounds=1)  # K = 1, lr = 1: one step from the common start
    >>> bound.initial, bound.drift, bound.noise, bound.early
    (8.0, 0.0, 2.0, 0.0)
    """
    from prsgd.theory.rounds import growing_rounds

    overlap = whole_number("overlap", overlap, at_least=0)
    smoothness, g2 = problem.smoothness, problem.grad_second_moment
    weight = drift = noise = early = 0.0
    steps = early_rounds = 0
    before: tuple[int, float] | None = None
    for length, lr in growing_rounds(workers=workers, rounds=rounds, lr_scale=lr_scale, lr_cap=lr_cap):
        carried = 0 if before is None else min(overlap, before[0])  # steps in flight when the last average landed
        largest = lr if before is None or not carried else max(lr, before[1])
        steps += length
        weight += length * lr
        drift += length * lr * (largest * (length + carried - 1)) ** 2
        noise += length * lr**2
        if _above(lr, smoothness):
            early_rounds += 1
            early += length * (lr**2 * smoothness - lr) * g2 / 2
        before = length, lr
    return GrowingBound(
        initial=2 * (problem.gap + early) / weight,
        drift=4 * g2 * smoothness**2 * drift / weight,
        noise=smoothness * problem.noise * noise / (workers * weight),
        early=2 * early / weight,
        early_rounds=early_rounds,
        steps=steps,
    )


def active_workers(periods: Sequence[int]) -> list[int]:
    """j_k for k = 1 ... I_1: how many workers take a k-th step in a round (Theorem 3).

    >>> active_workers([4, 2, 1])
    [3, 2, 1, 1]
    """
    checked = _periods(periods)
    return [sum(period >= k for period in checked) for k in range(1, max(checked) + 1)]


def per_worker_bound(problem: Problem, *, periods: Sequence[int], rounds: int, lr: float) -> Bound:
    """Theorem 3: Algorithm 3 with periods I_i, identical distributions (Assumption 2), overlap 0.

    On the mean of E||grad f(x-bar^{s,k-1})||^2 over rounds s and steps k, weighted by j_k (``active_workers``):

        2 (f(x^0) - f*) / (lr S mean_i I_i)  +  4 lr^2 I_1^2 G^2 L^2  +  L lr sigma^2 / N,   I_1 the largest

    >>> problem = Problem(smoothness=2.0, noise=8.0, grad_second_moment=9.0, gap=5.0)
    >>> per_worker_bound(problem, periods=[6, 2], rounds=20, lr=0.125)
    Bound(initial=1.0, drift=81.0, noise=1.0, caveats=())
    """
    checked = _periods(periods)
    rounds, lr = whole_number("rounds", rounds, at_least=1), positive("lr", lr)
    smoothness = problem.smoothness
    return Bound(
        initial=2 * problem.gap / (lr * rounds * (sum(checked) / len(checked))),
        drift=4 * lr**2 * max(checked) ** 2 * problem.grad_second_moment * smoothness**2,
        noise=smoothness * lr * problem.noise / len(checked),
        caveats=_lr_caveats(lr, smoothness),
    )


def per_worker_speedup_bound(problem: Problem, *, periods: Sequence[int], steps: int) -> Bound:
    """Corollary 2: Theorem 3 with lr = sqrt(N) / (L sqrt(T)) and S = T / I_N rounds, I_N the smallest period.

    The corollary says that this is O(1 / sqrt(N T)) if all I_i are of the order T^(1/4) / N^(3/4); here is the number.

    >>> problem = Problem(smoothness=2.0, noise=8.0, grad_second_moment=9.0, gap=5.0)
    >>> bound = per_worker_speedup_bound(problem, periods=[1, 1, 1, 1], steps=10_000)
    >>> bound.initial, round(bound.drift, 12), bound.noise
    (0.1, 0.0144, 0.04)
    """
    checked = _periods(periods)
    if whole_number("steps", steps, at_least=1) < min(checked):
        raise ValueError(f"steps must be at least the smallest period {min(checked)}, got {steps}: there is no round")
    lr = speedup_lr(problem, workers=len(checked), steps=steps)
    return per_worker_bound(problem, periods=checked, rounds=steps // min(checked), lr=lr)


def _reach(period: int, overlap: int) -> int:
    """I + d - 1: the most steps between a snapshot and a gradient taken before the next average lands."""
    period = whole_number("period", period, at_least=1)
    overlap = whole_number("overlap", overlap, at_least=0)
    if overlap > period:
        raise ValueError(f"overlap must be at most the period {period}, got {overlap}")
    return period + overlap - 1


def _periods(periods: Sequence[int]) -> list[int]:
    if isinstance(periods, str) or not isinstance(periods, Sequence) or not periods:
        raise ValueError(f"periods must be a list with one period per worker, got {periods!r}")
    return [whole_number(f"periods[{i}]", period, at_least=1) for i, period in enumerate(periods)]


def _above(lr: float, smoothness: float) -> bool:
    """Is lr > 1/L, by more than rounding?"""
    return lr * smoothness > 1 + 1e-12


def _lr_caveats(lr: float, smoothness: float) -> tuple[str, ...]:
    if not _above(lr, smoothness):
        return ()
    return (f"lr = {lr:g} is {lr * smoothness:.3g} times 1/L = {1 / smoothness:g}: the theorem is silent there",)
