"""How all figures look: at the width of a column, in colours that everybody can tell apart."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Drawing

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555")
"""Okabe and Ito's, which colour-blind readers can tell apart; without the yellow, which paper swallows."""
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.8), (1.4, 1.4), (6, 1.6, 1.4, 1.6), (3, 1.4))
MARKERS = "os^Dv"
WIDTH_INCHES = 3.5
STYLE: dict[str, Any] = {
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


def new_drawing(title: str, height_inches: float) -> tuple[Drawing, Axes]:
    """One pair of axes, as wide as a column."""
    from matplotlib.figure import Figure as Drawing  # not pyplot: nothing to show, nothing to close

    drawing = Drawing(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    axes = drawing.add_subplot()
    axes.set_title(textwrap.fill(title, 49), pad=11)
    return drawing, axes


def colour(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def marker(style: int) -> str:
    return MARKERS[style % len(MARKERS)]


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """Numbers that people read where the axis spans less than a few powers of ten, and none between the ticks."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    decades = math.log10(high / low)
    axis.set_minor_formatter(NullFormatter())
    if decades < 2:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)) if decades > 0.8 else MaxNLocator(4))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
