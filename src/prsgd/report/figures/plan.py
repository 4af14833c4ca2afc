"""The figure of ``prsgd plan``: what each period costs, and with constants what it is worth.

It stands on no page and has a look of its own, so it is in no list: ``prsgd.report.plan`` writes it where it is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prsgd.theory.plan import Option, Plan, bound_after

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

_COST_STYLES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", ":"), ("#cc79a7", "D", "-."))
_BOUND_STYLES: tuple[tuple[str, Any], ...] = (
    ("#0072b2", "-"), ("#d55e00", "--"), ("#009e73", "-."), ("#cc79a7", ":"), ("#000000", (0, (1, 1))),
)  # fmt: skip
_SHOWN = (1, 4, 16, 64, 256)
"""Periods that have a curve of their own."""
_POINTS = 60


@dataclass(frozen=True)
class Costs:
    """The hours that T steps take, or the steps that a budget holds."""

    title: str
    unit: str
    by_overlap: dict[int, tuple[list[int], list[float]]]
    """Periods, and what they cost."""
    chosen: tuple[float, float]


@dataclass(frozen=True)
class Bounds:
    """Each period with the overlap that is best at that time."""

    title: str
    hours: list[float]
    by_period: dict[int, list[float]]
    frontier: list[float]
    """The least of all options."""
    chosen: tuple[float, float]


def numbers(plan: Plan) -> Costs | Bounds:
    """Bounds where the problem's constants are known, else costs."""
    return _costs(plan) if plan.problem is None else _bounds(plan)


def _costs(plan: Plan) -> Costs:
    within = plan.budget_seconds is not None

    def cost(option: Option) -> float:
        return option.steps if within else option.seconds / 3600

    by_overlap = {}
    for overlap in sorted({option.overlap for option in plan.options}):
        options = [option for option in plan.options if option.overlap == overlap]
        by_overlap[overlap] = ([option.period for option in options], [cost(option) for option in options])
    what = f"steps in {(plan.budget_seconds or 0) / 3600:.3g} hours" if within else f"hours for {plan.steps:,} steps"
    chosen = (plan.chosen.period, cost(plan.chosen))
    return Costs(f"{plan.workers} workers: {what}", "steps" if within else "hours", by_overlap, chosen)


def _bounds(plan: Plan) -> Bounds:
    assert plan.budget_seconds is not None
    assert plan.chosen.bound is not None
    budget_hours = plan.budget_seconds / 3600
    hours = [budget_hours * 10 ** (3 * i / (_POINTS - 1) - 2) for i in range(_POINTS)]
    found: dict[int, list[float]] = {}
    for period in sorted({option.period for option in plan.options}):
        options = [option for option in plan.options if option.period == period]
        found[period] = [min(bound_after(plan, option, 3600 * hour) for option in options) for hour in hours]
    return Bounds(
        title=f"{plan.workers} workers: what the theory promises after a time",
        hours=hours,
        by_period={period: found[period] for period in _SHOWN if period in found},
        frontier=[min(column) for column in zip(*found.values())],
        chosen=(budget_hours, plan.chosen.bound.total),
    )


def draw(found: Costs | Bounds) -> Drawing:
    """One pair of axes, with a ring around what was chosen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(5.2, 3.6), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.add_subplot()
    if isinstance(found, Costs):
        _draw_costs(found, axes)
    else:
        _draw_bounds(found, axes)
    axes.set_title(found.title, loc="left", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    return drawing


def _draw_costs(found: Costs, axes: Axes) -> None:
    for (overlap, (periods, costs)), (colour, marker, line) in zip(found.by_overlap.items(), _COST_STYLES):
        axes.plot(periods, costs, color=colour, marker=marker, linestyle=line, ms=4, label=f"overlap {overlap}")
    _ring(axes, found.chosen)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("period")
    axes.set_ylabel(found.unit)


def _draw_bounds(found: Bounds, axes: Axes) -> None:
    axes.plot(found.hours, found.frontier, color="#999999", linewidth=5, alpha=0.6, label="frontier")
    for (period, bounds), (colour, line) in zip(found.by_period.items(), _BOUND_STYLES):
        axes.plot(found.hours, bounds, color=colour, linestyle=line, linewidth=1.2, label=f"period {period}")
    _ring(axes, found.chosen)
    axes.set_xscale("log")
    if max(found.frontier) > 0:  # with constants of 0 there is nothing to promise, and a logarithm has no 0
        axes.set_yscale("log")
    axes.set_xlabel("hours")
    axes.set_ylabel("Theorem 1's bound")


def _ring(axes: Axes, point: tuple[float, float]) -> None:
    x, y = point
    axes.scatter([x], [y], s=110, facecolors="none", edgecolors="black", zorder=5, label="chosen")
