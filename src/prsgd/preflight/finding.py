"""One line of what was found, and how the lines are printed."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WIDTH = 80
_ABOUT = 10
"""Characters for what a line is about."""


@dataclass(frozen=True)
class Finding:
    """``level``: "ok"; "note", which only matters to some; "warning"; "error", with which a run fails."""

    level: Literal["ok", "note", "warning", "error"]
    about: str
    text: str
    remedy: str = ""
    """What to do about it."""


def table(findings: Sequence[Finding]) -> str:
    """One line each, broken where a terminal ends, the remedy below.

    >>> print(table([Finding("warning", "batches", "workers 0, 1 have the same", "give each its own")]))
    warning  batches   workers 0, 1 have the same
                       -> give each its own
    """
    indent = 9 + _ABOUT
    lines = []
    for found in findings:
        begin = f"{found.level:<9}{found.about:<{_ABOUT}}"
        lines.append(_filled(found.text, begin, " " * indent))
        if found.remedy:
            lines.append(_filled(found.remedy, " " * indent + "-> ", " " * (indent + 3)))
    return "\n".join(lines)


def _filled(text: str, first: str, then: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=then, break_on_hyphens=False, break_long_words=False
    )


def is_wrong(findings: Sequence[Finding]) -> bool:
    """Is there an error? (A warning may be what was meant.)"""
    return any(found.level == "error" for found in findings)
