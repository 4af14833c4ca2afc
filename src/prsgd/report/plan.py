"""The picture of a plan: what each period costs, and with constants what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prsgd.theory.plan import Option, Plan, bound_after

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "^", ":"), ("#cc79a7", "D", "-."))
_SHOWN = (1, 4, 16, 64, 256)
"""Periods that have a curve of their own."""
_POINTS = 60


def draw_plan(plan: Plan, path: Path) -> None:
    """With constants, the bound against time for several periods; else what each period costs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if plan.problem is None:
        _draw_costs(plan, axes)
    else:
        _draw_bounds(plan, axes)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=200)
    except OSError as error:
        raise ValueError(f"plot cannot be written: {path}: {error.strerror}") from None
    except ValueError as error:  # a format that matplotlib does not know
        raise ValueError(f"plot cannot be written: {path}: {error}") from None


def _draw_costs(plan: Plan, axes: Axes) -> None:
    """The hours that T steps take, or the steps that a budget holds."""
    within = plan.budget_seconds is not None

    def cost(option: Option) -> float:
        return option.steps if within else option.seconds / 3600

    for overlap, (colour, marker, line) in zip(sorted({o.overlap for o in plan.options}), _STYLES):
        options = [option for option in plan.options if option.overlap == overlap]
        values = [cost(option) for option in options]
        label = f"overlap {overlap}"
        axes.plot([o.period for o in options], values, color=colour, marker=marker, linestyle=line, ms=4, label=label)
    _ring(axes, plan.chosen.period, cost(plan.chosen))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("period")
    axes.set_ylabel("steps" if within else "hours")
    what = f"steps in {(plan.budget_seconds or 0) / 3600:.3g} hours" if within else f"hours for {plan.steps:,} steps"
    axes.set_title(f"{plan.workers} workers: {what}", loc="left", fontsize=10)


def _draw_bounds(plan: Plan, axes: Axes) -> None:
    """Each period with the overlap that is best at that time; the frontier is the least of all options."""
    assert plan.budget_seconds is not None
    hours = [plan.budget_seconds / 3600 * 10 ** (3 * i / (_POINTS - 1) - 2) for i in range(_POINTS)]
    found: dict[int, list[float]] = {}
    for period in sorted({option.period for option in plan.options}):
        options = [option for option in plan.options if option.period == period]
        found[period] = [min(bound_after(plan, option, 3600 * hour) for option in options) for hour in hours]
    least = [min(column) for column in zip(*found.values())]
    axes.plot(hours, least, color="#999999", linewidth=5, alpha=0.6, label="frontier")
    lines: list[Any] = ["-", "--", "-.", ":", (0, (1, 1))]
    colours = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000")
    for period, colour, line in zip([p for p in _SHOWN if p in found], colours, lines):
        axes.plot(hours, found[period], color=colour, linestyle=line, linewidth=1.2, label=f"period {period}")
    assert plan.chosen.bound is not None
    _ring(axes, plan.budget_seconds / 3600, plan.chosen.bound.total)
    axes.set_xscale("log")
    if max(least) > 0:  # with constants of 0 there is nothing to promise, and a logarithm has no 0
        axes.set_yscale("log")
    axes.set_xlabel("hours")
    axes.set_ylabel("Theorem 1's bound")
    axes.set_title(f"{plan.workers} workers: what the theory promises after a time", loc="left", fontsize=10)


def _ring(axes: Axes, x: float, y: float) -> None:
    axes.scatter([x], [y], s=110, facecolors="none", edgecolors="black", zorder=5, label="chosen")
