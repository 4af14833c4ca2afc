"""Who saw what: how many samples of each class, or of another group, every worker saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prsgd.report.about import split_sentence
from prsgd.report.figures.base import Figure
from prsgd.report.figures.style import new_drawing
from prsgd.report.series import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing


@dataclass(frozen=True)
class Split:
    """Of the first epoch of the first seed."""

    counts: tuple[tuple[int, ...], ...]
    """A row for each worker, a column for each group."""
    names: tuple[str, ...]
    word: str
    """What a group is."""
    sentence: str
    """How the samples were dealt out."""


def numbers(groups: Sequence[Group]) -> Split | None:
    """Of the first run that has one: with the same seed, all have the same."""
    seen = next((run.split for group in groups for run in group.runs if run.split is not None), None)
    sentence = split_sentence(str(groups[0].runs[0].config.get("split", "iid")))
    return None if seen is None else Split(seen.counts, seen.names, seen.word, sentence)


def caption(split: Split) -> str:
    return (
        f"{split.sentence} A bar shows how many samples of each {split.word} a worker saw in the first epoch of the "
        f"first seed; what stands in it is the {split.word}."
    )


def group_colours(count: int) -> list[str]:
    """From dark to light, so that neighbours differ in any rendering.

    >>> group_colours(2)
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


def draw(split: Split) -> Drawing:
    """A bar for each worker, in pieces for the classes."""
    counted = split.counts
    workers, groups = len(counted), len(counted[0])
    drawing, axes = new_drawing(f"Who saw which {split.word} in the first epoch", min(6.0, 0.8 + 0.2 * max(workers, 8)))
    most = max(map(sum, counted)) or 1
    offsets = [0] * workers
    for group, colour in enumerate(group_colours(groups)):
        counts = [row[group] for row in counted]
        axes.barh(range(workers), counts, left=offsets, color=colour, height=0.8, edgecolor="white", linewidth=0.4)
        for worker, count in enumerate(counts):
            name = split.names[group]
            if count > (0.023 + 0.012 * len(name)) * most and workers <= 26:
                ink = "black" if is_light(colour) else "white"
                middle = offsets[worker] + count / 2
                axes.text(middle, worker, name, color=ink, fontsize=6, ha="center", va="center")
            offsets[worker] += count
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_yticks(range(0, workers, max(1, workers // 16)))
    axes.set_xlabel(f"samples (what stands in a bar is the {split.word})")
    axes.set_ylabel("worker")
    return drawing


FIGURE = Figure(
    name="split",
    heading="Who saw what",
    alt="Who saw what",
    numbers=numbers,
    caption=caption,
    draw=draw,
    screen="split",
)
