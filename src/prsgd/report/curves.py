"""Charts of what runs have recorded, over epochs, bytes and seconds, with a band for the seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from prsgd.lab.recipe import LR_DROPS
from prsgd.metrics import Metric
from prsgd.records import Record
from prsgd.report.chart import Chart, Curve
from prsgd.report.read import Run
from prsgd.report.series import Group

MOST_POINTS = 200
"""Of a curve of averages: more is a smear."""


def training_loss(groups: Sequence[Group]) -> Chart | None:
    """Of the consensus, against epochs."""
    curves = _curves(groups, _loss_points, above_zero=True)
    return _by_epoch(groups, "Training loss", "training loss", curves, log_y=True)


def score(metric: Metric, groups: Sequence[Group]) -> Chart | None:
    """On samples that nobody trained on; None where a task has another metric, or none."""
    curves = _curves(groups, partial(_score_points, metric))
    what = metric.axis.partition(" (")[0].capitalize()
    edge = _edge(curves, metric)
    edges = {"floor": edge} if metric.higher_is_better else {"ceiling": edge}
    return _by_epoch(groups, what, metric.axis, curves, log_y=False, **edges)


def score_against(metric: Metric, what: str, groups: Sequence[Group]) -> Chart | None:
    """The same against "bytes" or "modelled-seconds"."""
    places, x_label, log_x = _COSTS[what]

    def points(run: Run) -> Points:
        scores, at = _score_points(metric, run), places(run)
        return {step: (at[step][0], y) for step, (_, y) in scores.items() if step in at}

    curves = _curves(groups, points)
    config = groups[0].runs[0].config
    title = f"{metric.axis.capitalize()} of {config['model']} on {config['task']} against {x_label}"
    edge = _edge(_curves(groups, partial(_score_points, metric)), metric)
    chart = Chart(title=title, x_label=x_label, y_label=metric.axis, log_x=log_x, ceiling=edge, curves=curves)
    return chart if curves else None


def drift(groups: Sequence[Group]) -> Chart | None:
    """As the averages' records have it."""
    return _by_epoch(groups, "Drift", "drift", _drift_curves(groups), log_y=True)


def period(groups: Sequence[Group]) -> Chart | None:
    """Steps of a round; None where all runs keep to the one that they were given."""
    if not any(len({average.period for average in run.averages[:-1]}) > 1 for group in groups for run in group.runs):
        return None
    return _by_epoch(groups, "Period", "steps of a round", _curves(groups, _period_points, above_zero=True), log_y=True)


def loss_against_bytes(groups: Sequence[Group]) -> Chart | None:
    """The training loss, against what each worker had sent."""
    return _loss_against(groups, "bytes sent", "MB sent per worker", _byte_points, log_x=True)


def loss_against_modelled_seconds(groups: Sequence[Group]) -> Chart | None:
    """The same against the time of a modelled cluster."""
    return _loss_against(groups, "time", "modelled seconds", _modelled_points)


def loss_against_seconds(groups: Sequence[Group]) -> Chart | None:
    """The same against the time that real processes took, where they play a cluster."""
    return _loss_against(groups, "time", "seconds", _second_points)


def _by_epoch(
    groups: Sequence[Group],
    what: str,
    y_label: str,
    curves: tuple[Curve, ...],
    *,
    log_y: bool,
    floor: float | None = None,
    ceiling: float | None = None,
) -> Chart | None:
    config = groups[0].runs[0].config
    title = f"{what} of {config['model']} on {config['task']}, {config['workers']} workers"
    marks = lr_drops(groups)
    chart = Chart(
        title=title, x_label="epoch", y_label=y_label, log_y=log_y, floor=floor, ceiling=ceiling, marks=marks,
        curves=curves,
    )  # fmt: skip
    return chart if curves else None


def _loss_against(
    groups: Sequence[Group], what: str, x_label: str, points: Callable[[Run], Points], *, log_x: bool = False
) -> Chart | None:
    config = groups[0].runs[0].config
    title = f"Loss of {config['model']} on {config['task']} against {what}"
    curves = _curves(groups, points, above_zero=True)
    chart = Chart(title=title, x_label=x_label, y_label="training loss", log_x=log_x, log_y=True, curves=curves)
    return chart if curves else None


def lr_drops(groups: Sequence[Group]) -> tuple[float, ...]:
    """The epochs at which the lr falls; none if the runs that follow the recipe do not agree on them."""
    lengths = {run.planned_epochs for group in groups for run in group.runs if run.follows_recipe}
    length = lengths.pop() if len(lengths) == 1 else None
    return () if length is None else tuple(length * fraction for fraction in LR_DROPS)


Points = dict[int, tuple[float, float]]
"""What one run has: where it was (the same for all seeds) -> x, y."""


def _loss_points(run: Run) -> Points:
    return {seen.step: (seen.epoch, seen.train_loss) for seen in run.evaluations}


def _score_points(metric: Metric, run: Run) -> Points:
    scored = (seen for seen in run.evaluations if seen.test_score is not None and seen.metric == metric.name)
    return {seen.step: (seen.epoch, run.score(seen)) for seen in scored}


def _modelled_points(run: Run) -> Points:
    seen = ((e.step, e.modelled_seconds, e.train_loss) for e in run.evaluations)
    return {step: (seconds, loss) for step, seconds, loss in seen if seconds is not None}


def _second_points(run: Run) -> Points:
    """Where a cluster is played by real processes: elsewhere a machine's own seconds say little of a method."""
    if run.config.get("cluster") is None or run.config.get("processes", 1) == 1:
        return {}
    return {seen.step: (seen.seconds, seen.train_loss) for seen in run.evaluations}


def _byte_points(run: Run) -> Points:
    """Without those before the first average: nothing was sent, and the axis is logarithmic."""
    points: Points = {}
    sent, waiting = 0, sorted(run.averages, key=lambda average: average.step, reverse=True)
    for seen in run.evaluations:
        while waiting and waiting[-1].step <= seen.step:
            sent += waiting.pop().bytes_sent
        if sent:
            points[seen.step] = (sent / 1e6, seen.train_loss)
    return points


_COSTS: dict[str, tuple[Callable[[Run], Points], str, bool]] = {
    "bytes": (_byte_points, "MB sent per worker", True),
    "modelled-seconds": (_modelled_points, "modelled seconds", False),
}
"""Where the points lie, what they are, and whether their axis is logarithmic."""


def _drift_curves(groups: Sequence[Group]) -> tuple[Curve, ...]:
    curves = []
    for style, group in enumerate(groups):
        most = max((run.averages[-1].round for run in group.runs if run.averages), default=0)
        curve = _curve(group, style, [_drift_points(run, -(-most // MOST_POINTS)) for run in group.runs], True)
        curves.append(curve)
    return tuple(curve for curve in curves if curve.x)


def _drift_points(run: Run, bin_rounds: int) -> Points:
    """Means of ``bin_rounds`` averages each."""
    per_epoch = run.steps_per_epoch
    if per_epoch is None:
        return {}
    bins: dict[int, list[tuple[Record, float]]] = {}
    for average in run.averages:
        if average.drift is not None:
            bins.setdefault((average.round - 1) // bin_rounds, []).append((average, average.drift))
    return {
        place: (fmean(average.step for average, _ in held) / per_epoch, fmean(drift for _, drift in held))
        for place, held in bins.items()
    }


def _period_points(run: Run) -> Points:
    """Means of the rounds that end in the same two-hundredth of the run; without the last, which the end cuts short."""
    per_epoch, averages = run.steps_per_epoch, run.averages[:-1]
    if per_epoch is None or not averages:
        return {}
    bin_steps = -(-run.averages[-1].step // MOST_POINTS)
    bins: dict[int, list[Record]] = {}
    for average in averages:
        bins.setdefault((average.step - 1) // bin_steps, []).append(average)
    return {
        place: (fmean(average.step for average in held) / per_epoch, fmean(average.period for average in held))
        for place, held in bins.items()
    }


def _curves(groups: Sequence[Group], points: Callable[[Run], Points], *, above_zero: bool = False) -> tuple[Curve, ...]:
    made = [_curve(group, i, [points(run) for run in group.runs], above_zero) for i, group in enumerate(groups)]
    return tuple(curve for curve in made if curve.x)


def _curve(group: Group, style: int, seeds: Sequence[Points], above_zero: bool) -> Curve:
    """Of the seeds that came that far. A place where one is not finite has no mean, and on a log axis none has 0."""
    places = sorted({place for points in seeds for place in points})
    columns = []
    for place in places:
        there = [points[place] for points in seeds if place in points]
        ys = [y for _, y in there]
        if all(math.isfinite(y) and (y > 0 or not above_zero) for y in ys):
            columns.append((fmean(x for x, _ in there), fmean(ys), min(ys), max(ys)))
    x, mean, low, high = zip(*columns) if columns else ((), (), (), ())
    return Curve(group.name, style, x, mean, low, high)


def _edge(curves: Sequence[Curve], metric: Metric) -> float | None:
    """Beyond what is seen after a tenth of the run: the first steps would squeeze the rest into a line.

    Below where higher is better, and above where lower is.
    """
    length = max((curve.x[-1] for curve in curves), default=0.0)
    if sum(x >= length / 10 for curve in curves[:1] for x in curve.x) < 6:
        return None
    late = [edge for curve in curves for x, *edge in zip(curve.x, curve.low, curve.high) if x >= length / 10]
    if not late:
        return None
    if metric.higher_is_better:
        bottom, top = min(low for low, _ in late), max(high for curve in curves for high in curve.high)
        return max(0.0, bottom - 0.08 * (top - bottom) - 0.1)
    bottom, top = min(low for curve in curves for low in curve.low), max(high for _, high in late)
    return top + 0.08 * (top - bottom)
