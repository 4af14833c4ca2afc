"""The picture of a plan, in a file of the user's choice."""

from __future__ import annotations

from pathlib import Path

from prsgd.report.figures import plan as figure
from prsgd.theory.plan import Plan


def draw_plan(plan: Plan, path: Path) -> None:
    """With constants, the bound against time for several periods; else what each period costs."""
    drawing = figure.draw(figure.numbers(plan))
    try:
        drawing.savefig(path, dpi=200)
    except OSError as error:
        raise ValueError(f"plot cannot be written: {path}: {error.strerror}") from None
    except ValueError as error:  # a format that matplotlib does not know
        raise ValueError(f"plot cannot be written: {path}: {error}") from None
