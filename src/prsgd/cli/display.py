"""What people see while it runs: a table that lives in a terminal, plain lines elsewhere or without rich. On stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from prsgd import metrics
from prsgd.metrics import ACCURACY, Metric

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from prsgd.lab.progress import Progress
    from prsgd.records import Summary

LINE_SECONDS = 10.0
"""Between two plain lines of one run."""


class Display:
    """A row for each run, by its name."""

    def __init__(self, names: Sequence[str], metric: Metric | None = ACCURACY) -> None:
        self._names, self._metric = names, metric
        self._cells: list[tuple[str, ...]] = [("waiting", "", "", "", "")] * len(names)
        self._live = _live(self._table)
        self._said = [0.0] * len(names)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def starting(self, number: int) -> None:
        """A run was begun: until it tells where it is, its processes start and its data are read."""
        self._cells[number] = ("starting", "", "", "", "")
        if self._live is None:
            self._said[number] = time.monotonic()
            self.say(f"{self._names[number]}: starting")

    def show(self, number: int, progress: Progress) -> None:
        """Where a run is."""
        seen = progress.evaluation
        self._cells[number] = (
            f"{progress.epoch:.1f} of {progress.num_epochs:.4g}"
            if progress.num_epochs >= 1
            else f"{progress.epoch:.3g} of {progress.num_epochs:.3g}",
            str(progress.round),
            "" if seen is None else f"{seen.train_loss:.4f}",
            self._score(None if seen is None else seen.test_score),
            "" if progress.seconds_left is None else duration(progress.seconds_left),
        )
        now = time.monotonic()
        if self._live is None and now - self._said[number] >= LINE_SECONDS:
            self._said[number] = now
            epoch, round, loss, score, left = self._cells[number]
            what = "" if self._metric is None else self._metric.name
            parts = [f"epoch {epoch}", f"round {round}", f"loss {loss}", f"{what} {score}", f"{left} left"]
            filled = [p for p, cell in zip(parts, self._cells[number]) if cell]
            print(f"{self._names[number]}: {', '.join(filled)}", file=sys.stderr, flush=True)

    def finished(self, number: int, summary: Summary) -> None:
        score = self._score(summary.test_score)
        self._cells[number] = ("done", str(summary.rounds), f"{summary.train_loss:.4f}", score, "")
        if self._live is None:
            end = f", {reached(summary)}" if score else ""
            self.say(f"{self._names[number]}: done in {duration(summary.seconds)}, loss {summary.train_loss:.4f}{end}")

    def _score(self, value: float | None) -> str:
        return "" if value is None or self._metric is None else self._metric.of(value)

    def failed(self, number: int, message: str) -> None:
        self._cells[number] = ("failed", "", "", "", "")
        self.say(f"{self._names[number]}: failed: {message}")

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def _table(self) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("run", no_wrap=True, max_width=34)
        score = "" if self._metric is None else self._metric.live
        for title in ("epoch", "round", "train loss", score, "left"):
            table.add_column(title, justify="right", no_wrap=True)
        for name, cells in zip(self._names, self._cells):
            table.add_row(name, *cells)
        return table


def _live(table: Callable[[], Table]) -> Live | None:
    """What shows the table in a terminal; None where there is none, or no rich (the lab extra)."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError:
        return None
    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    return Live(console=console, get_renderable=table, refresh_per_second=4, transient=True)


def reached(summary: Summary) -> str:
    """How good its model was at the end; empty where the task has no metric."""
    metric = metrics.find(summary.metric)
    return "" if summary.test_score is None else metric.said.format(metric.of(summary.test_score))


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(4.2), duration(75), duration(8000), duration(1e6), duration(0.25), duration(1e12)
    ('4 s', '1 min 15 s', '2 h 13 min', '11 d 13 h', '0.25 s', '3.17e+04 y')
    """
    whole = round(seconds)
    if whole >= 10_000 * 86400:
        return f"{seconds / (365.25 * 86400):,.3g} y"
    if 0 < seconds < 1:
        return f"{seconds:.2g} s"
    if whole >= 100 * 3600:
        return f"{whole // 86400:,} d {whole % 86400 // 3600} h"
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def number_of(count: int | None, noun: str) -> str:
    """
    >>> number_of(1, "run"), number_of(15, "run")
    ('1 run', '15 runs')
    """
    return f"{many(count or 0)} {noun}{'' if count == 1 else 's'}"


def many(count: int) -> str:
    """A whole number that stays within a column.

    >>> many(28_800), many(10**15)
    ('28,800', '1e+15')
    """
    return f"{count:,}" if count < 10**9 else f"{count:.4g}"
