"""The curves: losses, accuracy and drift against epochs, bytes and seconds. A new one is a row here.

The rows have their words; what they show is in ``prsgd.report.curves``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prsgd.metrics import METRICS, TRAINING_LOSS, Metric
from prsgd.report import curves
from prsgd.report.chart import Chart
from prsgd.report.figures.base import Figure
from prsgd.report.figures.chart import chart_figure
from prsgd.report.series import Group


def _file(metric: Metric) -> str:
    """Its figure's name: test-accuracy, bits-per-byte."""
    return metric.axis.partition(" (")[0].replace(" ", "-")


FIGURES: tuple[Figure[Sequence[Group], Chart], ...] = (
    chart_figure("training-loss", TRAINING_LOSS.heading, TRAINING_LOSS.caption, curves.training_loss),
    *(
        chart_figure(_file(metric), metric.heading, metric.caption, partial(curves.score, metric))
        for metric in METRICS.values()
    ),
    *(
        chart_figure(
            f"{_file(metric)}-against-{what}",
            f"{metric.axis.capitalize()} against {words}",
            f"{metric.axis.capitalize()} as above, {caption}",
            partial(curves.score_against, metric, what),
        )
        for metric in METRICS.values()
        if not metric.higher_is_better
        for what, words, caption in (
            ("bytes", "bytes sent", "against what each worker had sent by then. Further left is cheaper."),
            ("modelled-seconds", "modelled seconds", "against the time that the modelled cluster would have needed."),
        )
    ),
    chart_figure(
        "loss-against-bytes",
        "Training loss against bytes sent",
        "The training losses, against what each worker had sent by then. Further left is cheaper; both axes are "
        "logarithmic.",
        curves.loss_against_bytes,
    ),
    chart_figure(
        "loss-against-modelled-seconds",
        "Training loss against modelled seconds",
        "The training losses, against the time that the modelled cluster would have needed: computing, waiting for the "
        "slowest, and averaging.",
        curves.loss_against_modelled_seconds,
    ),
    chart_figure(
        "loss-against-seconds",
        "Training loss against seconds",
        "The training losses, against the time that the processes took; each slept until its steps had taken what they "
        "take on the cluster.",
        curves.loss_against_seconds,
    ),
    chart_figure(
        "drift",
        "Drift over time",
        "Drift is how far the workers' models are from each other just before they are averaged: the mean squared "
        "distance from their average. It grows with the period and falls with the lr. "
        "A run's last round may be shorter than the others, and its drift smaller.",
        curves.drift,
    ),
    chart_figure(
        "period",
        "Period over time",
        "How many steps the rounds had. Where a schedule chooses the period, the records hold the reason for each "
        "change.",
        curves.period,
    ),
)
