"""Run folders, read and checked: what the rest of the report takes for granted."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from prsgd import _json, files, metrics
from prsgd._check import shown
from prsgd._fields import LARGEST, MOST, checks_of, restored
from prsgd.clocks.trace import Span
from prsgd.clocks.trace import read as read_trace
from prsgd.lab.methods import METHODS, label
from prsgd.lab.recipe import LR_DROPS
from prsgd.metrics import Metric
from prsgd.records import Evaluation, Record, Summary

T = TypeVar("T")


@dataclass(frozen=True)
class Seen:
    """Who saw what."""

    counts: tuple[tuple[int, ...], ...]
    """A row for each worker, a column for each group of samples."""
    names: tuple[str, ...]
    """The groups'."""
    word: str
    """What a group is: a class, or a decade."""


@dataclass(frozen=True)
class Run:
    """One run, finished or not."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    averages: tuple[Record, ...]
    evaluations: tuple[Evaluation, ...]
    summary: Summary | None
    """None while it is unfinished."""
    split: Seen | None
    """Samples of each group that each worker saw in its first epoch."""

    @property
    def label(self) -> str:
        """The method, and its period and overlap if it has them."""
        config = self.config
        how = {key: config.get(key) for key in ("period", "seconds", "overlap", "fragments")}
        return label(str(config["method"]), **{**how, "overlap": how["overlap"] or 0})

    @property
    def last(self) -> Evaluation | None:
        """How good the model was when last looked at."""
        return self.evaluations[-1] if self.evaluations else None

    @property
    def metric(self) -> Metric:
        """What it is judged by: that of its task, or the training loss."""
        scored = self.last is not None and self.last.test_score is not None
        return metrics.find(self.last.metric if scored and self.last is not None else None)

    def score(self, seen: Evaluation) -> float:
        """How good an evaluation found the model, by that metric, in the numbers that people read."""
        return seen.train_loss if seen.test_score is None else seen.test_score * self.metric.shown

    @property
    def diverged(self) -> bool:
        return self.last is not None and not math.isfinite(self.last.train_loss)

    @property
    def finished(self) -> bool:
        return self.summary is not None and self.last is not None and not self.diverged

    @property
    def steps_per_epoch(self) -> float | None:
        """None before the first epoch is over."""
        last = self.last
        return last.step / last.epoch if last is not None and last.epoch > 0 else None

    @property
    def planned_steps(self) -> float | None:
        """How long the run is to be; None if that is given in epochs and none is over yet."""
        if self.config.get("steps") is not None:
            return float(self.config["steps"])
        epochs, per_epoch = self.config.get("epochs"), self.steps_per_epoch
        return None if epochs is None or per_epoch is None else epochs * per_epoch

    @property
    def planned_epochs(self) -> float | None:
        """The same in epochs."""
        if self.config.get("epochs") is not None:
            return float(self.config["epochs"])
        steps, per_epoch = self.config.get("steps"), self.steps_per_epoch
        return None if steps is None or per_epoch is None else steps / per_epoch

    @property
    def uneven(self) -> bool:
        """Did its workers take different numbers of steps?"""
        known = METHODS.get(str(self.config["method"]))
        return known is not None and known.uneven

    @property
    def recipe(self) -> str | None:
        """Of the lr; None: the method has set it."""
        return self.config.get("recipe")

    @cached_property
    def follows_recipe(self) -> bool:
        """Was the lr the given one, divided by 10 at each of ``LR_DROPS``? Some methods set their own, and there are
        other recipes.

        The steps next to a drop are not asked: an average may land with the lr of either side. Where workers differ in
        their steps, a round or two are next to it.
        """
        length, lr = self.planned_steps, self.config.get("lr")
        if length is None or lr is None or self.recipe != "drops" or self.config.get("warmup"):
            return False
        drops = [fraction * length for fraction in LR_DROPS]
        longest = max((b.step - a.step for a, b in itertools.pairwise(self.averages)), default=0)
        near = 2 * longest + 2 if self.uneven else 2
        return all(
            math.isclose(average.lr, lr / 10 ** sum(average.step > drop for drop in drops), rel_tol=1e-6)
            for average in self.averages
            if all(abs(average.step - drop) > near for drop in drops)
        )

    @cached_property
    def spans(self) -> list[Span]:
        """What its workers did when, the newest of it; empty without a trace."""
        return read_trace(self.folder)

    @cached_property
    def bytes_sent(self) -> int:
        """Per worker, so far."""
        return sum(average.bytes_sent for average in self.averages)

    @cached_property
    def mean_drift(self) -> float | None:
        drifts = [average.drift for average in self.averages if average.drift is not None]
        return sum(drifts) / len(drifts) if drifts else None


def read(folders: Sequence[Path]) -> list[Run]:
    """The runs in ``folders``, each of which is a run's folder or has runs one level down.

    >>> read([Path("nowhere")])
    Traceback (most recent call last):
    ValueError: there is no folder nowhere
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        alone = (folder / files.CONFIG).is_file()
        inside = [folder] if alone else sorted(path.parent for path in folder.glob(f"*/{files.CONFIG}"))
        if not inside:
            raise ValueError(f"folder must hold a config.json, itself or one level down, got {folder}")
        for place in inside:
            if place.resolve() not in found:
                found[place.resolve()] = _read_run(place)
    return list(found.values())


_NEEDED = ("task", "model", "method", "workers", "seed")
_TEXTS = (
    "task", "model", "method", "split", "data", "task_sha256", "data_sha256", "cluster", "weights", "optimizer",
    "recipe",
)  # fmt: skip
_WHOLE = {
    **dict.fromkeys(
        ("workers", "period", "epochs", "steps", "batch_size", "processes", "accumulate", "look", "fragments"), 1
    ),
    **dict.fromkeys(("seed", "overlap"), 0),
}
"""The least that each can be."""
_NUMBERS = ("lr", "momentum", "weight_decay", "seconds", "switch", "outer_lr", "outer_momentum", "warmup", "clip")


def _read_run(folder: Path) -> Run:
    config = _object(folder / files.CONFIG)
    for key in (*_TEXTS, *_WHOLE, *_NUMBERS):
        value = config.get(key)
        if value is None and key in _NEEDED:
            raise ValueError(f"{folder / files.CONFIG}: {key} is missing")
        if value is not None and not _can_be(key, value):
            raise ValueError(f"{folder / files.CONFIG}: {key} cannot be {shown(value)}")
    averages, evaluations = _records(folder / files.RECORDS)
    names = {"environment": files.ENVIRONMENT, "summary": files.SUMMARY, "split": files.SPLIT}
    optional = {key: folder / name for key, name in names.items()}
    given = {name: (path, _object(path)) for name, path in optional.items() if path.is_file()}
    return Run(
        folder=folder,
        config=config,
        environment=given["environment"][1] if "environment" in given else {},
        averages=tuple(_by_samples(averages, config)),
        evaluations=tuple(evaluations),
        summary=_summary(*given["summary"]) if "summary" in given else None,
        split=_seen(*given["split"]) if "split" in given else None,
    )


def _can_be(key: str, value: Any) -> bool:
    if key in _TEXTS or (key == "overlap" and value == "auto"):
        return isinstance(value, str)
    if isinstance(value, bool) or not isinstance(value, int if key in _WHOLE else int | float):
        return False
    return bool(_WHOLE[key] <= value < MOST if key in _WHOLE else 0 <= value <= LARGEST)


def _by_samples(averages: list[Record], config: dict[str, Any]) -> list[Record]:
    """Where workers take different numbers of steps, a record's step is one worker's: here it becomes their mean."""
    per_step = config["workers"] * (config.get("batch_size") or 0)
    total = sum(average.samples for average in averages if not average.fragment)  # the others' are of the same steps
    if not per_step or not total or abs(total / per_step - averages[-1].step) <= 0.02 * averages[-1].step:
        return averages
    steps = itertools.accumulate(average.samples for average in averages)
    return [replace(average, step=round(step / per_step)) for average, step in zip(averages, steps)]


def _object(path: Path) -> dict[str, Any]:
    try:
        value = _json.parse(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def _summary(path: Path, values: dict[str, Any]) -> Summary:
    try:
        return _checked(Summary, values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _checked(kind: type[T], values: dict[str, Any]) -> T:
    """What is missing counts as null, which most fields refuse; what we do not know is left out: a newer version of
    prsgd may have written it."""
    return restored(kind, {name: values.get(name) for name in checks_of(kind)})


def _seen(path: Path, split: dict[str, Any]) -> Seen:
    rows = split.get("counts")
    whole = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == len(rows[0]) and all(type(n) is int and n >= 0 for n in row)
        for row in rows
    )
    if not rows or not whole:
        raise ValueError(f"{path}: counts must be rows of whole numbers >= 0, one row per worker, all of one length")
    names = split.get("names", list(map(str, range(len(rows[0])))))
    word = split.get("word", "class")
    fits = isinstance(names, list) and len(names) == len(rows[0]) and all(isinstance(name, str) for name in names)
    if not fits or not isinstance(word, str):
        raise ValueError(f"{path}: names must be {len(rows[0])} texts, as many as a row has counts, and word a text")
    return Seen(tuple(tuple(row) for row in rows), tuple(names), word)


def _records(path: Path) -> tuple[list[Record], list[Evaluation]]:
    averages: list[Record] = []
    evaluations: list[Evaluation] = []
    lines = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            _add(text, averages, evaluations)
        except ValueError as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                break  # no newline behind it: the run is writing it just now, or was killed while it did
            raise ValueError(f"{path}, line {number}: {error}") from None
    return averages, evaluations


def _add(text: bytes, averages: list[Record], evaluations: list[Evaluation]) -> None:
    line = _json.parse(text)
    kind = line.get("kind") if isinstance(line, dict) else None
    if kind == "average":
        averages.append(_checked(Record, line))
    elif kind == "evaluation":
        evaluations.append(_checked(Evaluation, line))
    else:
        raise ValueError(f"kind must be 'average' or 'evaluation', got {kind!r}")
