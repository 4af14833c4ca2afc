"""The paper's Figures 1 and 2 from real traces: a row a worker, steps as blocks as wide as they took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prsgd.clocks.trace import Share, Span, shares, split

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDS = 3
"""Shown unless more are asked for."""
MOST_WORKERS = 16
"""With a row of their own; of more, some evenly spaced."""
MOST_SPANS = 3000
_POINTS = 430
"""Typographic ones, across the axes."""
COLOURS = {"step": "#0072b2", "average": "#d55e00", "wait": "#e6e6e6", "flight": "#e69f00", "pause": "#ffffff"}
WORDS = {"step": "steps", "wait": "waiting for the others", "average": "averaging", "flight": "average on its way"}


@dataclass(frozen=True)
class Timeline:
    """Some rounds of a run."""

    name: str
    begin: float
    end: float
    spans: tuple[Span, ...]
    """Split; those that reach into the window."""
    workers: tuple[int, ...]
    """Which have a row."""

    @property
    def idle(self) -> float:
        """The workers' mean share of the window in which they did not compute."""
        found = shares([span for span in self.spans if span.kind != "flight"])
        return sum(share.idle for share in found) / len(found) if found else 0.0


def timeline(name: str, spans: Sequence[Span], rounds: int = ROUNDS) -> Timeline | None:
    """``rounds`` of them from the second on, the first being a slow one; None if there are not so many."""
    landings: dict[int, float] = {}
    for span in spans:
        if span.kind == "blocked":
            landings[span.number] = max(landings.get(span.number, span.end), span.end)
    numbers = sorted(landings)
    if len(numbers) < 2:
        return None
    first = min(1, len(numbers) - 2)
    begin = landings[numbers[first]]
    everyone = sorted({span.worker for span in spans})
    chosen = everyone if len(everyone) <= MOST_WORKERS else everyone[:: -(-len(everyone) // MOST_WORKERS)]
    later = [span for span in split(spans) if span.end > begin and span.worker in chosen]
    for last in range(min(first + rounds, len(numbers) - 1), first, -1):  # fewer, if they are too many to be seen
        end = landings[numbers[last]]
        inside = [span for span in later if span.begin < end]
        if len(inside) <= MOST_SPANS:
            break
    turns = {(s.worker, s.number): s.begin for s in reversed(inside) if s.kind == "average"}
    inside = [s for s in inside if s.kind != "flight" or s.begin < turns.get((s.worker, s.number), s.end) - 1e-9]
    cut = (
        Span(s.worker, s.kind, max(s.begin, begin) - begin, min(s.end, end) - begin, s.number)
        for s in inside[:MOST_SPANS]
    )
    return Timeline(name, begin, end, tuple(cut), tuple(chosen))


def draw(timelines: Sequence[Timeline]) -> Figure:
    """One below another, on one scale of time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [0.5 + 0.24 * len(one.workers) for one in timelines]
    figure = Figure(figsize=(7.0, sum(heights) + 0.9), layout="constrained")
    grid = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights, sharex=True)
    for axes, one in zip(grid[:, 0], timelines):
        _rows(axes, one)
    grid[-1, 0].set_xlabel("seconds")
    seen = {span.kind for one in timelines for span in one.spans}
    legend = [Patch(color=COLOURS[kind], label=word) for kind, word in WORDS.items() if kind in seen]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    return figure


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
    axes.set_yticks(range(len(one.workers)), [str(worker) for worker in one.workers])
    axes.set_ylim(len(one.workers) - 0.4, -0.6)
    axes.set_ylabel("worker")
    axes.set_title(f"{one.name}: here idle {one.idle:.0%} of the time", loc="left")
    axes.grid(visible=False)


def draw_shares(named: Sequence[tuple[str, Sequence[Share]]]) -> Figure:
    """Per run and worker, how it spent its time."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    most = max(len(found) for _, found in named)
    figure = Figure(figsize=(max(3.5, 0.9 + len(named) * (0.35 + 0.16 * most)), 2.6), layout="constrained")
    axes = figure.subplots()
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
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    return figure
