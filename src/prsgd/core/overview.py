"""``local.summary()``: where a run stands, and what to change. It looks at what is written down anyway."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prsgd.records import Record, Totals

LITTLE = 0.05
"""Of the time: who waits less has nothing to gain."""
WIDTH = 80


@dataclass(frozen=True)
class Overview:
    """Where a run stands, seen from one process. The rounds are those whose records are complete.

    >>> print(Overview(12, 96, 8, 1_230_000, 2.0, 0.62, 0.0123, 8, 0, "you wait 31 % of the time: raise the period"))
    12 rounds in 96 steps, 8 workers; the last period 8, overlap 0
    1.23 MB sent by each worker; drift 0.0123
    waited 0.62 of 2 s; you wait 31 % of the time: raise the period
    """

    rounds: int
    steps: int
    """Of the hosted worker; the most of several."""
    workers: int
    bytes_sent: int
    """Per worker."""
    seconds: float
    """In which the hosted workers computed or waited, their mean, since this process began; pauses are left out. On a
    modelled cluster they are its seconds."""
    wait_seconds: float
    """Of those, blocked at averages: by the others, the transfer and copying."""
    drift: float | None
    """When last known; None: not yet, or by nobody."""
    period: int | None
    """Of the newest round; None: there is none yet."""
    overlap: int | None
    advice: str

    @property
    def waiting(self) -> float:
        """The share of the time in which the workers waited."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        drift = "not known" if self.drift is None else f"{self.drift:.4g}"
        last = "" if self.period is None else f"; the last period {self.period}, overlap {self.overlap}"
        workers = f"{self.workers:,} worker{'' if self.workers == 1 else 's'}"
        lines = [
            f"{self.rounds:,} rounds in {self.steps:,} steps, {workers}{last}",
            f"{self.bytes_sent / 1e6:,.4g} MB sent by each worker; drift {drift}",
            f"waited {self.wait_seconds:,.3g} of {self.seconds:,.3g} s; {self.advice}",
        ]
        return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def percent(share: float) -> str:
    """
    >>> percent(0.314), percent(0.004)
    ('31 %', '0.4 %')
    """
    return f"{100 * share:.2g} %" if share < 0.995 else "100 %"


def drift_of(records: Iterable[Record]) -> float | None:
    """The newest that is known; of a model that travels in fragments, the sum of theirs.

    >>> drift_of([])
    """
    newest = {record.fragment: record.drift for record in records if record.drift is not None}
    return sum(newest.values()) if newest else None


def overview(
    records: Sequence[Record],
    totals: Totals,
    *,
    steps: int,
    workers: int,
    seconds: float,
    wait_seconds: float,
    travels: bool,
    chosen: bool,
) -> Overview:
    """Of a run with these ``records``. ``travels``: do averages leave this process, or would they on the cluster that
    is modelled? ``chosen``: does the overlap choose itself?"""
    last = next((record for record in reversed(records) if record.period), None)  # a run may end with one of no steps
    return Overview(
        rounds=totals.rounds,
        steps=steps,
        workers=workers,
        bytes_sent=totals.bytes_sent,
        seconds=seconds,
        wait_seconds=wait_seconds,
        drift=drift_of(records),
        period=None if last is None else last.period,
        overlap=None if last is None else last.overlap,
        advice=_advice(wait_seconds / seconds if seconds else 0.0, last, travels=travels, chosen=chosen),
    )


def _advice(waiting: float, last: Record | None, *, travels: bool, chosen: bool) -> str:
    """What to do about the share of the time that is waited.

    >>> record = Record(1, 8, 8, 0, 4, 0, 0, 0, 0.0, 0.0, 0.0, 0.1, None, None, 0)
    >>> _advice(0.314, record, travels=True, chosen=False)
    'you wait 31 % of the time: raise the period or the overlap; for others that are slower, take measured()'
    >>> _advice(0.01, record, travels=True, chosen=False)
    'you wait 1 % of the time: there is nothing to gain by averaging more rarely'
    """
    if last is None:
        return "no average is complete yet"
    wait = f"you wait {percent(waiting)} of the time"
    if waiting < LITTLE:
        return f"{wait}: there is nothing to gain by averaging more rarely"
    if not travels:
        return f"{wait}, for copies within this process: raise the period"
    hides_more = " or the overlap" if not chosen and last.overlap < last.period else ""
    return f"{wait}: raise the period{hides_more}; for others that are slower, take measured()"
