"""Where each method lands: a panel for each cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prsgd.report.figures.base import Figure
from prsgd.report.figures.style import colour, log_ticks, marker
from prsgd.report.places import Place, far_below, places
from prsgd.report.series import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

_CAPTION = (
    "How good the model was at the end, against what it cost: to the {} left is better. The seconds are those of "
    "two clusters of equal workers that take 20 ms for a step, joined by 1 Gbit/s (lan-1g) or by 100 Mbit/s with 50 ms "
    "of latency (wan), reckoned from the runs' own averages; bars are the standard deviation over the seeds."
)
_FAR_BELOW = " What is far below all others stands at the lower edge, with its number."
Cost = Callable[[Place], float]


@dataclass(frozen=True)
class Placed:
    """The groups' places, and what they are places of."""

    title: str
    places: list[Place]


def numbers(groups: Sequence[Group]) -> Placed | None:
    """None where the groups do not differ in method enough."""
    config = groups[0].runs[0].config
    title = f"{config['model']} on {config['task']}, {config['workers']} workers: quality at the end, and its cost"
    found = places(groups)
    return Placed(title, found) if found else None


def draw(placed: Placed) -> Drawing:
    """A panel for each cost, all with the same scale of quality."""
    from matplotlib.figure import Figure as Drawing

    found = placed.places
    costs: list[tuple[str, Cost]] = [
        ("MB sent by each worker", lambda place: place.megabytes),
        ("rounds", lambda place: place.rounds),
        *((f"modelled seconds on {name}", lambda place, name=name: place.seconds[name]) for name in found[0].seconds),
    ]
    columns = 2
    rows = -(-len(costs) // columns)
    drawing = Drawing(figsize=(7.0, 0.9 + 2.1 * rows + 0.16 * -(-len(found) // 4)), layout="constrained")
    panels = list(drawing.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for axes, (label, cost) in zip(panels, costs):
        _panel(axes, found, cost, is_named=axes is panels[0])
        axes.set_xlabel(label)
    for row in range(rows):
        panels[row * columns].set_ylabel(found[0].metric.axis)
    drawing.suptitle(placed.title, fontsize=8)
    drawing.legend(loc="outside lower center", ncols=4, handletextpad=0.3, columnspacing=1.2)
    return drawing


def _panel(axes: Axes, found: Sequence[Place], cost: Cost, *, is_named: bool) -> None:
    low = far_below(found)
    others = [place for place in found if place not in low]
    floor = min(place.score.mean - (place.score.spread or 0.0) for place in others)
    top = max(place.score.mean + (place.score.spread or 0.0) for place in others)
    for place in low:  # at the lower edge, with its number
        under = floor - 0.08 * (top - floor)
        axes.plot(cost(place), under, color=colour(place.style), linestyle="none", marker=marker(place.style),
                  markersize=5, label=place.name if is_named else None)  # fmt: skip
        axes.annotate(f"{place.score.mean:.0f} ↓", (cost(place), under), (6, 0), textcoords="offset points",
                      fontsize=6.5, va="center")  # fmt: skip
    for place in others:
        axes.errorbar(
            cost(place),
            place.score.mean,
            yerr=place.score.spread,
            color=colour(place.style),
            marker=marker(place.style),
            markersize=5,
            elinewidth=0.7,
            linestyle="none",
            label=place.name if is_named else None,
        )
    costs = [cost(place) for place in found]
    if min(costs) > 0 and max(costs) > 2 * min(costs):
        axes.set_xscale("log")
        log_ticks(axes.xaxis, *axes.get_xlim())
    else:  # a narrow range stretched over the panel would make much of little
        axes.set_xlim(0, 1.08 * max(costs))


def _caption(placed: Placed) -> str:
    more = placed.places[0].metric.higher_is_better
    return _CAPTION.format("upper" if more else "lower") + (_FAR_BELOW if more else "")


FIGURE = Figure(
    name="methods",
    heading="Where each method lands",
    alt="Quality at the end against bytes, rounds and modelled seconds, a point for each method",
    numbers=numbers,
    caption=_caption,
    draw=draw,
)
