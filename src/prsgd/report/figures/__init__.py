"""The figures of a report, one file each: a new one is a file and a row of the list.

base says what a figure is and style how all look; chart draws lines for those that are nothing else: curves, of runs,
and verified, of what ``prsgd verify`` measured. plan is the picture of ``prsgd plan``, which has no page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prsgd import files
from prsgd.report.figures import curves, idle, places, split, timeline
from prsgd.report.figures.base import Figure, Picture
from prsgd.report.figures.style import STYLE
from prsgd.report.series import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

FIGURES: tuple[Figure[Sequence[Group], Any], ...] = (
    places.FIGURE,
    *curves.FIGURES,
    timeline.FIGURE,
    idle.FIGURE,
    split.FIGURE,
)
"""In the order of the page."""


def draw(pictures: Sequence[Picture[Any]], folder: Path) -> list[Path]:
    """figures/NAME.png and .svg in ``folder`` for each; returns their paths."""
    return save(folder, {picture.name: picture.draw for picture in pictures})


def save(folder: Path, made: Mapping[str, Callable[[], Drawing]]) -> list[Path]:
    """Each as figures/NAME.png and .svg in ``folder``.

    The same numbers give the same bytes: a figure under version control changes only when they do.
    """
    from matplotlib import style

    place = folder / files.FIGURES
    place.mkdir(parents=True, exist_ok=True)
    paths = []
    with style.context(["default", STYLE]):  # whatever the user's matplotlibrc says
        for name, make in made.items():
            drawing = make()
            for kind in ("png", "svg"):
                paths.append(place / f"{name}.{kind}")
                drawing.savefig(paths[-1], metadata={"Date": None} if kind == "svg" else {"Software": None})
    return paths
