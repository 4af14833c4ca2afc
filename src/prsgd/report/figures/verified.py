"""The figures of ``prsgd verify``: what the paper proves, beside what was measured. A new one is a row here."""

from __future__ import annotations

from collections.abc import Sequence

from prsgd.report.chart import Chart, Curve
from prsgd.report.figures.base import Figure
from prsgd.report.figures.chart import chart_figure
from prsgd.theory.verify import (
    EPSILON,
    FIXED_STEPS,
    Effort,
    by_workers,
    excess_losses,
    horizon,
    is_covered,
    largest_drifts,
)

_PERIODS = (1, 4, 16, 64)


def speedup(effort: Effort) -> Chart:
    """What share of a linear speed-up N workers reach, for several periods."""
    workers = tuple(effort.speedup_workers)
    alone = horizon(1, 1, effort.speedup_seeds, 0)
    curves, rings = [], []
    for style, period in enumerate(_PERIODS):
        shares = [100 * alone / (n * horizon(n, period, effort.speedup_seeds, 0)) for n in workers]
        curves.append(_line(f"period {period}", style, workers, shares))
        rings += [(float(n), share) for n, share in zip(workers, shares) if is_covered(n, period, effort)]
    title, y_label = "Share of a linear speed-up", "speed-up / workers (%)"
    return Chart(
        title=title, x_label="workers", y_label=y_label, log_x=True, floor=0.0, curves=tuple(curves), rings=tuple(rings)
    )


def one_shot(effort: Effort) -> Chart:
    """What a run of fixed length reaches with more workers, averaged often or once."""
    workers = tuple(effort.speedup_workers)
    named = {"once, at the end": None, "period 1": 1, "period 16": 16}
    curves = tuple(
        _line(name, style, workers, [by_workers(n, period, effort.speedup_seeds) for n in workers])
        for (name, period), style in zip(named.items(), (1, 0, 2))
    )
    title = f"Mean squared gradient of {FIXED_STEPS} steps"
    return _log_log(title, "workers", "mean squared gradient", curves)


def two_wells(effort: Effort) -> Chart:
    """The loss at the end against the period, where workers can part."""
    found = excess_losses(effort.seeds, effort.steps)
    places = [effort.steps if period is None else period for period in found]
    curve = _line("8 workers", 0, places, list(found.values()))
    alone = _line("one worker alone", 6, [1, effort.steps], [1.0, 1.0])
    title, y_label = "Two wells a coordinate", "excess loss (one alone: 1)"
    return _log_log(title, "period", y_label, (curve, alone))


def drift(effort: Effort) -> Chart:
    """The largest drift against the period, for several overlaps."""
    found = largest_drifts(effort.seeds)
    curves = []
    for style, overlap in enumerate(sorted({overlap for _, overlap in found})):
        points = [
            (period, drift / bound) for (period, d), (drift, bound) in found.items() if d == overlap and bound > 0
        ]
        curves.append(_line(f"overlap {overlap}", style, *zip(*points)))
    return _log_log("Largest drift, in Lemma 1's bound", "period", "share", tuple(curves))


def communication(effort: Effort) -> Chart:
    """The averages that are needed against the period."""
    rounds = [horizon(8, period, effort.speedup_seeds, 0) / period for period in _PERIODS]
    curves = (
        _line("8 workers", 0, _PERIODS, rounds),
        _line("as many steps as period 1", 2, _PERIODS, [rounds[0] / period for period in _PERIODS]),
    )
    return _log_log("Averages to the same quality", "period", "rounds", curves)


def _log_log(title: str, x_label: str, y_label: str, curves: tuple[Curve, ...]) -> Chart:
    return Chart(title=title, x_label=x_label, y_label=y_label, log_x=True, log_y=True, curves=curves)


def _line(name: str, style: int, x: Sequence[float], y: Sequence[float]) -> Curve:
    values = tuple(map(float, y))
    return Curve(name, style, tuple(map(float, x)), values, values, values)


FIGURES: tuple[Figure[Effort, Chart], ...] = (
    chart_figure(
        "speedup",
        "Linear speed-up",
        f"T is how long a run must be for its mean squared gradient to come down to {EPSILON}, with the lr that "
        "Corollary 1 gives for that T. The speed-up of N workers is T of one worker in T of N; 100 % means that twice "
        "the workers need half the steps. A ring marks a run whose period Corollary 1 covers: the rarer the averages, "
        "the fewer the workers that they serve.",
        speedup,
    ),
    chart_figure(
        "one-shot",
        "Why one average at the end is not enough",
        f"Runs of {FIXED_STEPS} steps with Corollary 1's lr for so many. With averages on the way, more workers make "
        "the gradient at the consensus smaller; without any, larger.",
        one_shot,
    ),
    chart_figure(
        "two-wells",
        "Workers that end in different wells",
        "The loss above the best that there is, in a single worker's, on a function with two wells in each coordinate "
        "and the start between them. Workers that are averaged often go down together; the mean of models that went "
        "down different sides lies on the ridge. The last point of the curve is averaged once, at the end.",
        two_wells,
    ),
    chart_figure(
        "drift",
        "The drift beside Lemma 1's bound",
        "The largest drift of a run in its bound, 4 lr² (I + d - 1)² G². The bound takes all gradients of a round to "
        "point the same way, so it is the looser the longer the rounds are.",
        drift,
    ),
    chart_figure(
        "communication",
        "Rounds to the same quality",
        f"How many averages 8 workers need for a mean squared gradient of {EPSILON}. The dotted line is what they "
        "would need if rarer averages cost no steps.",
        communication,
    ),
)
