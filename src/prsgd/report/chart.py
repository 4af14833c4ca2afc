"""What a figure of lines shows, for paper and screen alike: numbers and words, nothing drawn."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """One line; the band is the smallest and largest of its seeds."""

    name: str
    style: int
    """Its place among all: its colour, dashes and marker in every figure."""
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Lines and their axes."""

    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    log_y: bool = False
    floor: float | None = None
    """Where the y axis begins; None: at the lowest value."""
    ceiling: float | None = None
    """Where it ends; None: at the highest value."""
    marks: tuple[float, ...] = ()
    """The epochs at which the lr falls."""
    curves: tuple[Curve, ...]
    rings: tuple[tuple[float, float], ...] = ()
    """Points with a ring around them."""
