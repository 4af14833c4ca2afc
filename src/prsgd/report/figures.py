"""The figures for paper: PNG and SVG at the width of a column."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prsgd import files
from prsgd.report.curves import Chart, Curve, charts
from prsgd.report.places import Place, far_below, places
from prsgd.report.series import Group
from prsgd.report.timeline import draw as draw_timelines
from prsgd.report.timeline import draw_shares
from prsgd.report.times import time_shares, timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

Split = tuple[tuple[int, ...], ...]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Okabe and Ito's, which colour-blind readers can tell apart; without the yellow, which paper swallows."""
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.8), (1.4, 1.4), (6, 1.6, 1.4, 1.6), (3, 1.4))
_MARKERS = "os^Dv"
_WIDTH_INCHES = 3.5
_STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 7.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8,
    "grid.alpha": 0.35,
    "grid.linewidth": 0.4,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "savefig.dpi": 200,
    "svg.hashsalt": "prsgd",
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}


def draw(groups: Sequence[Group], folder: Path) -> list[Path]:
    """figures/NAME.png and .svg in ``folder`` for each figure that there are numbers for; returns their paths."""
    made: dict[str, Callable[[], Figure]] = {chart.key: partial(_chart, chart) for chart in charts(groups)}
    split, drawn, named, placed = first_split(groups), timelines(groups), time_shares(groups), places(groups)
    if placed:
        config = groups[0].runs[0].config
        title = f"{config['model']} on {config['task']}, {config['workers']} workers: quality at the end, and its cost"
        made["methods"] = lambda: _places(placed, title)
    if split is not None:
        made["split"] = lambda: _bars(split)
    if drawn:
        made["timeline"] = lambda: draw_timelines(drawn)
    if named:
        made["idle"] = lambda: draw_shares(named)
    return save(folder, made)


def draw_charts(found: Sequence[Chart], folder: Path) -> list[Path]:
    """The same for charts alone."""
    return save(folder, {chart.key: partial(_chart, chart) for chart in found})


def save(folder: Path, made: Mapping[str, Callable[[], Figure]]) -> list[Path]:
    """Each figure as figures/NAME.png and .svg in ``folder``.

    The same numbers give the same bytes: a figure under version control changes only when they do.
    """
    from matplotlib import style

    place = folder / files.FIGURES
    place.mkdir(parents=True, exist_ok=True)
    paths = []
    with style.context(["default", _STYLE]):  # whatever the user's matplotlibrc says
        for key, make in made.items():
            figure = make()
            for kind in ("png", "svg"):
                paths.append(place / f"{key}.{kind}")
                figure.savefig(paths[-1], metadata={"Date": None} if kind == "svg" else {"Software": None})
    return paths


def first_split(groups: Sequence[Group]) -> Split | None:
    """Of the first run that has one: with the same seed, all have the same."""
    return next((run.split for group in groups for run in group.runs if run.split is not None), None)


def class_colours(count: int) -> list[str]:
    """From dark to light, so that neighbours differ in any rendering.

    >>> class_colours(2)
    ['#482475', '#bddf26']
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.1 + 0.8 * i / max(1, count - 1))) for i in range(count)]


def is_light(colour: str) -> bool:
    """Does black stand out on it?

    >>> is_light("#bddf26"), is_light("#482475")
    (True, False)
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue > 140


def _new(title: str, height_inches: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # not pyplot: nothing to show, nothing to close

    figure = Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(textwrap.fill(title, 49), pad=11)
    return figure, axes


def _chart(chart: Chart) -> Figure:
    longest = max(len(curve.name) for curve in chart.curves)
    columns = max(1, min(len(chart.curves), 62 // (longest + 7)))
    figure, axes = _new(chart.title, 2.3 + 0.15 * math.ceil(len(chart.curves) / columns))
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
        _log_ticks(axes.xaxis, *axes.get_xlim())
    elif right > 0:
        axes.set_xlim(0, 1.01 * right)
    if chart.log_y:
        axes.set_yscale("log")
        _log_ticks(axes.yaxis, *axes.get_ylim())
    if chart.floor is not None:
        top = max(max(curve.high) for curve in chart.curves)
        axes.set_ylim(chart.floor, top + 0.06 * (top - chart.floor))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    figure.legend(loc="outside lower center", ncols=columns, handlelength=2.4, columnspacing=1.2, borderaxespad=0.2)
    return figure


def _places(found: Sequence[Place], title: str) -> Figure:
    """A panel for each cost, all with the same scale of quality."""
    from matplotlib.figure import Figure

    costs: list[tuple[str, Callable[[Place], float]]] = [
        ("MB sent by each worker", lambda place: place.megabytes),
        ("rounds", lambda place: place.rounds),
        *((f"modelled seconds on {name}", lambda place, name=name: place.seconds[name]) for name in found[0].seconds),
    ]
    columns = 2
    rows = -(-len(costs) // columns)
    figure = Figure(figsize=(7.0, 0.9 + 2.1 * rows + 0.16 * -(-len(found) // 4)), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    low = far_below(found)
    shown = [place for place in found if place not in low]
    floor = min(place.score.mean - (place.score.spread or 0.0) for place in shown)
    top = max(place.score.mean + (place.score.spread or 0.0) for place in shown)
    for axes, (label, cost) in zip(panels, costs):
        for place in low:  # at the lower edge, with its number
            under = floor - 0.08 * (top - floor)
            axes.plot(cost(place), under, color=COLOURS[place.style % len(COLOURS)], linestyle="none",
                      marker=_MARKERS[place.style % len(_MARKERS)], markersize=5,
                      label=place.name if axes is panels[0] else None)  # fmt: skip
            axes.annotate(f"{place.score.mean:.0f} ↓", (cost(place), under), (6, 0), textcoords="offset points",
                          fontsize=6.5, va="center")  # fmt: skip
        for place in shown:
            axes.errorbar(
                cost(place),
                place.score.mean,
                yerr=place.score.spread,
                color=COLOURS[place.style % len(COLOURS)],
                marker=_MARKERS[place.style % len(_MARKERS)],
                markersize=5,
                elinewidth=0.7,
                linestyle="none",
                label=place.name if axes is panels[0] else None,
            )
        found_costs = [cost(place) for place in found]
        if min(found_costs) > 0 and max(found_costs) > 2 * min(found_costs):
            axes.set_xscale("log")
            _log_ticks(axes.xaxis, *axes.get_xlim())
        else:  # a narrow range stretched over the panel would make much of little
            axes.set_xlim(0, 1.08 * max(found_costs))
        axes.set_xlabel(label)
    for row in range(rows):
        panels[row * columns].set_ylabel(found[0].quality)
    figure.suptitle(title, fontsize=8)
    figure.legend(loc="outside lower center", ncols=4, handletextpad=0.3, columnspacing=1.2)
    return figure


def _log_ticks(axis: Axis, low: float, high: float) -> None:
    """Numbers that people read where the axis spans less than a few powers of ten, and none between the ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    decades = math.log10(high / low)
    axis.set_minor_formatter(NullFormatter())
    if decades < 2:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if decades > 0.8 else MaxNLocator(4))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _curve(axes: Axes, curve: Curve) -> None:
    colour = COLOURS[curve.style % len(COLOURS)]
    apart = max(1, len(curve.x) // 6)
    axes.plot(
        curve.x,
        curve.mean,
        color=colour,
        linestyle=(0, _DASHES[curve.style % len(_DASHES)] or (1, 0)),
        marker=_MARKERS[curve.style % len(_MARKERS)],
        markersize=3.2,
        markeredgewidth=0,
        markevery=(min(curve.style * apart // 5, len(curve.x) - 1), apart),
        label=curve.name,
        zorder=3,
    )
    axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0, zorder=2)


def _bars(split: Split) -> Figure:
    workers, classes = len(split), len(split[0])
    figure, axes = _new("Who saw which classes in the first epoch", min(6.0, 0.8 + 0.2 * max(workers, 8)))
    most = max(map(sum, split)) or 1
    offsets = [0] * workers
    for label, colour in enumerate(class_colours(classes)):
        counts = [row[label] for row in split]
        axes.barh(range(workers), counts, left=offsets, color=colour, height=0.8, edgecolor="white", linewidth=0.4)
        for worker, count in enumerate(counts):
            if count > 0.035 * most and workers <= 26:
                ink = "black" if is_light(colour) else "white"
                middle = offsets[worker] + count / 2
                axes.text(middle, worker, str(label), color=ink, fontsize=6, ha="center", va="center")
            offsets[worker] += count
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(0, workers, max(1, workers // 16)))
    axes.set_xlabel("samples (the number in a bar is the class)")
    axes.set_ylabel("worker")
    return figure
