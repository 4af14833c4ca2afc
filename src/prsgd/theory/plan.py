"""How often to average: what the theory guarantees, what it costs, and what fits into a time budget.

    seconds of a step, on average = step + max(0, transfer - overlap * step) / period

An average travels while ``overlap`` steps are taken; what they do not hide is waited for. So fewer averages buy more
steps within a budget, and more steps make Theorem 1's first term smaller while the period makes its second term larger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from prsgd import units
from prsgd._check import positive, whole_number, within
from prsgd.comm.links import Link
from prsgd.theory.bounds import (
    Bound,
    Problem,
    gradient_bound,
    period_is_guaranteed,
    speedup_lr,
    steps_for_speedup,
)

PERIODS = tuple(2**i for i in range(11))
"""1 ... 1024."""
OVERLAPS = (0, 1, 4)
MOST_WORKERS = 10**6
LEAST_SMOOTHNESS, MOST_CONSTANT = 1e-30, 1e30
"""Of the problem's constants: the bound has powers of them, which a float must hold."""


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
    steps: int | None
    """T, as asked for; None with a budget: each option has its own."""
    budget_seconds: float | None
    """Within which every option's run stays; None: every one takes T steps."""
    guaranteed_period: int
    """The largest that Corollary 1, part 2 covers at overlap 1; 0 if it covers none."""
    next_period: int
    """The next power of two, and the T that it would need for a linear speed-up."""
    next_period_steps: int
    problem: Problem | None
    options: tuple[Option, ...]
    """Every period with every overlap that it can have, where one fits."""
    chosen: Option
    speedup_lr: float | None
    """Corollary 1's lr for the chosen option's steps; None without constants."""
    reasons: tuple[str, ...]
    """Sentences."""

    @property
    def is_vacuous(self) -> bool:
        """Does the guarantee, at overlap 1, reach no further than averaging after every step?"""
        return self.guaranteed_period <= 1

    def option(self, period: int, overlap: int = 0) -> Option:
        """The one with this period and overlap."""
        for option in self.options:
            if (option.period, option.overlap) == (period, overlap):
                return option
        raise ValueError(f"the plan has no option with period {period} and overlap {overlap}")


def make_plan(
    *,
    workers: int,
    steps: int | None = None,
    budget_seconds: float | None = None,
    model_bytes: int,
    step_seconds: float,
    link: Link,
    average_seconds: float | None = None,
    problem: Problem | None = None,
    periods: Sequence[int] = PERIODS,
    overlaps: Sequence[int] = OVERLAPS,
) -> Plan:
    """How often to average, for a run of ``steps`` steps or for as many as fit into ``budget_seconds``.

    With the problem's constants, the choice minimises Theorem 1's bound within the budget (with ``steps``: within the
    time that the cheapest option needs for them). Without constants it is the fastest option that the guarantee covers,
    or, where that says nothing, the smallest period at which waiting for averages costs less than a tenth of the
    computing. ``average_seconds`` is the time of an average where it was measured, instead of the link's.

    >>> link = Link(bytes_per_second=125e6)
    >>> plan = make_plan(workers=8, steps=58_500, model_bytes=1_100_000, step_seconds=0.02, link=link)
    >>> plan.guaranteed_period, plan.chosen.period, plan.chosen.overlap
    (3, 3, 1)
    """
    workers = whole_number("workers", workers, at_least=1, at_most=MOST_WORKERS)
    model_bytes = whole_number("model_bytes", model_bytes, at_least=1, at_most=8 * units.MOST)
    step_seconds = within("step_seconds", step_seconds, units.LEAST_SECONDS, units.MOST_SECONDS)
    if (steps is None) == (budget_seconds is None):
        raise ValueError("steps and budget_seconds are two ways to say how long: give one of them")
    if average_seconds is None:
        average_seconds = link.average_seconds(model_bytes, workers=workers)
    elif not 0 <= average_seconds < math.inf:
        raise ValueError(f"average_seconds must be a finite number >= 0, got {average_seconds!r}")
    if problem is not None:
        for field in fields(problem):
            least = LEAST_SMOOTHNESS if field.name == "smoothness" else 0.0
            within(f"problem.{field.name}", getattr(problem, field.name), least, MOST_CONSTANT)
    cost = _Cost(workers, step_seconds, average_seconds, link.bytes_sent(model_bytes, workers=workers), problem)
    if steps is not None:
        steps = whole_number("steps", steps, at_least=1, at_most=units.MOST)
        options = cost.options(periods, overlaps, steps=steps)
        if problem is not None:
            budget_seconds = min(option.seconds for option in options)
    if budget_seconds is not None:
        options = cost.options(periods, overlaps, budget_seconds=positive("budget_seconds", budget_seconds))
        if not options:
            raise ValueError(f"the budget must hold a step and an average, got {budget_seconds:g} seconds")
    guaranteed = max((o.period for o in options if o.guaranteed and o.overlap == 1), default=0)
    chosen, reasons = _choose(options, cost)
    following = 2 ** guaranteed.bit_length() if guaranteed else 1
    needed = steps_for_speedup(workers=workers, period=following)
    lr = None if problem is None else speedup_lr(problem, workers=workers, steps=chosen.steps)
    return Plan(
        workers=workers,
        steps=steps,
        budget_seconds=budget_seconds,
        guaranteed_period=guaranteed,
        next_period=following,
        next_period_steps=needed,
        problem=problem,
        options=options,
        chosen=chosen,
        speedup_lr=lr,
        reasons=(*reasons, *_guarantee(workers, guaranteed, following, needed), *_lr_words(problem, chosen, lr)),
    )


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


@dataclass(frozen=True)
class _Cost:
    """What every option's cost is made of."""

    workers: int
    step_seconds: float
    average_seconds: float
    bytes_per_average: int
    problem: Problem | None

    def options(
        self,
        periods: Sequence[int],
        overlaps: Sequence[int],
        *,
        steps: int | None = None,
        budget_seconds: float | None = None,
    ) -> tuple[Option, ...]:
        """Of T steps, or of as many as fit; beside ``periods`` the longest that is guaranteed with each overlap."""
        given = {whole_number("periods", period, at_least=1) for period in periods}
        allowed = sorted({whole_number("overlaps", overlap, at_least=0) for overlap in overlaps})
        longest = max(given, default=0)
        if not allowed or allowed[0] > longest:
            raise ValueError(f"overlaps must have one that is at most a period ({longest}), got {allowed}")

        def length(period: int, overlap: int) -> int:
            return steps or self._fitting(period, overlap, budget_seconds or 0.0)

        def covered(period: int, overlap: int) -> bool:
            steps = length(period, overlap)
            how = {"workers": self.workers, "steps": steps, "period": period, "overlap": overlap}
            return steps > 0 and period_is_guaranteed(**how)

        for overlap in allowed:
            given.add(max((i for i in range(max(1, overlap), longest + 1) if covered(i, overlap)), default=longest))
        return tuple(
            self._option(period, overlap, length(period, overlap), covered(period, overlap))
            for period in sorted(given)
            for overlap in allowed
            if overlap <= period <= length(period, overlap)  # longer: an average that never comes
        )

    def _wait(self, overlap: int) -> float:
        return max(0.0, self.average_seconds - overlap * self.step_seconds)

    def _seconds(self, period: int, overlap: int, steps: int) -> float:
        return steps * self.step_seconds + math.ceil(steps / period) * self._wait(overlap)

    def _fitting(self, period: int, overlap: int, budget_seconds: float) -> int:
        """The most steps that take no longer, with the average that ends each round."""
        budget = budget_seconds * (1 + 1e-12)
        whole = int(budget / (period * self.step_seconds + self._wait(overlap)))
        left = budget - self._seconds(period, overlap, whole * period) - self._wait(overlap)
        return whole * period + min(period - 1, max(0, int(left / self.step_seconds)))

    def _option(self, period: int, overlap: int, steps: int, covered: bool) -> Option:
        how = {"workers": self.workers, "steps": steps, "period": period, "overlap": overlap}
        lr = None if self.problem is None else best_lr(self.problem, **how)
        rounds = math.ceil(steps / period)
        return Option(
            period=period,
            overlap=overlap,
            steps=steps,
            rounds=rounds,
            bytes_sent=rounds * self.bytes_per_average,
            seconds=self._seconds(period, overlap, steps),
            seconds_per_step=self.step_seconds + self._wait(overlap) / period,
            guaranteed=covered,
            lr=lr,
            bound=None if self.problem is None or lr is None else gradient_bound(self.problem, lr=lr, **how),
        )


def _choose(options: Sequence[Option], cost: _Cost) -> tuple[Option, tuple[str, ...]]:
    if cost.problem is not None:
        chosen = min(options, key=lambda o: (o.bound.total if o.bound is not None else math.inf, o.bytes_sent))
        assert chosen.bound is not None
        return chosen, (
            f"Period {chosen.period} with overlap {chosen.overlap} minimises Theorem 1's bound within the time: "
            f"{chosen.bound.total:.3g}, of which most is {chosen.bound.dominant}.",
        )
    paces = {option: option.seconds / option.steps / cost.step_seconds for option in options}
    covered = [option for option in options if option.guaranteed]
    if any(option.period > 1 and option.overlap <= 1 for option in covered):
        chosen = min(covered, key=lambda o: (paces[o], o.bytes_sent / o.steps))
        return chosen, (
            f"Period {chosen.period} with overlap {chosen.overlap} is the fastest that Corollary 1 covers; waiting for "
            f"averages costs {_share(paces[chosen])} the computing.",
        )
    cheap = [option for option in options if paces[option] <= 1.1]
    if cheap:
        chosen = min(cheap, key=lambda o: (o.period, paces[o]))
    else:
        chosen = min(options, key=lambda o: (paces[o], o.period))
    return chosen, (
        f"An average takes {cost.average_seconds / cost.step_seconds:,.1f} steps' time; at period {chosen.period} with "
        f"overlap {chosen.overlap} waiting costs {_share(paces[chosen])} the computing. This is a choice "
        "by cost, not by theory.",
    )


def _share(pace: float) -> str:
    """
    >>> _share(1.25), _share(12.5)
    ('25% of', '11.5 times')
    """
    return f"{max(0.0, pace - 1):.0%} of" if pace < 3 else f"{pace - 1:,.3g} times"


def _guarantee(workers: int, guaranteed: int, following: int, needed: int) -> tuple[str, ...]:
    if workers == 1:
        return ()
    reach = f"periods up to {guaranteed}" if guaranteed > 1 else "period 1 only" if guaranteed else "no period"
    return (f"At overlap 1 Corollary 1 covers {reach}; period {following} would need {needed:,} steps.",)


def _lr_words(problem: Problem | None, chosen: Option, lr: float | None) -> tuple[str, ...]:
    if problem is None or lr is None:
        return ()
    above = " (above 1/L: T is below N)" if lr * problem.smoothness > 1 + 1e-12 else ""
    return (
        f"Corollary 1's lr for {chosen.steps:,} steps is {lr:.3g}{above}; the bound's own best is {chosen.lr:.3g}.",
    )
