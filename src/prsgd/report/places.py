"""Where each method lands: how good the model was at the end, against what it cost in bytes, rounds and seconds.

Where workers are equally fast, a run's path does not depend on the cluster, only its time does: so one run is placed on
several, from its own records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from prsgd import cluster as clusters
from prsgd import metrics
from prsgd.metrics import Metric
from prsgd.report.read import Run
from prsgd.report.series import Group, Measured, rows

CLUSTERS = ("lan-1g", "wan")
LEAST_METHODS = 3
"""From how many on they are placed."""


@dataclass(frozen=True)
class Place:
    """One group's."""

    name: str
    style: int
    metric: Metric
    """What the score is."""
    score: Measured
    megabytes: float
    rounds: float
    seconds: dict[str, float]
    """By cluster; empty where the workers' speeds matter."""


def places(groups: Sequence[Group]) -> list[Place]:
    """Of all finished groups, if they differ in method enough."""
    done = [(style, *pair) for style, pair in enumerate(zip(groups, rows(groups))) if pair[0].finished]
    if len({run.config["method"] for _, group, _ in done for run in group.runs}) < LEAST_METHODS:
        return []
    comparable = all(_equally_fast(run) for _, group, _ in done for run in group.counted)
    found = []
    for style, group, row in done:
        score = row.score
        assert score is not None, "it is finished"
        assert row.megabytes is not None
        assert row.rounds is not None
        seconds = {name: fmean(seconds_on(run, name) for run in group.counted) for name in CLUSTERS if comparable}
        found.append(Place(group.name, style, metrics.find(row.metric), score, row.megabytes, row.rounds, seconds))
    return found


def far_below(found: Sequence[Place]) -> list[Place]:
    """At most two that are so much worse that the others could not be told apart beside them; only where more is
    better."""
    ranked = sorted(found, key=lambda place: place.score.mean)
    if not found[0].metric.higher_is_better or len(ranked) < 2 * LEAST_METHODS:
        return []
    top = ranked[-1].score.mean
    for count in (1, 2):
        if top - ranked[0].score.mean > 4 * (top - ranked[count].score.mean):
            return ranked[:count]
    return []


def seconds_on(run: Run, name: str) -> float:
    """What the run would have taken on a cluster whose workers are all alike: computing, and averages not hidden."""
    cluster = clusters.load(name, int(run.config["workers"]))
    seconds, step = 0.0, 0
    for average in run.averages:
        flight = cluster.average_seconds(average.bytes_sent, average.server_bytes_sent, average.hops)
        computing = (average.step - step) * cluster.step_seconds
        seconds += computing + max(0.0, flight - average.overlap * cluster.step_seconds) + cluster.copy_seconds
        step = average.step
    return seconds


def _equally_fast(run: Run) -> bool:
    """In the run as it was, so that it would have gone the same way on another such cluster."""
    name = run.config.get("cluster")
    if name is None:
        return True
    if name not in clusters.PRESETS:
        return False
    cluster = clusters.load(name, int(run.config["workers"]))
    return len(set(cluster.speeds)) == 1 and not cluster.jitter
