"""Runs that differ by their seed only, as one group, and a row of the table for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from prsgd import tasks
from prsgd._check import one_of
from prsgd.lab.methods import METHODS
from prsgd.metrics import TRAINING_LOSS
from prsgd.report.read import Run

_TELLING = (
    "model", "workers", "epochs", "steps", "batch_size", "lr", "momentum", "weight_decay", "split", "task_sha256",
    "data_sha256",
    "processes", "cluster", "weights", "switch", "fragments", "outer_lr", "outer_momentum", "optimizer", "recipe",
    "warmup", "clip", "accumulate",
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """The runs of one label, in order of their seeds."""

    label: str
    name: str
    """The label without what all groups share."""
    runs: tuple[Run, ...]
    is_baseline: bool = False
    """Was it named as what the others are measured by?"""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.config["seed"] for run in self.runs)

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs whose numbers stand for the group: those that are finished, or all that began if none is."""
        finished = tuple(run for run in self.runs if run.finished)
        return finished or tuple(run for run in self.runs if run.last is not None and not run.diverged)

    @property
    def finished(self) -> bool:
        """Is there a run to compare?"""
        return any(run.finished for run in self.runs)

    @property
    def state(self) -> str:
        """What a reader must know before trusting its numbers; empty when all is well."""
        diverged = sum(run.diverged for run in self.runs)
        missing = sum(not run.finished for run in self.runs) - diverged
        several = len(self.runs) > 1
        words = []
        if diverged:
            words.append(f"{diverged} of {len(self.runs)} seeds diverged" if several else "diverged")
        if missing:
            epochs = [run.last.epoch if run.last is not None else 0.0 for run in self.runs if not run.finished]
            planned = self.runs[0].planned_epochs
            where = f"epoch {max(epochs):.4g}" + ("" if planned is None else f" of {planned:.4g}")
            words.append(f"{missing} of {len(self.runs)} seeds unfinished" if several else f"unfinished, {where}")
        return ", ".join(words)


@dataclass(frozen=True)
class Measured:
    """Mean over the seeds, and their standard deviation if there are two or more."""

    mean: float
    spread: float | None
    seeds: int

    @property
    def squared_error(self) -> float:
        """Of the mean; 0 if unknown."""
        return 0.0 if self.spread is None else self.spread**2 / self.seeds


@dataclass(frozen=True)
class Row:
    """A line of the table. The score as people read the metric (an accuracy in percent), the drift squared."""

    label: str
    name: str
    state: str
    seeds: int
    train_loss: Measured | None
    test_score: Measured | None
    """None where the task has no metric."""
    rounds: float | None
    megabytes: float | None
    """Sent by each worker."""
    share: float | None
    """Of the bytes that the baseline sent; None while one of the two is unfinished."""
    drift: float | None
    seconds: float | None
    modelled_seconds: float | None = None
    metric: str = TRAINING_LOSS.name
    """What it is judged by; the training loss where the task has no metric."""

    @property
    def score(self) -> Measured | None:
        """By that; None while there is none."""
        return self.train_loss if self.test_score is None else self.test_score


def group(runs: Sequence[Run], *, baseline: str | None = None) -> list[Group]:
    """By label, ordered by method, period and overlap. Runs that differ in more than that say so in their labels.

    ``baseline`` is the label, or the name, of the group that the others are measured by.
    """
    trained = sorted({tasks.short(str(run.config["task"])) for run in runs})
    if len(trained) > 1:
        raise ValueError(f"runs must be of one task to be compared, got {', '.join(trained)}")
    telling = differing(runs)
    found: dict[tuple[object, ...], list[Run]] = {}
    for run in sorted(runs, key=order):
        extra = tuple(run.config.get(key) for key in telling)
        found.setdefault((run.label, *extra), []).append(run)
    same_method = len({run.config["method"] for run in runs}) == 1 and all(run.config.get("period") for run in runs)
    groups = []
    for (label, *rest), members in found.items():
        _refuse_twins(members)
        more = _apart(telling, rest)
        short = str(label).partition(" ")[2] if same_method else str(label)
        short = short or f"period {members[0].config['period']}"
        groups.append(Group(f"{label}{more}", short + more, tuple(members)))
    return groups if baseline is None else _measured_by(groups, baseline)


def _measured_by(groups: list[Group], name: str) -> list[Group]:
    by_name = {group.name: group.label for group in groups}
    label = one_of("baseline", by_name.get(name, name), [group.label for group in groups])
    marked = [replace(group, is_baseline=group.label == label) for group in groups]
    for group in marked:
        if group.is_baseline and not group.finished:
            raise ValueError(f"baseline must be finished, {label} is {group.state}")
    return marked


def names(runs: Sequence[Run]) -> list[str]:
    """Of runs one by one, in their order: the label, what sets them apart, and the seed if there are several."""
    telling = differing(runs)
    if len({run.config["seed"] for run in runs}) > 1:
        telling.append("seed")
    return [run.label + _apart(telling, [run.config.get(key) for key in telling]) for run in runs]


def _apart(keys: Sequence[str], values: Sequence[object]) -> str:
    """
    >>> _apart(["batch_size", "steps"], [8, None])
    ', batch size 8'
    """
    return "".join(f", {key.replace('_', ' ')} {value}" for key, value in zip(keys, values) if value is not None)


def differing(runs: Iterable[Run]) -> list[str]:
    """What sets these runs apart beside method, period, overlap and seed. An option that a method has no use for is
    no difference from those that have it."""
    found = list(runs)
    return [key for key in _TELLING if len({run.config.get(key) for run in found if _takes(run, key)}) > 1]


def _takes(run: Run, key: str) -> bool:
    method = METHODS.get(run.config["method"])
    return method is None or method.takes(key)


def order(run: Run) -> tuple[int, str, int, float, int]:
    """As in the table of methods; those that average most come first, and an overlap that chooses itself last."""
    config = run.config
    known = list(METHODS)
    rank = known.index(config["method"]) if config["method"] in METHODS else len(known)
    overlap = math.inf if config.get("overlap") == "auto" else config.get("overlap") or 0
    return rank, str(config["method"]), config.get("period") or 0, overlap, config["seed"]


def _refuse_twins(runs: Sequence[Run]) -> None:
    """One run counted twice would make the seeds look more alike than they are."""
    for one, other in itertools.pairwise(runs):
        if one.config["seed"] == other.config["seed"]:
            raise ValueError(f"{one.folder} and {other.folder} are the same run: give one of them")


def baseline(groups: Iterable[Group]) -> Group | None:
    """What the others are measured by: the one that was named; mini-batch SGD if it is finished; or else the one that
    communicated most."""
    groups = list(groups)
    named = next((group for group in groups if group.is_baseline), None)
    if named is not None:
        return named
    done = [group for group in groups if group.finished]
    done = [group for group in done if group.runs[0].label == "minibatch-sgd"] or done
    return max(done, key=lambda group: (fmean(run.bytes_sent for run in group.counted), _rounds(group)), default=None)


def rows(groups: Sequence[Group]) -> list[Row]:
    """One for each group."""
    base = baseline(groups)
    base_bytes = None if base is None else fmean(run.bytes_sent for run in base.counted)
    return [_row(group, base_bytes) for group in groups]


def _row(group: Group, base_bytes: float | None) -> Row:
    counted = group.counted
    lasts = [run.last for run in counted if run.last is not None]
    scored = [
        run
        for run in counted
        if run.last is not None and run.last.test_score is not None and math.isfinite(run.last.test_score)
    ]
    drifts = [run.mean_drift for run in counted if run.mean_drift is not None]
    sent = fmean(run.bytes_sent for run in counted) if counted else None
    return Row(
        label=group.label,
        name=group.name,
        state=group.state,
        seeds=len(counted),
        train_loss=measured([last.train_loss for last in lasts]),
        test_score=measured([run.score(run.last) for run in scored if run.last is not None]),
        rounds=_rounds(group) if counted else None,
        megabytes=None if sent is None else sent / 1e6,
        share=sent / base_bytes if sent is not None and base_bytes and group.finished else None,
        drift=fmean(drifts) if drifts else None,
        seconds=fmean(last.seconds for last in lasts) if lasts else None,
        modelled_seconds=_mean([last.modelled_seconds for last in lasts if last.modelled_seconds is not None]),
        metric=(counted or group.runs)[0].metric.name,
    )


def measured(values: Sequence[float]) -> Measured | None:
    """
    >>> measured([1.0, 3.0])
    Measured(mean=2.0, spread=1.4142135623730951, seeds=2)
    """
    if not values:
        return None
    return Measured(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _rounds(group: Group) -> float:
    return fmean(len(run.averages) for run in group.counted)
