"""How the time was spent: each worker's share of computing, averaging and waiting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from prsgd.clocks.trace import Share
from prsgd.report.figures.base import Figure
from prsgd.report.figures.timeline import COLOURS, WORDS
from prsgd.report.series import Group
from prsgd.report.times import time_shares

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

_CAPTION = (
    "Every worker's share of computing, averaging and waiting for the others, over the whole run on a modelled "
    "cluster, or over what the trace holds of real processes."
)
Shares = list[tuple[str, list[Share]]]
"""By group, a share for each worker."""


def numbers(groups: Sequence[Group]) -> Shares | None:
    """None where no run knows."""
    return time_shares(groups) or None


def draw(named: Shares) -> Drawing:
    """Per run and worker, how it spent its time."""
    from matplotlib.figure import Figure as Drawing
    from matplotlib.patches import Patch

    most = max(len(found) for _, found in named)
    drawing = Drawing(figsize=(max(3.5, 0.9 + len(named) * (0.35 + 0.16 * most)), 2.6), layout="constrained")
    axes = drawing.subplots()
    place, ticks = 0.0, []
    for _, found in named:
        begin = place
        for share in found:
            total = share.computing + share.waiting + share.communicating or 1.0
            bottom = 0.0
            for kind, value in (("step", share.computing), ("average", share.communicating), ("wait", share.waiting)):
                axes.bar(place, 100 * value / total, 0.85, bottom, color=COLOURS[kind])
                bottom += 100 * value / total
            place += 1
        ticks.append((begin + place - 1) / 2)
        place += 1
    axes.set_xticks(ticks, [name.replace(" ", "\n", 1) for name, _ in named])
    axes.set_ylabel("share of the time (%)")
    axes.set_ylim(0, 100)
    axes.grid(visible=False)
    axes.set_title("How each worker spent its time, a bar a worker")
    legend = [Patch(color=COLOURS[kind], label=WORDS[kind]) for kind in ("step", "average", "wait")]
    drawing.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    return drawing


FIGURE = Figure(
    name="idle",
    heading="How the time was spent",
    alt="Share of computing, averaging and waiting of each worker",
    numbers=numbers,
    caption=lambda _: _CAPTION,
    draw=draw,
)
