"""The methods by name: each is a choice of parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prsgd._check import one_of
from prsgd.averaging.base import Averaging
from prsgd.averaging.mean import mean
from prsgd.schedules import Schedule, every, growing, once


@dataclass(frozen=True)
class Parts:
    """What ``LocalSGD`` is given."""

    schedule: Schedule
    averaging: Averaging
    optimizer_state: str = "keep"


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    summary: str
    reference: str
    build: Callable[[int, float], Parts]
    """From the period and the lr; what is not used has a name with _ in front."""
    has_period: bool = True
    keeps_lr: bool = True
    """Is the lr left to the recipe? Else the schedule sets it, below the lr that is given."""


METHODS = {
    "minibatch-sgd": Method(
        "average after every step: parallel mini-batch SGD",
        "Dekel et al. 2012",
        lambda _period, _lr: Parts(every(1), mean()),
        has_period=False,
    ),
    "pr-sgd": Method(
        "average every PERIOD steps: Algorithm 1",
        "Yu, Yang, Zhu 2019",
        lambda period, _lr: Parts(every(period), mean()),
    ),
    "pr-sgd-growing": Method(
        "rounds that grow while the lr falls as N / s^(2/3), at most LR: Algorithm 2",
        "Yu, Yang, Zhu 2019",
        lambda _period, lr: Parts(growing(lr_cap=lr), mean()),
        has_period=False,
        keeps_lr=False,
    ),
    "pr-sgd-momentum": Method(
        "pr-sgd that averages the momentum too",
        "Yu, Jin, Yang 2019",
        lambda period, _lr: Parts(every(period), mean(), optimizer_state="average"),
    ),
    "one-shot": Method(
        "average once, when the run ends",
        "Zinkevich et al. 2010",
        lambda _period, _lr: Parts(once(), mean()),
        has_period=False,
    ),
}


def find(name: str) -> Method:
    """The method of this name.

    >>> find("pr-sgd").build(8, 0.1).schedule
    every(period=8)
    """
    return METHODS[one_of("method", name, METHODS)]
