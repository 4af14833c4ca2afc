"""How often to average: what the theory guarantees, what it costs, and what fits into a time budget.

    seconds of a step, on average = step + max(0, transfer - overlap * step) / period

An average travels while ``overlap`` steps are taken; what they do not hide is waited for. So fewer averages buy more
steps within a budget, and more steps make Theorem 1's first term smaller while the period makes its second term larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prsgd._check import positive, whole_number
from prsgd.links import Link
from prsgd.theory.bounds import (
    Bound,
    Problem,
    gradient_bound,
    largest_period,
    period_is_guaranteed,
    speedup_lr,
    steps_for_speedup,
)

PERIODS = tuple(2**i for i in range(11))
"""1 ... 1024."""
OVERLAPS = (0, 1, 4)


@dataclass(frozen=True)
class Option:
    """One way to average, and one run with it: of all T steps or, with a budget, of as many as fit."""

    period: int
    overlap: int
    steps: int
    rounds: int
    bytes_sent: int
    """Per worker."""
    seconds: float
    seconds_per_step: float
    """On average, with what is waited for."""
    guaranteed: bool
    """Does Corollary 1, part 2 cover it for so many steps?"""
    lr: float | None = None
    """The one that minimises Theorem 1's bound for so many steps; None without constants."""
    bound: Bound | None = None
    """Theorem 1's, with that lr."""


@dataclass(frozen=True)
class Plan:
    """What is known before a run."""

    workers: int
    steps: int
    """T, as asked for."""
    guaranteed_period: int
    """The largest that Corollary 1, part 2 covers at overlap 1 for T; 1 if it covers none."""
    is_vacuous: bool
    """Does the guarantee, at overlap 1, reach no further than averaging after every step?"""
    problem: Problem | None
    budget_seconds: float | None
    """Within which every option's run stays; None: every one takes T steps."""
    options: tuple[Option, ...]
    """Every period with every overlap that it can have."""
    chosen: Option
    reasons: tuple[str, ...]
    """Sentences."""

    def option(self, period: int, overlap: int = 0) -> Option:
        """The one with this period and overlap."""
        for option in self.options:
            if (option.period, option.overlap) == (period, overlap):
                return option
        raise ValueError(f"the plan has no option with period {period} and overlap {overlap}")


def make_plan(
    *,
    workers: int,
    steps: int,
    model_bytes: int,
    step_seconds: float,
    link: Link,
    problem: Problem | None = None,
    budget_seconds: float | None = None,
    periods: Sequence[int] = PERIODS,
    overlaps: Sequence[int] = OVERLAPS,
) -> Plan:
    """How often to average, for a run of ``steps`` steps or, with a budget, for as many as fit into it.

    With the problem's constants, the choice minimises Theorem 1's bound within the budget (without one: the time that
    ``steps`` take with the cheapest option). Without constants it is the fastest option that the guarantee covers, or,
    where that says nothing, the smallest period at which waiting for averages costs less than a tenth of the computing.

    >>> link = Link(bytes_per_second=125e6)
    >>> plan = make_plan(workers=8, steps=58_500, model_bytes=1_100_000, step_seconds=0.02, link=link)
    >>> plan.guaranteed_period, plan.chosen.period, plan.chosen.overlap
    (3, 3, 1)
    """
    workers, steps = whole_number("workers", workers, at_least=1), whole_number("steps", steps, at_least=1)
    model_bytes = whole_number("model_bytes", model_bytes, at_least=1)
    step_seconds = positive("step_seconds", step_seconds)
    transfer = link.average_seconds(model_bytes, workers=workers)
    guaranteed = largest_period(workers=workers, steps=steps)
    pace = {
        (i, d): step_seconds + max(0.0, transfer - d * step_seconds) / i
        for i, d in _combinations((*periods, guaranteed), overlaps)
    }
    if budget_seconds is None and problem is not None:
        budget_seconds = steps * min(pace.values())
    if budget_seconds is not None and positive("budget_seconds", budget_seconds) < min(pace.values()) * (1 - 1e-12):
        raise ValueError(f"budget_seconds must hold a step, {min(pace.values()):g}, got {budget_seconds:g}")
    per_round = link.bytes_sent(model_bytes, workers=workers)
    options = tuple(
        _option(i, d, seconds_per_step, workers, steps, step_seconds, per_round, problem, budget_seconds)
        for (i, d), seconds_per_step in pace.items()
    )
    covered = period_is_guaranteed(workers=workers, steps=steps, period=guaranteed)
    vacuous = guaranteed == 1 or not covered
    chosen, reasons = _choose(options, problem, step_seconds, transfer, vacuous)
    if vacuous and workers > 1:
        needed = steps_for_speedup(workers=workers, period=2)
        reasons = (
            *reasons,
            f"At overlap 1 the theory guarantees no period above 1: T = {steps:,}, and period 2 would need {needed:,}.",
        )
    if problem is not None:
        lr = speedup_lr(problem, workers=workers, steps=chosen.steps)
        reasons = (
            *reasons,
            f"Corollary 1's lr for {chosen.steps:,} steps is {lr:.3g}; the bound's own best is {chosen.lr:.3g}.",
        )
    return Plan(workers, steps, guaranteed, vacuous, problem, budget_seconds, options, chosen, reasons)


def best_lr(problem: Problem, *, workers: int, steps: int, period: int, overlap: int) -> float:
    """The lr that minimises Theorem 1's bound, at most 1/L.

    a / lr + b lr^2 + c lr has its minimum where 2 b lr^3 + c lr^2 = a, which has one positive root.

    >>> problem = Problem(smoothness=1.0, noise=0.0, grad_second_moment=1.0, gap=4.0)
    >>> round(best_lr(problem, workers=1, steps=1000, period=1, overlap=1), 6)  # lr^3 = 8/1000 / 8
    0.1
    """
    one = gradient_bound(problem, workers=workers, steps=steps, lr=1.0, period=period, overlap=overlap)
    top = 1 / problem.smoothness
    low, high = 0.0, top
    if 2 * one.drift * top**3 + one.noise * top**2 <= one.initial:
        return top
    for _ in range(200):
        middle = (low + high) / 2
        if 2 * one.drift * middle**3 + one.noise * middle**2 < one.initial:
            low = middle
        else:
            high = middle
    return high


def bound_after(plan: Plan, option: Option, seconds: float) -> float:
    """Theorem 1's bound after so long with this option, at the lr that is best for so many steps."""
    assert plan.problem is not None
    steps = max(1, int(seconds / option.seconds_per_step))
    how = {"workers": plan.workers, "steps": steps, "period": option.period, "overlap": option.overlap}
    return gradient_bound(plan.problem, lr=best_lr(plan.problem, **how), **how).total


def frontier(options: Iterable[Option]) -> list[Option]:
    """Those that no other beats in both time and bytes, fastest first."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.seconds, o.bytes_sent)):
        if not found or option.bytes_sent < found[-1].bytes_sent:
            found.append(option)
    return found


def _combinations(periods: Iterable[int], overlaps: Iterable[int]) -> list[tuple[int, int]]:
    """Every period with every overlap that it can have."""
    longest = sorted({whole_number("periods", period, at_least=1) for period in periods})
    allowed = sorted({whole_number("overlaps", overlap, at_least=0) for overlap in overlaps})
    found = [(period, overlap) for period in longest for overlap in allowed if overlap <= period]
    if not found:
        raise ValueError(f"overlaps must have one that is at most a period ({longest[-1]}), got {allowed}")
    return found


def _option(
    period: int,
    overlap: int,
    seconds_per_step: float,
    workers: int,
    steps: int,
    step_seconds: float,
    bytes_per_round: int,
    problem: Problem | None,
    budget_seconds: float | None,
) -> Option:
    if budget_seconds is not None:
        steps = max(1, int(budget_seconds / seconds_per_step * (1 + 1e-12)))  # the 1 for options too slow for one
    rounds = math.ceil(steps / period)
    how = {"workers": workers, "steps": steps, "period": period, "overlap": overlap}
    lr = None if problem is None else best_lr(problem, **how)
    return Option(
        period=period,
        overlap=overlap,
        steps=steps,
        rounds=rounds,
        bytes_sent=rounds * bytes_per_round,
        seconds=steps * step_seconds + rounds * (seconds_per_step - step_seconds) * period,
        seconds_per_step=seconds_per_step,
        guaranteed=period_is_guaranteed(**how),
        lr=lr,
        bound=None if problem is None or lr is None else gradient_bound(problem, lr=lr, **how),
    )


def _choose(
    options: Sequence[Option], problem: Problem | None, step_seconds: float, transfer: float, vacuous: bool
) -> tuple[Option, tuple[str, ...]]:
    if problem is not None:
        chosen = min(options, key=lambda o: (o.bound.total if o.bound is not None else math.inf, o.bytes_sent))
        assert chosen.bound is not None
        return chosen, (
            f"Period {chosen.period} with overlap {chosen.overlap} minimises Theorem 1's bound within the time: "
            f"{chosen.bound.total:.3g}, of which most is {chosen.bound.dominant}.",
        )
    covered = [option for option in options if option.guaranteed]
    if covered and not vacuous:
        chosen = min(covered, key=lambda o: (o.seconds_per_step, o.bytes_sent / o.steps))
        return chosen, (
            f"Period {chosen.period} with overlap {chosen.overlap} is the fastest that Corollary 1 covers: a step and "
            f"what is waited for take {chosen.seconds_per_step / step_seconds:.3g} times the step alone.",
        )
    cheap = [option for option in options if option.seconds_per_step <= 1.1 * step_seconds]
    if cheap:
        chosen = min(cheap, key=lambda o: (o.period, o.seconds_per_step))
    else:
        chosen = min(options, key=lambda o: (o.seconds_per_step, o.period))
    return chosen, (
        f"An average takes {transfer / step_seconds:.3g} steps' time; at period {chosen.period} with overlap "
        f"{chosen.overlap} waiting costs {max(0.0, chosen.seconds_per_step / step_seconds - 1):.1%} of the computing. "
        "This is a choice by cost, not by theory.",
    )
