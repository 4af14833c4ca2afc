"""The paper's bounds: by hand, as limits that must be equal, and as properties."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prsgd.theory.bounds import (
    Bound,
    Problem,
    active_workers,
    drift_bound,
    gradient_bound,
    growing_bound,
    largest_period,
    per_worker_bound,
    per_worker_speedup_bound,
    period_is_guaranteed,
    snapshot_drift_bound,
    speedup_bound,
    speedup_lr,
    steps_for_speedup,
)
from prsgd.theory.rounds import growing_rounds, rounds_for_steps

PROBLEM = Problem(smoothness=2.0, noise=8.0, grad_second_moment=9.0, gap=5.0)

counts = st.integers(1, 64)
lengths = st.integers(1, 10**6)
sizes = st.floats(1e-3, 1e3)
problems = st.builds(Problem, smoothness=sizes, noise=sizes, grad_second_moment=sizes, gap=sizes)


def test_lemma_1_by_hand() -> None:
    """4 lr^2 (I + d - 1)^2 G^2; the printed one is d = 1."""
    assert drift_bound(lr=0.5, period=3, overlap=1, grad_second_moment=2.0) == 4 * 0.25 * 9 * 2
    assert drift_bound(lr=0.5, period=3, overlap=0, grad_second_moment=2.0) == 4 * 0.25 * 4 * 2
    assert drift_bound(lr=0.5, period=3, overlap=3, grad_second_moment=2.0) == 4 * 0.25 * 25 * 2
    assert drift_bound(lr=0.5, period=1, overlap=0, grad_second_moment=2.0) == 0  # mini-batch SGD does not drift
    assert snapshot_drift_bound(lr=0.5, period=3, grad_second_moment=2.0) == 4 * 0.25 * 9 * 2


def test_theorem_1_by_hand() -> None:
    found = gradient_bound(PROBLEM, workers=4, steps=80, lr=0.125, period=3, overlap=1)
    assert (found.initial, found.drift, found.noise) == (2 * 5 / (0.125 * 80), 4 / 64 * 9 * 9 * 4, 2 * 0.125 * 8 / 4)
    assert found.total == 1 + 20.25 + 0.5
    assert (found.dominant, found.applies) == ("drift", True)
    tight = gradient_bound(PROBLEM, workers=4, steps=80, lr=0.125, period=3, overlap=0)
    assert tight.drift == 4 / 64 * 4 * 9 * 4


def test_an_lr_above_1_over_l_is_said() -> None:
    found = gradient_bound(PROBLEM, workers=4, steps=80, lr=0.75, period=3)
    assert found.caveats == ("lr = 0.75 is 1.5 times 1/L = 0.5: the theorem is silent there",)
    assert gradient_bound(PROBLEM, workers=4, steps=80, lr=0.5, period=3).applies


@given(problems, counts, lengths, st.integers(1, 100), st.integers(0, 3))
def test_corollary_1_is_theorem_1_with_its_lr(
    problem: Problem, workers: int, steps: int, period: int, overlap: int
) -> None:
    overlap = min(overlap, period)
    lr = speedup_lr(problem, workers=workers, steps=steps)
    theorem = gradient_bound(problem, workers=workers, steps=steps, lr=lr, period=period, overlap=overlap)
    corollary = speedup_bound(problem, workers=workers, steps=steps, period=period, overlap=overlap)
    for term in ("initial", "drift", "noise"):
        assert getattr(theorem, term) == pytest.approx(getattr(corollary, term), rel=1e-9)
    if steps >= workers:
        assert lr <= (1 + 1e-12) / problem.smoothness


@given(problems, counts, lengths, st.integers(1, 3))
def test_corollary_1_part_2(problem: Problem, workers: int, steps: int, overlap: int) -> None:
    """At the largest period the drift term is at most 4 G^2 / sqrt(N T), and one more step breaks the condition."""
    period = max(overlap, largest_period(workers=workers, steps=steps, overlap=overlap))
    covered = period_is_guaranteed(workers=workers, steps=steps, period=period, overlap=overlap)
    reach = period + overlap - 1
    assert covered == (Fraction(reach) ** 4 <= Fraction(steps, workers**3))
    if covered:
        found = speedup_bound(problem, workers=workers, steps=steps, period=period, overlap=overlap)
        assert found.drift <= 4 * problem.grad_second_moment / math.sqrt(workers * steps) * (1 + 1e-9)
        assert not period_is_guaranteed(workers=workers, steps=steps, period=period + 1, overlap=overlap)
    needed = steps_for_speedup(workers=workers, period=period, overlap=overlap)
    assert period_is_guaranteed(workers=workers, steps=needed, period=period, overlap=overlap)
    assert needed == 1 or not period_is_guaranteed(workers=workers, steps=needed - 1, period=period, overlap=overlap)


def test_the_papers_own_experiment() -> None:
    """8 workers, 195 steps an epoch: I = 1 for 10 epochs, 3 for 300; T^(1/4) / N^(3/4) by a calculator."""
    assert (pytest.approx(1.397, abs=1e-3), pytest.approx(3.269, abs=1e-3)) == (
        1950**0.25 / 8**0.75,
        58500**0.25 / 8**0.75,
    )
    assert [largest_period(workers=8, steps=steps) for steps in (1950, 58500)] == [1, 3]
    assert largest_period(workers=8, steps=58500, overlap=0) == 4
    assert largest_period(workers=64, steps=100) == 1
    assert largest_period(workers=1, steps=81) == 3  # an exact fourth power
    assert largest_period(workers=1, steps=80) == 2


def test_the_largest_period_can_have_its_overlap() -> None:
    """N = 1, T = 5^4, so I + d - 1 <= 5: overlap 4 would leave period 2, which cannot have it; 4 is not covered."""
    assert [largest_period(workers=1, steps=625, overlap=d) for d in (0, 1, 2, 3, 4)] == [6, 5, 4, 3, 4]
    assert not period_is_guaranteed(workers=1, steps=625, period=4, overlap=4)


def test_no_guarantee_below_one_step_a_worker() -> None:
    """Period 1 with overlap 0 has no drift, but Corollary 1's lr is above 1/L for T < N."""
    assert steps_for_speedup(workers=8, period=1, overlap=0) == 8
    assert not period_is_guaranteed(workers=8, steps=7, period=1, overlap=0)
    for workers in (3, 7, 49):  # T = N: the lr is 1/L to rounding, which is allowed
        problem = dataclasses.replace(PROBLEM, smoothness=0.3)
        lr = speedup_lr(problem, workers=workers, steps=workers)
        assert gradient_bound(problem, workers=workers, steps=workers, lr=lr, period=1).applies


def test_where_corollary_1_promises_no_speedup() -> None:
    assert speedup_bound(PROBLEM, workers=8, steps=600, period=1).applies
    assert speedup_bound(PROBLEM, workers=8, steps=10**6, period=4).applies  # T > N^3: any constant period
    [rare] = speedup_bound(PROBLEM, workers=8, steps=600, period=1000).caveats
    assert "is larger than the terms that fall with N: no speed-up yet" in rare
    few = speedup_bound(PROBLEM, workers=8, steps=500, period=4).caveats
    assert few == ("T = 500 is not above N^3 = 512: with period 4 there is no linear speed-up",)
    assert speedup_bound(PROBLEM, workers=8, steps=500, period=1, overlap=0).applies  # no drift at all
    assert speedup_bound(PROBLEM, workers=8, steps=5, period=1).caveats[0].startswith("T = 5 is below N = 8")


@given(problems, counts, lengths, st.floats(1e-4, 1.0), st.integers(2, 100), st.integers(0, 2))
def test_theorem_1_is_monotone(
    problem: Problem, workers: int, steps: int, lr: float, period: int, overlap: int
) -> None:
    def bound(problem: Problem = problem, **changes: int) -> Bound:
        given = {"workers": workers, "steps": steps, "period": period, "overlap": overlap, **changes}
        return gradient_bound(problem, lr=lr, **given)

    assert bound(period=period + 1).drift > bound().drift
    if overlap < period:
        assert bound(overlap=overlap + 1).drift > bound().drift
    assert bound(dataclasses.replace(problem, noise=2 * problem.noise)).noise == pytest.approx(2 * bound().noise)
    assert bound(steps=2 * steps).initial == pytest.approx(bound().initial / 2)
    assert bound(period=period + 1).total >= bound().total
    assert bound(steps=max(1, steps // 2)).total >= bound().total
    one = gradient_bound(problem, workers=1, steps=steps, lr=lr, period=period, overlap=overlap)
    many = gradient_bound(problem, workers=workers, steps=steps, lr=lr, period=period, overlap=overlap)
    assert many.noise == pytest.approx(one.noise / workers)
    assert (many.initial, many.drift) == (one.initial, one.drift)


def test_theorem_2_by_hand() -> None:
    """N = 1: K = 1, 2, 2 and lr = 1, 2^(-2/3), 3^(-2/3). With L = 1/2 no lr is above 1/L."""
    problem = Problem(smoothness=0.5, noise=2.0, grad_second_moment=3.0, gap=4.0)
    lr = [1.0, 2 ** (-2 / 3), 3 ** (-2 / 3)]
    weight = lr[0] + 2 * lr[1] + 2 * lr[2]
    found = growing_bound(problem, workers=1, rounds=3)
    assert found.steps == 5
    assert found.early == 0
    assert found.initial == pytest.approx(2 * 4 / weight, rel=1e-12)
    drift = 2 * lr[1] * (lr[1] * 1) ** 2 + 2 * lr[2] * (lr[2] * 1) ** 2  # K - 1 steps from the common start
    assert found.drift == pytest.approx(4 * 3 * 0.25 * drift / weight, rel=1e-12)
    assert found.noise == pytest.approx(0.5 * 2 * (1 + 2 * lr[1] ** 2 + 2 * lr[2] ** 2) / weight, rel=1e-12)
    ahead = growing_bound(problem, workers=1, rounds=3, overlap=1)
    drift = 2 * lr[1] * (lr[0] * 2) ** 2 + 2 * lr[2] * (lr[1] * 2) ** 2  # one step more, at the last round's lr
    assert ahead.drift == pytest.approx(4 * 3 * 0.25 * drift / weight, rel=1e-12)
    assert (ahead.initial, ahead.noise) == (found.initial, found.noise)


def test_theorem_2s_early_rounds_by_hand() -> None:
    """N = 2, L = 1: lr = 2, 2 / 2^(2/3) = 1.26, 2 / 3^(2/3) = 0.96: the first two rounds are above 1/L."""
    problem = Problem(smoothness=1.0, noise=2.0, grad_second_moment=3.0, gap=4.0)
    lr = [2.0, 2 / 2 ** (2 / 3), 2 / 3 ** (2 / 3)]
    found = growing_bound(problem, workers=2, rounds=3)
    early = sum((g**2 - g) * 3 / 2 for g in lr[:2])
    assert found.early == pytest.approx(2 * early / sum(lr), rel=1e-12)
    assert found.initial == pytest.approx(2 * (4 + early) / sum(lr), rel=1e-12)
    assert (found.early_rounds, found.applies) == (2, True)  # the theorem pays for them; it is not silent
    capped = growing_bound(problem, workers=2, rounds=3, lr_cap=1.0)
    assert (capped.early, capped.applies) == (0, True)


def test_theorem_2_falls_like_one_over_the_root() -> None:
    """With scale and cap, sixteen times the steps divide the bound by about four (a logarithm remains)."""
    problem = Problem(smoothness=1.0, noise=1.0, grad_second_moment=1.0, gap=1.0)
    totals = []
    for steps in (2_000, 32_000):
        rounds = rounds_for_steps(workers=4, steps=steps)
        found = growing_bound(problem, workers=4, rounds=rounds, lr_scale=1.0, lr_cap=0.25)
        assert steps - 40 <= found.steps <= steps
        totals.append(found.total)
    assert 2.0 < totals[0] / totals[1] < 4.0


def test_growing_rounds_are_the_papers() -> None:
    for workers in (1, 2, 5):
        for s, (length, lr) in enumerate(growing_rounds(workers=workers, rounds=2000), 1):
            exact = math.ceil(Fraction(round(s ** (1 / 3) * 10**9), 10**9 * workers))
            assert length == exact or round(s ** (1 / 3)) ** 3 == s  # at exact cubes the root is not rounded up
            assert lr == pytest.approx(workers / s ** (2 / 3))
    assert [length for length, _ in growing_rounds(workers=2, rounds=64)][7::56] == [1, 2]  # ceil(2/2), ceil(4/2)


def test_theorem_3_by_hand() -> None:
    assert active_workers([4, 2, 1]) == [3, 2, 1, 1]
    assert active_workers([1, 2, 4]) == [3, 2, 1, 1]  # the order does not matter
    found = per_worker_bound(PROBLEM, periods=[6, 2], rounds=20, lr=0.125)
    assert (found.initial, found.drift, found.noise) == (
        2 * 5 / (0.125 * 20 * 4), 4 / 64 * 36 * 9 * 4, 2 * 0.125 * 8 / 2
    )  # fmt: skip
    assert per_worker_bound(PROBLEM, periods=[6, 2], rounds=20, lr=1.0).caveats
    with pytest.raises(ValueError, match="steps must be at least the smallest period 2, got 1: there is no round"):
        per_worker_speedup_bound(PROBLEM, periods=[6, 2], steps=1)


@given(problems, st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 1000), st.floats(1e-4, 1.0))
def test_theorem_3_weights_and_limits(problem: Problem, periods: list[int], rounds: int, lr: float) -> None:
    assert sum(active_workers(periods)) == sum(periods)
    found = per_worker_bound(problem, periods=periods, rounds=rounds, lr=lr)
    slowest = [min(periods)] * len(periods)
    even = per_worker_bound(problem, periods=slowest, rounds=rounds, lr=lr)
    assert found.initial <= even.initial * (1 + 1e-12)  # the paper's remark: smaller first term,
    assert found.drift >= even.drift  # larger second
    theorem_1 = gradient_bound(problem, workers=len(periods), steps=rounds * slowest[0], lr=lr, period=slowest[0])
    assert even.total == pytest.approx(theorem_1.total)


def test_corollary_2_by_hand() -> None:
    """N = 4, T = 10,000, L = 2: lr = 2 / (2 100) = 0.01, S = 5,000, mean I = 3."""
    found = per_worker_speedup_bound(PROBLEM, periods=[4, 4, 2, 2], steps=10_000)
    assert found.initial == pytest.approx(2 * 5 / (0.01 * 5000 * 3))
    assert found.drift == pytest.approx(4 * 1e-4 * 16 * 9 * 4)
    assert found.noise == pytest.approx(2 * 0.01 * 8 / 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gradient_bound(PROBLEM, workers=0, steps=1, lr=0.1, period=1), "workers must be a whole number >= 1"),
        (lambda: gradient_bound(PROBLEM, workers=1, steps=0, lr=0.1, period=1), "steps must be"),
        (lambda: gradient_bound(PROBLEM, workers=1, steps=1, lr=0.0, period=1), "lr must be a finite number > 0"),
        (lambda: gradient_bound(PROBLEM, workers=1, steps=1, lr=0.1, period=0), "period must be"),
        (lambda: drift_bound(lr=0.1, period=2, overlap=3, grad_second_moment=1.0), "overlap must be at most"),
        (lambda: Problem(smoothness=0, noise=1, grad_second_moment=1, gap=1), "smoothness must be a finite number > 0"),
        (lambda: Problem(smoothness=1, noise=-1, grad_second_moment=1, gap=1), "noise must be a finite number >= 0"),
        (lambda: Problem(smoothness=1, noise=1, grad_second_moment=1, gap=math.nan), "gap must be a finite"),
        (lambda: per_worker_bound(PROBLEM, periods=[], rounds=1, lr=0.1), "periods must be a list"),
        (lambda: per_worker_bound(PROBLEM, periods=[1, 0], rounds=1, lr=0.1), r"periods\[1\] must be"),
        (lambda: growing_bound(PROBLEM, workers=1, rounds=0), "rounds must be"),
    ],
)  # fmt: skip
def test_bad_input(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()
