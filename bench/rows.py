"""Rows about finished runs in a JSON file, a line for each, which pages under docs/results are made from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(place: Path) -> list[Row]:
    found: list[Row] = json.loads(place.read_text()) if place.exists() else []
    return found


def put(found: Iterable[Row], place: Path, identity: Callable[[Row], tuple[Any, ...]]) -> int:
    """Put rows into the file, in the place of those of the same identity; returns how many changed something."""
    before = read(place)
    rows = {identity(row): row for row in before} | {identity(row): row for row in found}
    ordered = sorted(rows.values(), key=lambda row: [str(part).rjust(24) for part in identity(row)])
    place.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in ordered) + "\n]\n")
    return sum(row not in before for row in ordered)
