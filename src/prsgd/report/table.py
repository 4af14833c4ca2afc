"""The numbers as text: for a terminal, and as CSV for everything else."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prsgd import files, metrics
from prsgd.report.chart import Chart
from prsgd.report.series import Group, Measured, Row, rows

WIDTH = 80
SCORE = "score"
"""Where the metric is called by its name."""
_HEADS = ("run", SCORE, "train loss", "seeds", "modelled s", "rounds", "MB sent", "share", "drift", "seconds")


def text_table(groups: Sequence[Group]) -> str:
    """One line a group, at most 80 columns wide; a * leads to what is not finished."""
    found = rows(groups)
    cells = [[f"{row.name}{' *' if row.state else ''}", *row_cells(row)] for row in found]
    for row, line in zip(found, cells):
        line.insert(_HEADS.index("seeds"), str(row.seeds) if seeds_differ(found) else "")
    metric = metrics.find(found[0].metric)
    heads = [metric.column if head is SCORE else head for head in _HEADS]
    for column in reversed(range(1, len(heads))):
        if all(line[column] == "" for line in cells):
            for line in (heads, *cells):
                del line[column]
    while len(heads) > 2 and _width(heads, *cells) > WIDTH:  # names first: the page and table.csv have the rest
        for line in (heads, *cells):
            del line[-1]
    room = [max(len(line[i]) for line in (heads, *cells)) for i in range(len(heads))]
    room[0] = max(8, min(room[0], WIDTH - sum(room[1:]) - 2 * (len(room) - 1)))
    lines = [heads, ["-" * width for width in room], *cells]
    text = ["  ".join([_fit(line[0], room[0]), *(c.rjust(w) for c, w in zip(line[1:], room[1:]))]) for line in lines]
    text += [_fit(f"* {row.name}: {row.state}", WIDTH) for row in found if row.state]
    return "\n".join(line.rstrip() for line in text)


def seeds_differ(found: Sequence[Row]) -> bool:
    """Must a reader be told how many each has?"""
    return len({row.seeds for row in found}) > 1


def _width(*lines: Sequence[str]) -> int:
    return sum(max(map(len, column)) for column in zip(*lines)) + 2 * (len(lines[0]) - 1)


def row_cells(row: Row) -> list[str]:
    """Everything behind the name, as people read it; empty where there is nothing to say."""
    return [
        _measured(row.test_score, f".{metrics.find(row.metric).digits}f"),
        "" if row.train_loss is None else _three(row.train_loss.mean),
        "" if row.modelled_seconds is None else f"{row.modelled_seconds:,.4g}",
        "" if row.rounds is None else f"{row.rounds:,.0f}",
        "" if row.megabytes is None else _three(row.megabytes),
        "" if row.share is None else f"{_three(100 * row.share)} %",
        "" if row.drift is None else _three(row.drift),
        "" if row.seconds is None else _three(row.seconds),
    ]


def write_csv(groups: Sequence[Group], charts: Mapping[str, Chart], folder: Path) -> list[Path]:
    """table.csv, one line a group, and curves.csv, one line a point of a curve of these charts, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    table, curves = folder / files.TABLE, folder / files.CURVES
    _write(table, _TABLE_HEADS, (_table_line(row) for row in rows(groups)))
    lines = (
        (name, curve.name, x, mean, low, high)
        for name, chart in charts.items()
        for curve in chart.curves
        for x, mean, low, high in zip(curve.x, curve.mean, curve.low, curve.high)
    )
    _write(curves, ("figure", "run", "x", "mean", "low", "high"), lines)
    return [table, curves]


_TABLE_HEADS = (
    "run", "state", "seeds", "metric", "test_score", "test_score_spread", "train_loss", "train_loss_spread",
    "rounds", "megabytes_sent_per_worker", "share_of_baseline_bytes", "mean_drift", "train_seconds",
    "modelled_seconds",
)  # fmt: skip


def _table_line(row: Row) -> list[object]:
    pairs = [(m.mean, m.spread) if m is not None else (None, None) for m in (row.test_score, row.train_loss)]
    costs = [row.rounds, row.megabytes, row.share, row.drift, row.seconds, row.modelled_seconds]
    return [row.label, row.state or "finished", row.seeds, row.metric, *pairs[0], *pairs[1], *costs]


def _write(path: Path, heads: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(heads)
        writer.writerows(lines)


def _measured(value: Measured | None, form: str) -> str:
    if value is None:
        return ""
    return f"{value.mean:{form}}" + ("" if value.spread is None else f" ± {value.spread:{form}}")


def _three(value: float) -> str:
    """About three digits.

    >>> _three(1234.5), _three(12.345), _three(0.01234), _three(1.234e-6)
    ('1,234', '12.3', '0.0123', '1.23e-06')
    """
    return f"{value:,.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
