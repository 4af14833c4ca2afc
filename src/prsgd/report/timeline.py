"""What every worker did when, of a few rounds of a trace: the numbers of the paper's Figures 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prsgd.clocks.trace import Span, shares, split

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

ROUNDS = 3
"""Shown unless more are asked for."""
MOST_WORKERS = 16
"""With a row of their own; of more, some evenly spaced."""
MOST_SPANS = 3000


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
    names: tuple[str, ...]
    """Of the rows."""

    @property
    def idle(self) -> float:
        """The workers' mean share of the window in which they did not compute."""
        found = shares([span for span in self.spans if span.kind != "flight"])
        return sum(share.idle for share in found) / len(found) if found else 0.0


def row_names(first: Sequence[int], workers: int) -> list[str]:
    """Of the rows of a run of so many workers. A process that hosts several takes their steps together, and tells of
    them by its first one: its row is theirs.

    >>> row_names([0, 1, 2], 3)
    ['0', '1', '2']
    >>> row_names([0, 4], 8)
    ['0-3', '4-7']
    """
    pairs = zip(first, [*first[1:], max(workers, first[-1] + 1)])
    return [str(begin) if end == begin + 1 else f"{begin}-{end - 1}" for begin, end in pairs]


def timeline(name: str, spans: Sequence[Span], rounds: int = ROUNDS, *, workers: int) -> Timeline | None:
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
    apart = -(-len(everyone) // MOST_WORKERS)
    chosen, names = everyone[::apart], row_names(everyone, workers)[::apart]
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
    return Timeline(name, begin, end, tuple(cut), tuple(chosen), tuple(names))


def draw(timelines: Sequence[Timeline]) -> Drawing:
    """Their picture, for ``prsgd timeline``."""
    from prsgd.report.figures.timeline import draw as drawn  # the figure reads this file

    return drawn(timelines)
