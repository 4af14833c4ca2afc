"""The methods by name: each is a choice of parts. A new one is a row here; the rest of the package reads the table.

The parts are named through ``prsgd``, which loads them when a row is built: reading the table needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import prsgd
from prsgd._check import one_of, shown

if TYPE_CHECKING:
    from prsgd.averaging.base import Averaging
    from prsgd.averaging.wires.base import Wire
    from prsgd.schedules.base import Schedule


@dataclass(frozen=True)
class Parts:
    """What ``LocalSGD`` is given."""

    schedule: Schedule
    averaging: Averaging
    optimizer_state: str | Mapping[str, int] = "keep"
    fragments: int = 1
    """At most: a model with fewer layers has as many as those, unless the user asked for more."""

    def __str__(self) -> str:
        kept = self.optimizer_state if isinstance(self.optimizer_state, str) else dict(self.optimizer_state)
        state = "" if kept == "keep" else f", optimizer_state={json.dumps(kept)}"
        fragments = "" if self.fragments == 1 else f", fragments={self.fragments}"
        return f"{_typed(self.schedule)} + {_typed(self.averaging)}{state}{fragments}"


@dataclass(frozen=True)
class Settings:
    """What a method is made from; it uses what it needs."""

    period: int = 8
    lr: float = 0.1
    seconds: float = 1.0
    """Of a round by the clock."""
    weights: str = "uniform"
    """How much each worker counts: "uniform", or by its "steps"."""
    seed: int = 0
    num_steps: int | None = None
    """The run's length, in steps of each worker; None where it is not known yet, as when a config is checked."""
    switch: float | None = None
    """Where a method changes from one phase to another: a whole number of steps of each worker, or a fraction of the
    run; None: the method's own."""
    outer_lr: float | None = None
    outer_momentum: float | None = None
    """Of a method whose averages are steps of an outer optimizer; None: the method's own."""

    def outer(self, wire: Wire | None = None, *, lr: float, momentum: float, **how: bool) -> Averaging:
        """An outer optimizer on the mean that travels so, with this lr and momentum unless others are given."""
        return prsgd.outer(
            lr if self.outer_lr is None else self.outer_lr,
            momentum if self.outer_momentum is None else self.outer_momentum,
            of=prsgd.mean(self.weights, wire),
            **how,
        )

    def switch_step(self, usual: float) -> int:
        """The steps before the switch, at ``usual`` unless another is given; 1 for a fraction of an unknown length.

        >>> Settings(num_steps=25).switch_step(0.5), Settings(num_steps=25, switch=7).switch_step(0.5)
        (13, 7)
        """
        wanted = usual if self.switch is None else self.switch
        if isinstance(wanted, float):  # rounded up, as the recipe's drops of the lr are
            return 1 if self.num_steps is None else math.ceil(wanted * self.num_steps)
        if self.num_steps is not None and wanted > self.num_steps:
            raise ValueError(f"switch must be at most the run's {self.num_steps:,} steps, got {shown(wanted)}")
        return wanted


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    words: str
    """What it does, as a sentence for whoever has not heard of it."""
    reference: str
    build: Callable[[Settings], Parts]
    period: int | None = 8
    """Unless another is given; None: it has no period."""
    overlap: int = 0
    """Unless another is given."""
    by_clock: bool = False
    """Does a round last so many seconds?"""
    uneven: bool = False
    """Do workers take different numbers of steps?"""
    keeps_lr: bool = True
    """Is the lr left to the recipe? Else the schedule sets it, below the lr that is given."""
    weighs: bool = True
    """Can workers count by their steps?"""
    switches: bool = False
    """Has it two phases, with a switch that can be given?"""
    is_outer: bool = False
    """Are its averages steps of an outer optimizer, whose lr and momentum can be given?"""
    optimizer: str | None = None
    """The workers', where the method is one of that optimizer alone."""

    def takes(self, option: str) -> bool:
        """Is this option of a run, by its name in a config, of any use to the method?"""
        uses = {"switch": self.switches, **dict.fromkeys(("recipe", "warmup"), self.keeps_lr)}
        return {**uses, **dict.fromkeys(("outer_lr", "outer_momentum"), self.is_outer)}.get(option, True)


SPECIAL = ("switch", "recipe", "warmup", "outer_lr", "outer_momentum")
"""Options of a run that some methods have no use for."""

METHODS = {
    "minibatch-sgd": Method(
        "Parallel mini-batch SGD: the workers average after every step. What the paper compares with.",
        "Dekel et al. 2012",
        lambda given: Parts(prsgd.every(1), prsgd.mean(given.weights)),
        period=None,
    ),
    "pr-sgd": Method(
        "Parallel Restarted SGD, also called local SGD: every worker takes as many steps on its own as the "
        "period says, then all restart from the average of their models (Algorithm 1).",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights)),
    ),
    "pr-sgd-growing": Method(
        "PR-SGD with rounds that grow while the lr falls as N / s^(2/3), at most the lr given (Algorithm 2).",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(prsgd.growing(lr_cap=given.lr), prsgd.mean(given.weights)),
        period=None,
        keeps_lr=False,
    ),
    "pr-sgd-timed": Method(
        "PR-SGD whose rounds last a fixed time, PERIOD steps of the slowest worker: each takes as many steps as fit "
        "(Algorithm 3).",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(prsgd.timed(given.seconds), prsgd.mean(given.weights)),
        by_clock=True,
        uneven=True,
    ),
    "pr-sgd-measured": Method(
        "PR-SGD whose workers take steps in proportion to their measured speed, the slowest PERIOD (Algorithm 3).",
        "Yu, Yang, Zhu 2019",
        lambda given: Parts(prsgd.measured(given.period), prsgd.mean(given.weights)),
        uneven=True,
    ),
    "pr-sgd-momentum": Method(
        "PR-SGD that averages the optimizer's momentum along with the models.",
        "Yu, Jin, Yang 2019",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights), optimizer_state="average"),
    ),
    "pr-sgd-reset": Method(
        "PR-SGD whose workers forget the optimizer's momentum at every average.",
        "Wang, Tantia, Ballas, Rabbat 2020",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights), optimizer_state="reset"),
    ),
    "pr-sgd-auto": Method(
        "PR-SGD whose period chooses itself: as long as the workers' drift costs no more than the noise of their "
        "gradients. It starts at 1, grows as the lr falls, and stays short where the workers' data differ. The "
        "momentum is averaged too.",
        "Theorem 1 of Yu, Yang, Zhu 2019",
        lambda given: Parts(prsgd.auto(), prsgd.mean(given.weights), optimizer_state="average"),
        period=None,
    ),
    "post-local": Method(
        "Post-local SGD: the workers average after every step up to a switch, half of the run unless --switch is given "
        "(where the lr first drops), then every PERIOD steps.",
        "Lin, Stich, Patel, Jaggi 2018",
        lambda given: Parts(prsgd.post_local(given.switch_step(0.5), given.period), prsgd.mean(given.weights)),
        switches=True,
    ),
    "qsr": Method(
        "PR-SGD by the Quadratic Synchronization Rule: a round has (ALPHA / lr)^2 steps, at least PERIOD. ALPHA is the "
        "lr given, so that PERIOD holds until the lr drops; after the drops it is at least 100 and 10,000.",
        "Gu, Lyu, Arora, Zhang, Huang 2024",
        lambda given: Parts(prsgd.quadratic(given.lr, given.period), prsgd.mean(given.weights)),
    ),
    "one-shot": Method(
        "The workers train on their own to the end, and their models are averaged once.",
        "Zinkevich et al. 2010",
        lambda given: Parts(prsgd.once(), prsgd.mean(given.weights)),
        period=None,
    ),
    "d-psgd": Method(
        "Every worker mixes its model with its two neighbours' in a ring, while it computes its gradient.",
        "Lian et al. 2017",
        lambda given: Parts(prsgd.every(given.period), prsgd.gossip("ring")),
        period=1,
        overlap=1,
        weighs=False,
    ),
    "qsgd": Method(
        "What each worker has changed travels in 4 bits a number, rounded at random so that the mean is right.",
        "Alistarh et al. 2017",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights, prsgd.quantized(4, seed=given.seed))),
        period=1,
    ),
    "terngrad": Method(
        "What each worker has changed travels as -1, 0 or 1 times a scale, drawn at random so that the mean is right.",
        "Wen et al. 2017",
        lambda given: Parts(
            prsgd.every(given.period), prsgd.mean(given.weights, prsgd.quantized("ternary", seed=given.seed))
        ),
        period=1,
    ),
    "sign-sgd": Method(
        "Of what each worker has changed only the signs travel; what they leave out is added to the next change.",
        "Karimireddy et al. 2019",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights, prsgd.quantized("sign"))),
        period=1,
    ),
    "top-k": Method(
        "Of what each worker has changed the largest hundredth travels; the rest is added to the next change.",
        "Aji, Heafield 2017",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights, prsgd.sparse(0.01))),
        period=1,
    ),
    "easgd": Method(
        "Elastic averaging: workers keep apart, pulled towards a centre that follows their mean.",
        "Zhang, Choromanska, LeCun 2015",
        lambda given: Parts(prsgd.every(given.period), prsgd.easgd()),
        weighs=False,
    ),
    "slowmo": Method(
        "PR-SGD whose averages are steps of an outer optimizer with slow momentum, in units of the lr.",
        "Wang, Tantia, Ballas, Rabbat 2020",
        lambda given: Parts(
            prsgd.every(given.period), given.outer(lr=1.0, momentum=0.7, nesterov=False, by_inner_lr=True)
        ),
        is_outer=True,
    ),
    "diloco": Method(
        "PR-SGD whose averages are steps of an outer optimizer with Nesterov momentum. As published the workers' own "
        "is AdamW (--optimizer adamw).",
        "Douillard et al. 2023",
        lambda given: Parts(prsgd.every(given.period), given.outer(lr=0.7, momentum=0.9)),
        is_outer=True,
    ),
    "streaming-diloco": Method(
        "DiLoCo whose model travels in 4 fragments (or --fragments), one after the other through the round, so that a "
        "quarter of it travels at once. As published the workers' own optimizer is AdamW (--optimizer adamw).",
        "Douillard et al. 2025",
        lambda given: Parts(prsgd.every(given.period), given.outer(lr=0.7, momentum=0.9), fragments=4),
        is_outer=True,
    ),
    "sparseloco": Method(
        "PR-SGD that sends the largest fiftieth of what each worker has changed, each number in 2 bits; the rest is "
        "added to the next change, which takes the place of DiLoCo's momentum. As published the workers' own optimizer "
        "is AdamW (--optimizer adamw), and what is left out fades with the rounds, which it does not here.",
        "Sarfi et al. 2025",
        lambda given: Parts(prsgd.every(given.period), given.outer(prsgd.sparse(0.02, bits=2), lr=1.0, momentum=0.0)),
        is_outer=True,
    ),
    "local-adamw": Method(
        "Local AdamW: every worker takes PERIOD steps of AdamW on its own, then all restart from the average of their "
        "models, and each keeps its own moments.",
        "PR-SGD with AdamW; Douillard et al. 2023 compare with it",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights)),
        optimizer="adamw",
    ),
    "local-adamw-averaged": Method(
        "Local AdamW that averages both moments along with the models: three times the bytes.",
        "PR-SGD with AdamW",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights), optimizer_state="average"),
        optimizer="adamw",
    ),
    "local-adamw-reset": Method(
        "Local AdamW whose workers forget both moments at every average.",
        "PR-SGD with AdamW",
        lambda given: Parts(prsgd.every(given.period), prsgd.mean(given.weights), optimizer_state="reset"),
        optimizer="adamw",
    ),
    "des-loc": Method(
        "Local AdamW that averages the models every PERIOD steps, the first moments every third time and the second "
        "moments every sixth: half of the bytes that averaging all of them would take.",
        "Iacob et al. 2025",
        lambda given: Parts(
            prsgd.every(given.period), prsgd.mean(given.weights), optimizer_state={"exp_avg": 3, "exp_avg_sq": 6}
        ),
        optimizer="adamw",
    ),
}


def of_optimizer(optimizer: str) -> list[str]:
    """The methods that go with this optimizer of the workers: "all" of them, in a comparison.

    >>> "local-adamw" in of_optimizer("sgd"), "pr-sgd" in of_optimizer("adamw")
    (False, True)
    """
    return [name for name, method in METHODS.items() if method.optimizer in (None, optimizer)]


def find(name: str) -> Method:
    """The method of this name.

    >>> print(find("slowmo").build(Settings(period=8)))
    every(8) + outer(lr=1.0, momentum=0.7, nesterov=False, by_inner_lr=True)
    """
    return METHODS[one_of("method", name, METHODS, listed_by="prsgd methods")]


def label(
    method: str, *, period: int | None, seconds: float | None, overlap: int | str | None, fragments: int | None = None
) -> str:
    """What tells a run from others: the method, its period if it has one, fragments and an overlap that were given.

    >>> label("pr-sgd", period=8, seconds=None, overlap=1), label("d-psgd", period=1, seconds=None, overlap=1)
    ('pr-sgd period 8 overlap 1', 'd-psgd')
    """
    own = METHODS.get(method)  # a report may be of runs of another version
    name = method
    if period is not None and (own is None or not period == own.period == 1):
        name += f" period {period}"
    elif period is None and seconds is not None:
        name += f" {seconds:g} s"
    if fragments is not None:
        name += f" fragments {fragments}"
    return name if overlap == (own.overlap if own is not None else 0) else f"{name} overlap {overlap}"


def _typed(part: Any) -> str:
    """A part as one would type it, without what is seldom given."""
    words = []
    for f in fields(part):
        value, default = getattr(part, f.name), f.default if f.default_factory is MISSING else f.default_factory()
        if not f.repr or (value == default and (value is None or f.name in ("weights", "seed", "way", "of"))):
            continue
        word = _typed(value) if is_dataclass(value) else repr(value)
        words.append(word if default is MISSING else f"{f.name}={word}")
    return f"{type(part).__name__}({', '.join(words)})"
