"""The curves: losses, accuracy and drift against epochs, bytes and seconds. A new one is a row here.

The rows have their words; what they show is in ``prsgd.report.curves``.
"""

from __future__ import annotations

from collections.abc import Sequence

from prsgd.report import curves
from prsgd.report.chart import Chart
from prsgd.report.figures.base import Figure
from prsgd.report.figures.chart import chart_figure
from prsgd.report.series import Group

FIGURES: tuple[Figure[Sequence[Group], Chart], ...] = (
    chart_figure(
        "training-loss",
        "Training loss against epochs",
        "As Figure 3 of the paper (Yu, Yang, Zhu 2019). The loss is that of the consensus, the average of all "
        "workers' models; lower is better. Lines that lie on each other mean that averaging less often cost nothing.",
        curves.training_loss,
    ),
    chart_figure(
        "test-accuracy",
        "Test accuracy against epochs",
        "As Figure 4 of the paper (Yu, Yang, Zhu 2019). The share of the test samples, which nobody trained on, that "
        "the consensus gets right; higher is better.",
        curves.test_accuracy,
    ),
    chart_figure(
        "loss-against-bytes",
        "Training loss against bytes sent",
        "The same losses, against what each worker had sent by then. Further left is cheaper; both axes are "
        "logarithmic.",
        curves.loss_against_bytes,
    ),
    chart_figure(
        "loss-against-modelled-seconds",
        "Training loss against modelled seconds",
        "The same losses, against the time that the modelled cluster would have needed: computing, waiting for the "
        "slowest, and averaging.",
        curves.loss_against_modelled_seconds,
    ),
    chart_figure(
        "loss-against-seconds",
        "Training loss against seconds",
        "The same losses, against the time that the processes took; each slept until its steps had taken what they "
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
