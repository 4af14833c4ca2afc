"""The methods by name: each is a choice of parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prsgd._check import one_of
from prsgd.averaging.base import Averaging
from prsgd.averaging.elastic import elastic
from prsgd.averaging.mean import mean
from prsgd.averaging.outer import outer
from prsgd.schedules import Schedule, every, growing, measured, once, timed


@dataclass(frozen=True)
class Parts:
    """What ``LocalSGD`` is given."""

    schedule: Schedule
    averaging: Averaging
    optimizer_state: str = "keep"


@dataclass(frozen=True)
class Settings:
    """What a method is made from; it uses what it needs."""

    period: int
    lr: float
    seconds: float
    """Of a round by the clock."""
    weights: str
    """How much each worker counts: "uniform", or by its "steps"."""


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    summary: str
    reference: str
    build: Callable[[Settings], Parts]
    has_period: bool = True
    by_clock: bool = False
    """Does a round last so many seconds?"""
    uneven: bool = False
    """Do workers take different numbers of steps?"""
    keeps_lr: bool = True
    """Is the lr left to the recipe? Else the schedule sets it, below the lr that is given."""


METHODS = {
    "minibatch-sgd": Method(
        "average after every step: parallel mini-batch SGD",
        "Dekel et al. 2012",
        lambda given: Parts(every(1), mean(given.weights)),
        has_period=False,
    ),
    "pr-sgd": Method(
        "average every PERIOD steps: Algorithm 1",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(every(given.period), mean(given.weights)),
    ),
    "pr-sgd-growing": Method(
        "rounds that grow while the lr falls as N / s^(2/3), at most LR: Algorithm 2",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(growing(lr_cap=given.lr), mean(given.weights)),
        has_period=False,
        keeps_lr=False,
    ),
    "pr-sgd-timed": Method(
        "as many steps as fit into a fixed time, in which the slowest takes PERIOD: Algorithm 3",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(timed(given.seconds), mean(given.weights)),
        by_clock=True,
        uneven=True,
    ),
    "pr-sgd-measured": Method(
        "PERIOD steps for the slowest worker, the others more by their measured speed: Algorithm 3",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(measured(given.period), mean(given.weights)),
        uneven=True,
    ),
    "pr-sgd-momentum": Method(
        "pr-sgd that averages the momentum too",
        "Yu, Jin, Yang 2019",
        lambda given: Parts(every(given.period), mean(given.weights), optimizer_state="average"),
    ),
    "easgd": Method(
        "workers pulled towards a centre variable, beta 0.9, alpha 0.9 / N",
        "Zhang, Choromanska, LeCun 2015",
        lambda given: Parts(every(given.period), elastic()),
    ),
    "slowmo": Method(
        "pr-sgd with slow momentum: 0.7 over the rounds, in units of the lr",
        "Wang, Tantia, Ballas, Rabbat 2020",
        lambda given: Parts(
            every(given.period),
            outer(lr=1.0, momentum=0.7, nesterov=False, by_inner_lr=True, weights=given.weights),
        ),
    ),
    "diloco": Method(
        "pr-sgd with an outer optimizer: Nesterov momentum 0.9, lr 0.7",
        "Douillard et al. 2023",
        lambda given: Parts(every(given.period), outer(weights=given.weights)),
    ),
    "one-shot": Method(
        "average once, when the run ends",
        "Zinkevich et al. 2010",
        lambda given: Parts(once(), mean(given.weights)),
        has_period=False,
    ),
}


def find(name: str) -> Method:
    """The method of this name.

    >>> find("pr-sgd").build(Settings(period=8, lr=0.1, seconds=1.0, weights="uniform")).schedule
    every(period=8)
    """
    return METHODS[one_of("method", name, METHODS)]
