"""One random run, as a value: what a seed stands for, and what is legal."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch

import prsgd
from prsgd.core.hiding import Hiding
from prsgd.schedules.base import Now

NAN_PLACES = ("parameters", "gradient", "after", "buffers", "infinite")
"""Before the update, in the gradient alone, between this batch and what comes next, in the model's floating buffers
alone; infinities in the parameters before the update. "huge" numbers too, which are finite, with steady()."""
_NAMES: dict[str, Any] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    **{name: getattr(prsgd, name) for name in prsgd.__all__},
}


CLAMPING = ("growing", "post_local", "quadratic", "auto")
"""Schedules that lower the overlap to the length of a round."""


@dataclass(frozen=True)
class Scenario:
    """What the workers do. Batches are counted from 1 for each worker, ticks are steps of the one-process fleet."""

    averaging: str = "mean()"
    schedule: str = "every(2)"
    batches: tuple[int, ...] = (6, 6)
    """Of each worker: its data."""
    overlap: int = 0
    transfers: tuple[float, ...] = ()
    """In steps, what averages take one after another by a clock that is the same everywhere: the overlap, at first 1,
    is chosen by them."""
    optimizer: str = "sgd"
    """"sgd", "momentum", "adam", or "two": momentum for the matrices and adam for the rest, one after the other."""
    weight_decay: float = 0.0
    optimizer_state: str | Mapping[str, int] = "keep"
    warmup: int = 0
    """The lr rises from 0 over so many batches."""
    fragments: int = 1
    model: str = "mlp"
    form: str = "model"
    """What a rank trains: a plain "model", or a "fleet" over TorchDistributed."""
    ranks: int = 2
    shape: str = "all-reduce"
    looks: tuple[tuple[int, str], ...] = ()
    """(tick, "before" or "after" those that are out of data leave): consensus(), where all may call it."""
    nans: tuple[tuple[int, int, str], ...] = ()
    """(worker, batch, one of NAN_PLACES)"""
    skips: tuple[tuple[int, int], ...] = ()
    """(worker, batch): no step, as when GradScaler finds an infinity."""
    log: str = "before"
    """the step, "after" it, or "never" """
    resume_at: int = 0
    """The run is saved and made anew after this tick; 0: never."""

    @property
    def num_workers(self) -> int:
        return len(self.batches)

    @property
    def weighted(self) -> bool:
        """Do workers count by their steps or samples, or by their changes, as before the first average of steady()?"""
        return any(word in self.averaging for word in ("steps", "samples", "steady"))

    @property
    def lr(self) -> float:
        """What the first optimizer begins with."""
        return 0.02 if self.optimizer == "adam" else 0.2

    def overlaps(self) -> Iterator[int]:
        """Of the rounds, before they are cut to a round's length."""
        hiding, heard = Hiding(), bool(self.transfers) and not self.averaging.startswith("gossip")
        for round in itertools.count(1):
            if heard and round > 2:  # the average before that has brought what the one before it took
                hiding.hear([self.transfers[(round - 3) % len(self.transfers)]], [1.0])
            yield hiding.overlap if heard else self.overlap

    def closings(self, worker: int) -> list[int]:
        """The worker's steps after which its rounds close, if it takes every step.

        Those of ``auto()`` are not known before. All workers have the same, so it is enough to tell steps apart.
        """
        if self.schedule.startswith("auto"):
            return list(range(1, 40))
        found, opened = [], 0
        closed = [0] * self.fragments
        for round, overlap in zip(range(1, 40), self.overlaps()):
            now = Now(worker=worker, num_workers=self.num_workers, round=round, step=opened, lr=self.lr, last=None)
            steps = made(self.schedule).open(now).steps
            if steps is None:
                break
            most = max(1, steps // self.fragments)  # of the overlap: one fragment is under way at a time
            for k in range(self.fragments):
                end = opened + -(-steps * (k + 1) // self.fragments)
                found.append(max(closed[k], end - min(overlap, most)))
                closed[k] = end
            opened += steps
        return sorted(found)

    def __repr__(self) -> str:
        """The fields that are not the defaults: it can be pasted into ``--scenario``."""
        shown = (
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.default is MISSING or getattr(self, f.name) != f.default
        )
        return f"Scenario({', '.join(shown)})"


def made(expression: str) -> Any:
    """A schedule or an averaging from its text."""
    return eval(expression, {"__builtins__": {}}, _NAMES)


def read(text: str) -> Scenario:
    """Back from a scenario's repr."""
    found = eval(text, {"__builtins__": {}}, {"Scenario": Scenario})
    assert isinstance(found, Scenario)
    return found


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    dice = random.Random(seed)
    num_workers, ranks, form = dice.choices(
        [(2, 2, "model"), (2, 2, "fleet"), (3, 2, "fleet"), (3, 3, "model"), (3, 3, "fleet")], [8, 5, 3, 1, 1]
    )[0]
    averaging = _averaging(dice, num_workers)
    gossips = averaging.startswith("gossip")
    known = not any(word in averaging for word in ("gossip", "quantized", "sparse", "float16"))
    schedule, smallest = _schedule(dice, num_workers, same=gossips, drift_is_known=known)
    overlap = dice.choice([d for d in (0, 0, 1, 2) if d <= smallest or schedule.startswith(CLAMPING)])
    if gossips or dice.random() < 0.35:
        batches = (dice.randint(0 if dice.random() < 0.1 else 2, 9),) * num_workers
    else:
        batches = tuple(dice.randint(0, 9) for _ in range(num_workers))
    states, gathers = ["keep", "keep", "reset"], any(word in averaging for word in ("gossip", "quantized", "sparse"))
    if overlap < 2 and not gathers:
        states.append("average")
    by_samples = "samples" in averaging
    found = Scenario(
        averaging=averaging,
        schedule=schedule,
        batches=batches,
        overlap=overlap,
        optimizer=dice.choice(["sgd", "momentum", "momentum", "adam", "two"]),
        weight_decay=dice.choice([0.0, 0.01]),
        optimizer_state=dice.choice(states),
        model=dice.choice(["mlp", "batchnorm", "batchnorm", "dropout" if form == "fleet" else "mlp", "tracker"]),
        form=form,
        ranks=ranks,
        shape="parameter-server" if not gathers and dice.random() < 0.15 else "all-reduce",
        log="before" if by_samples else dice.choice(["before", "before", "after", "never"]),
    )
    last = max(batches)
    if last and dice.random() < 0.5:
        ticks = sorted(dice.randint(0, last) for _ in range(dice.randint(1, 3)))
        found = replace(found, looks=tuple((t, dice.choice(["before", "after"])) for t in ticks))
    fed = [w for w in range(num_workers) if batches[w]]
    if fed and dice.random() < 0.4:
        found = replace(found, nans=_nans(dice, found, fed))
        if any(place == "buffers" for *_, place in found.nans) and found.model not in ("batchnorm", "tracker"):
            found = replace(found, model="batchnorm")
    if fed and not gossips and dice.random() < 0.2:
        worker = dice.choice(fed)
        found = replace(found, skips=((worker, dice.randint(1, batches[worker])),))
    if (found.skips or "per_worker" in schedule) and not overlap:
        # A fleet's worker that waits for one that is late has its model looked at when all have closed, not before.
        found = replace(found, nans=tuple(nan for nan in found.nans if nan[-1] != "after"))
    if found.log == "after" and overlap >= smallest and (found.nans or found.skips or "every" not in schedule):
        # A round's last loss leaves with the next average, unless workers of the fleet wait for others to launch it.
        found = replace(found, log="before")
    # The fleet has one lr for all, by tick: with a warm-up, ticks must be everybody's batches.
    if (
        not found.skips
        and not found.nans
        and schedule.startswith(("every", "once", "post_local", "auto"))
        and (dice.random() < (0.7 if "by_inner_lr" in averaging else 0.2))
    ):
        found = replace(found, warmup=dice.choice([2, 5]))
    if last > 1 and dice.random() < 0.6:
        found = replace(found, resume_at=dice.randint(1, last))
    if overlap and not found.nans and found.optimizer_state != "average" and dice.random() < 0.4:
        transfers = tuple(dice.choice([0.5, 1.5, 2.5, 9.0]) for _ in range(dice.randint(1, 4)))
        log = "before" if found.log == "after" else found.log  # as above: an overlap may be as long as a round
        batches = tuple(n and n + 6 for n in batches)  # so many that the overlap may change
        found = replace(found, batches=batches, transfers=transfers, overlap=1, log=log)
    if not gossips and known == (not gathers) and dice.random() < 0.1:
        averaging = dice.choice(STEADY_WIRED if gathers else STEADY)
        huge = "steady" in averaging and dice.random() < 0.7
        nans = tuple(
            (w, b, "huge" if huge and place in ("parameters", "infinite") else place) for w, b, place in found.nans
        )
        found = replace(found, averaging=averaging, nans=nans)
    if not found.transfers and not schedule.startswith("auto") and not gossips and dice.random() < 0.12:
        fragments = 3 if found.model == "batchnorm" and dice.random() < 0.5 else 2
        if found.overlap * fragments <= smallest or schedule.startswith(CLAMPING):
            found = replace(found, fragments=fragments)
    if found.optimizer_state == "average" and found.optimizer in PERIODS and not schedule.startswith("auto"):
        found = replace(found, optimizer_state=PERIODS[found.optimizer] if dice.random() < 0.5 else "average")
    return found


PERIODS = {
    "momentum": {"momentum_buffer": 2},
    "adam": {"exp_avg": 2, "exp_avg_sq": 3},
    "two": {"exp_avg_sq": 2, "momentum_buffer": 3},
}
"""Of optimizer state that is averaged more rarely than the models."""


STEADY = (
    "mean(steady())",
    "mean(steady(of='steps'))",
    "mean(clip=0.05)",
    "mean(steady(penalty=1.0), clip=0.1)",
    "outer(of=mean(steady(), clip=0.1))",
)
STEADY_WIRED = (
    "mean(steady(), quantized(4, bucket=16))",
    "mean(steady(), sparse(0.2), clip=0.1)",
    "mean(wire=quantized('sign', bucket=8), clip=0.05)",
)
"""Drawn last, in the place of others, so that the other seeds stay what they are."""


def _averaging(dice: random.Random, num_workers: int) -> str:
    return dice.choice(
        [
            "mean()",
            "mean()",
            "mean('steps')",
            "mean('samples')",
            "mean(dtype=bfloat16)",
            dice.choice(["mean('steps', dtype=bfloat16)", "mean(dtype=float16)"]),
            "outer()",
            dice.choice(["outer(1.0, 0.0)", "outer(0.5, 0.5, nesterov=False)", "outer(of=mean('steps'))"]),
            "outer(1.0, 0.7, nesterov=False, by_inner_lr=True)",
            "easgd()",
            "easgd(alpha=0.3, beta=0.5)",
            "gossip('complete')",
            f"gossip('{'ring' if num_workers > 2 else 'complete'}')",
            "quantized(4, bucket=16)",
            "quantized('ternary', bucket=8)",
            "quantized('sign', bucket=16)",
            dice.choice(["quantized(1, bucket=16)", "mean('steps', quantized('sign', bucket=16))"]),
            f"sparse({dice.choice(['0.1', '0.2, bits=2', '0.5'])})",
            "outer(of=mean(wire=quantized(4, bucket=16)))",
            dice.choice(["quantized(4, bucket=8, way='scatter')", "quantized('ternary', bucket=16, way='scatter')"]),
            "mean('steps', quantized('sign', bucket=8, way='scatter'))",
            "outer(0.5, 0.5, of=mean('samples', sparse(0.2)))",
        ]
    )


def _schedule(dice: random.Random, num_workers: int, *, same: bool, drift_is_known: bool) -> tuple[str, int]:
    """A schedule, and its shortest round."""
    weights = {"every": 10, "per_worker": 0 if same else 4, "growing": 2, "once": 1, "post_local": 2, "quadratic": 1}
    weights["auto"] = 4 if drift_is_known else 0
    kind = dice.choices(list(weights), list(weights.values()))[0]
    if kind == "every":
        period = dice.randint(1, 4)
        return f"every({period})", period
    if kind == "per_worker":
        periods = [dice.randint(1, 4) for _ in range(num_workers)]
        return f"per_worker({periods})", min(periods)
    if kind == "post_local":
        return f"post_local({dice.randint(1, 4)}, {dice.randint(2, 4)})", 1
    if kind == "auto":
        return f"auto(tolerance={dice.choice([2.0, 100.0])})", 1  # hardly ever, or mostly longer than a step
    if kind == "quadratic":
        return "quadratic(0.04, 2)", 2  # rounds of 2 steps, and of 4 at adam's lr
    return ("growing(lr_cap=0.1)", 1) if kind == "growing" else ("once()", 2)


def _nans(dice: random.Random, scenario: Scenario, fed: Sequence[int]) -> tuple[tuple[int, int, str], ...]:
    """In one worker or two, often in the last batch."""
    found = []
    for _ in range(dice.choice([1, 1, 1, 2])):
        worker = dice.choice(fed)
        last = scenario.batches[worker]
        batch = last if dice.random() < 0.3 else dice.randint(1, last)
        found.append((worker, batch, dice.choice(NAN_PLACES)))
    return tuple(sorted(set(found)))


def simpler(s: Scenario) -> Iterator[Scenario]:
    """The scenario with one thing less, in many ways; some may not be legal."""
    plain = Scenario()
    for name in ("looks", "nans", "skips"):
        if len(getattr(s, name)) > 1:
            yield _with(s, name, ())
        for k in range(len(getattr(s, name))):
            yield _with(s, name, getattr(s, name)[:k] + getattr(s, name)[k + 1 :])
    if s.num_workers > 2 and s.ranks == 2:
        yield from (_without(s, w) for w in range(s.num_workers))
    for name in (
        "fragments",
        "resume_at",
        "shape",
        "optimizer_state",
        "optimizer",
        "weight_decay",
        "warmup",
        "model",
        "log",
    ):
        if getattr(s, name) != getattr(plain, name) and not (name == "log" and "samples" in s.averaging):
            yield _with(s, name, getattr(plain, name))
    if s.form == "fleet" and s.model != "dropout" and s.num_workers == s.ranks:
        yield replace(s, form="model")
    if s.averaging != "mean()":
        yield replace(s, averaging="mean()")
    if s.transfers:
        yield replace(s, transfers=())
        yield replace(s, transfers=s.transfers[:-1]) if len(s.transfers) > 1 else replace(s, transfers=(0.5,))
    elif s.overlap:
        yield replace(s, overlap=s.overlap - 1)
    for period in (1, 2, 3):
        if s.overlap <= period and s.schedule != f"every({period})" and s.schedule not in ("every(1)", "every(2)"):
            yield replace(s, schedule=f"every({period})")
    for k, (worker, batch, place) in enumerate(s.nans):
        if batch > 1:
            yield replace(s, nans=(*s.nans[:k], (worker, batch - 1, place), *s.nans[k + 1 :]))
        if place != "after":
            yield replace(s, nans=(*s.nans[:k], (worker, batch, "after"), *s.nans[k + 1 :]))
    if s.averaging.startswith("gossip"):
        if s.batches[0] > 1:
            yield replace(s, batches=tuple(n - 1 for n in s.batches))
        return
    for w, n in enumerate(s.batches):
        if n:
            yield replace(s, batches=(*s.batches[:w], n - 1, *s.batches[w + 1 :]))


def _with(s: Scenario, name: str, value: Any) -> Scenario:
    fields: dict[str, Any] = {name: value}
    return replace(s, **fields)


def _without(s: Scenario, worker: int) -> Scenario:
    def renamed(w: int) -> int:
        return w - (w > worker)

    schedule = s.schedule
    if schedule.startswith("per_worker"):
        periods = list(made(schedule).periods)
        schedule = f"per_worker({periods[:worker] + periods[worker + 1 :]})"
    return replace(
        s,
        schedule=schedule,
        batches=s.batches[:worker] + s.batches[worker + 1 :],
        nans=tuple((renamed(w), b, place) for w, b, place in s.nans if w != worker),
        skips=tuple((renamed(w), b) for w, b in s.skips if w != worker),
    )
