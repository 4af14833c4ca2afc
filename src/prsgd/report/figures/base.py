"""What a figure is. A new one is one file beside this one, and one row in a list (FIGURES in ``__init__``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Subject = TypeVar("Subject")
"""What it is a figure of: groups of runs, or what ``prsgd verify`` measured."""
Numbers = TypeVar("Numbers")


@dataclass(frozen=True)
class Figure(Generic[Subject, Numbers]):
    """A value that says what is shown, in which words, and how it is drawn; numbers and drawing are apart."""

    name: str
    """Of its files: figures/NAME.png and figures/NAME.svg."""
    heading: str
    alt: str
    """What the picture is, for readers who do not see it."""
    numbers: Callable[[Subject], Numbers | None]
    """What is to be shown; None where the figure does not apply."""
    caption: Callable[[Numbers], str]
    draw: Callable[[Numbers], Drawing]
    """For paper. It is called with the style of style.py in force."""
    screen: Literal["chart", "split"] | None = None
    """Which part of page.js draws it anew on a screen; None: the picture for paper is shown there too."""


@dataclass(frozen=True)
class Picture(Generic[Numbers]):
    """A figure with the numbers that it shows: they are computed once, for paper, page and CSV alike."""

    figure: Figure[Any, Numbers]
    numbers: Numbers

    @property
    def name(self) -> str:
        return self.figure.name

    @property
    def caption(self) -> str:
        return self.figure.caption(self.numbers)

    def draw(self) -> Drawing:
        return self.figure.draw(self.numbers)


def applying(figures: Iterable[Figure[Subject, Any]], subject: Subject) -> list[Picture[Any]]:
    """Those figures that apply to ``subject``, with their numbers."""
    found = ((figure, figure.numbers(subject)) for figure in figures)
    return [Picture(figure, numbers) for figure, numbers in found if numbers is not None]
