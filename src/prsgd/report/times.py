"""Where the workers' time went: from the records of a modelled cluster, or from the traces of real processes."""

from __future__ import annotations

from collections.abc import Sequence

from prsgd.clocks.trace import Share, shares, split
from prsgd.report.read import Run
from prsgd.report.series import Group
from prsgd.report.timeline import ROUNDS, Timeline, timeline

MOST_GROUPS = 6
"""With a timeline of their own."""


def timelines(groups: Sequence[Group]) -> list[Timeline]:
    """Of each group's first run that has a trace of several workers."""
    found = []
    for group in groups[:MOST_GROUPS]:
        run = next((run for run in group.runs if _workers(run) > 1), None)
        drawn = None if run is None else timeline(group.name, run.spans, ROUNDS, workers=run.config["workers"])
        if drawn is not None:
            found.append(drawn)
    return found


def time_shares(groups: Sequence[Group]) -> list[tuple[str, list[Share]]]:
    """Of each group's first run that knows."""
    found = []
    for group in groups:
        named = next(((group.name, each) for run in group.runs if (each := of_run(run))), None)
        if named is not None:
            found.append(named)
    return found


def of_run(run: Run) -> list[Share]:
    """Over the whole run where the time is modelled, else over what the trace holds."""
    modelled = [average.modelled for average in run.averages if average.modelled is not None]
    if modelled:
        sums = [[sum(column) for column in zip(*(getattr(one, part) for one in modelled))] for part in _PARTS]
        return [Share(worker, *parts) for worker, parts in enumerate(zip(*sums))]
    return shares(split(run.spans)) if _workers(run) > 1 else []


_PARTS = ("computing", "waiting", "communicating")


def _workers(run: Run) -> int:
    return len({span.worker for span in run.spans})
