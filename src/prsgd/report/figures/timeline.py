"""The paper's Figures 1 and 2 from real traces: a row a worker, steps as blocks as wide as they took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prsgd.report.figures.base import Figure
from prsgd.report.series import Group
from prsgd.report.timeline import Timeline
from prsgd.report.times import timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

_CAPTION = (
    "As Figures 1 and 2 of the paper, from the run's own trace: a row a worker, a few rounds, all on one scale of "
    "time; at most six runs, the first ones. Where rounds have a fixed number of steps, fast workers wait (grey) for "
    "the slowest; where a round lasts a fixed time, or as many steps as a worker's speed allows, nobody does. White "
    "gaps are evaluations and checkpoints."
)
_POINTS = 430
"""Typographic ones, across the axes."""
COLOURS = {"step": "#0072b2", "average": "#d55e00", "wait": "#e6e6e6", "flight": "#e69f00", "pause": "#ffffff"}
"""Of what a worker does."""
WORDS = {"step": "steps", "wait": "waiting for the others", "average": "averaging", "flight": "average on its way"}


def numbers(groups: Sequence[Group]) -> list[Timeline] | None:
    """None where no run has a trace of several workers."""
    return timelines(groups) or None


def draw(found: Sequence[Timeline]) -> Drawing:
    """One below another, on one scale of time."""
    from matplotlib.figure import Figure as Drawing
    from matplotlib.patches import Patch

    heights = [0.5 + 0.24 * len(one.workers) for one in found]
    drawing = Drawing(figsize=(7.0, sum(heights) + 0.9), layout="constrained")
    grid = drawing.subplots(len(found), 1, squeeze=False, height_ratios=heights, sharex=True)
    for axes, one in zip(grid[:, 0], found):
        _rows(axes, one)
    grid[-1, 0].set_xlabel("seconds")
    seen = {span.kind for one in found for span in one.spans}
    legend = [Patch(color=COLOURS[kind], label=word) for kind, word in WORDS.items() if kind in seen]
    drawing.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    return drawing


def _rows(axes: Axes, one: Timeline) -> None:
    for row, worker in enumerate(one.workers):
        for kind in ("wait", "step", "average"):
            bars = sorted(
                ((s.begin, s.end - s.begin) for s in one.spans if s.worker == worker and s.kind == kind),
                key=lambda bar: bar[1],
                reverse=True,
            )
            gap = min(0.5, 0.12 * _POINTS * (bars[len(bars) // 2][1] if bars else 1.0) / (one.end - one.begin))
            edge: dict[str, Any] = {"edgecolor": "white", "linewidth": gap} if kind == "step" else {"linewidth": 0}
            axes.broken_barh(bars, (row - 0.4, 0.7), facecolors=COLOURS[kind], **edge)
        flights = [(s.begin, s.end - s.begin) for s in one.spans if s.worker == worker and s.kind == "flight"]
        axes.broken_barh(flights, (row + 0.32, 0.13), facecolors=COLOURS["flight"], linewidth=0)
    axes.set_yticks(range(len(one.workers)), one.names)
    axes.set_ylim(len(one.workers) - 0.4, -0.6)
    axes.set_ylabel("worker")
    axes.set_title(f"{one.name}: here idle {one.idle:.0%} of the time", loc="left")
    axes.grid(visible=False)


FIGURE = Figure(
    name="timeline",
    heading="Who did what when",
    alt="Timeline of the workers' steps, waits and averages",
    numbers=numbers,
    caption=lambda _: _CAPTION,
    draw=draw,
)
