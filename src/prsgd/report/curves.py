"""Curves over epochs and bytes, with a band for the seeds: what a figure shows, for paper and screen alike."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from prsgd.lab.recipe import LR_DROPS
from prsgd.records import Record
from prsgd.report.read import Run
from prsgd.report.series import Group

MOST_POINTS = 200
"""Of a curve of averages: more is a smear."""


@dataclass(frozen=True)
class Curve:
    """One group's values; the band is the smallest and largest of its seeds."""

    name: str
    style: int
    """The group's place among all: its colour, dashes and marker in every figure."""
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """What a figure shows, for paper and screen alike."""

    key: str
    title: str
    x_label: str
    y_label: str
    log_x: bool
    log_y: bool
    floor: float | None
    """Where the y axis begins; None: at the lowest value."""
    marks: tuple[float, ...]
    """The epochs at which the lr falls."""
    curves: tuple[Curve, ...]
    rings: tuple[tuple[float, float], ...] = ()
    """Points with a ring around them."""


def charts(groups: Sequence[Group]) -> list[Chart]:
    """The figures that these runs have values for."""
    config = groups[0].runs[0].config
    model = f"{config['model']} on {config['task']}"
    what = f"{model}, {config['workers']} workers"
    marks = lr_drops(groups)
    accuracy = _curves(groups, _accuracy_points)
    found = [
        Chart("training-loss", f"Training loss of {what}", "epoch", "training loss", False, True, None, marks,
              _curves(groups, _loss_points, above_zero=True)),
        Chart("test-accuracy", f"Test accuracy of {what}", "epoch", "test accuracy (%)", False, False,
              _floor(accuracy), marks, accuracy),
        Chart("loss-against-bytes", f"Loss of {model} against bytes sent", "MB sent per worker", "training loss",
              True, True, None, (), _curves(groups, _byte_points, above_zero=True)),
        Chart("loss-against-modelled-seconds", f"Loss of {model} against time", "modelled seconds", "training loss",
              False, True, None, (), _curves(groups, _modelled_points, above_zero=True)),
        Chart("loss-against-seconds", f"Loss of {model} against time", "seconds", "training loss",
              False, True, None, (), _curves(groups, _second_points, above_zero=True)),
        Chart("drift", f"Drift of {what}", "epoch", "drift", False, True, None, marks, _drift_curves(groups)),
    ]  # fmt: skip
    return [chart for chart in found if chart.curves]


def follows_recipe(run: Run) -> bool:
    """Was the lr the given one, divided by 10 at each of ``LR_DROPS``? Some methods set their own.

    The steps next to a drop are not asked: an average may land with the lr of either side. Where workers differ in
    their steps, a round or two are next to it.
    """
    length, lr = run.planned_steps, run.config.get("lr")
    if length is None or lr is None:
        return False
    drops = [fraction * length for fraction in LR_DROPS]
    longest = max((b.step - a.step for a, b in itertools.pairwise(run.averages)), default=0)
    near = 2 * longest + 2 if run.uneven else 2
    return all(
        math.isclose(average.lr, lr / 10 ** sum(average.step > drop for drop in drops), rel_tol=1e-6)
        for average in run.averages
        if all(abs(average.step - drop) > near for drop in drops)
    )


def lr_drops(groups: Sequence[Group]) -> tuple[float, ...]:
    """The epochs at which the lr falls; none if the runs that follow the recipe do not agree on them."""
    lengths = {run.planned_epochs for group in groups for run in group.runs if follows_recipe(run)}
    length = lengths.pop() if len(lengths) == 1 else None
    return () if length is None else tuple(length * fraction for fraction in LR_DROPS)


Points = dict[int, tuple[float, float]]
"""What one run has: where it was (the same for all seeds) -> x, y."""


def _loss_points(run: Run) -> Points:
    return {seen.step: (seen.epoch, seen.train_loss) for seen in run.evaluations}


def _accuracy_points(run: Run) -> Points:
    seen = ((e.step, e.epoch, e.test_accuracy) for e in run.evaluations)
    return {step: (epoch, 100 * accuracy) for step, epoch, accuracy in seen if accuracy is not None}


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


def _floor(curves: Sequence[Curve]) -> float | None:
    """Below what is seen after a tenth of the run: the first steps would squeeze the rest into a line."""
    length = max((curve.x[-1] for curve in curves), default=0.0)
    if sum(x >= length / 10 for curve in curves[:1] for x in curve.x) < 6:
        return None
    late = [low for curve in curves for x, low in zip(curve.x, curve.low) if x >= length / 10]
    top = max((high for curve in curves for high in curve.high), default=0.0)
    return max(0.0, min(late) - 0.08 * (top - min(late)) - 0.1) if late else None
