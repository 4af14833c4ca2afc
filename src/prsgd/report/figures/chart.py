"""Figures of lines: how a chart is drawn for paper. On a screen page.js draws it, from the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from prsgd.report.chart import Chart, Curve
from prsgd.report.figures.base import Figure, Subject
from prsgd.report.figures.style import DASHES, colour, log_ticks, marker, new_drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing


def chart_figure(
    name: str, heading: str, caption: str, numbers: Callable[[Subject], Chart | None]
) -> Figure[Subject, Chart]:
    """A figure that is nothing but a chart."""

    def words(chart: Chart) -> str:
        below = f" The axis begins at {chart.floor:.0f} %; the first epochs are below." if chart.floor else ""
        above = f" The axis ends at {chart.ceiling:.3g}; what was seen first is above." if chart.ceiling else ""
        return caption + below + above

    return Figure(name, heading, alt=heading, numbers=numbers, caption=words, draw=draw, screen="chart")


def draw(chart: Chart) -> Drawing:
    """The lines with their bands, rings and marks, and a legend below."""
    longest = max(len(curve.name) for curve in chart.curves)
    columns = max(1, min(len(chart.curves), 62 // (longest + 7)))
    drawing, axes = new_drawing(chart.title, 2.3 + 0.15 * math.ceil(len(chart.curves) / columns))
    right = max(curve.x[-1] for curve in chart.curves)
    for mark in chart.marks:
        if mark < right:
            axes.axvline(mark, color="#999999", linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
            above = axes.get_xaxis_transform()
            axes.text(mark, 1.01, "lr / 10", transform=above, fontsize=6, color="#777777", ha="center", va="bottom")
    for curve in chart.curves:
        _curve(axes, curve)
    if chart.rings:
        x, y = zip(*chart.rings)
        axes.scatter(x, y, s=45, facecolors="none", edgecolors="#333333", linewidths=0.7, zorder=4)
    if chart.log_x:
        axes.set_xscale("log")
        log_ticks(axes.xaxis, *axes.get_xlim())
    elif right > 0:
        axes.set_xlim(0, 1.01 * right)
    if chart.log_y:
        axes.set_yscale("log")
        log_ticks(axes.yaxis, *axes.get_ylim())
    if chart.floor is not None:
        top = max(max(curve.high) for curve in chart.curves)
        axes.set_ylim(chart.floor, top + 0.06 * (top - chart.floor))
    if chart.ceiling is not None:
        bottom = min(min(curve.low) for curve in chart.curves)
        axes.set_ylim(bottom - 0.06 * (chart.ceiling - bottom), chart.ceiling)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    drawing.legend(loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.2, borderaxespad=0.2)
    return drawing


def _curve(axes: Axes, curve: Curve) -> None:
    apart = max(1, len(curve.x) // 6)
    axes.plot(
        curve.x,
        curve.mean,
        color=colour(curve.style),
        linestyle=(0, DASHES[curve.style % len(DASHES)] or (1, 0)),
        marker=marker(curve.style),
        markersize=3.2,
        markeredgewidth=0,
        markevery=(min(curve.style * apart // 5, len(curve.x) - 1), apart),
        label=curve.name,
        zorder=3,
    )
    axes.fill_between(curve.x, curve.low, curve.high, color=colour(curve.style), alpha=0.15, linewidth=0, zorder=2)
