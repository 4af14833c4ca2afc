"""Where a run is: what it has counted so far, and what a display is told of it. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from prsgd import metrics
from prsgd.errors import DivergedError
from prsgd.records import Evaluation, Record, Summary


@dataclass(frozen=True)
class Progress:
    """What a display shows."""

    step: int
    num_steps: int
    epoch: float
    num_epochs: float
    round: int
    evaluation: Evaluation | None
    seconds: float
    seconds_left: float | None


Observer = Callable[[Progress], None]


class Stopped(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The run was stopped before its end; its checkpoint is of this step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


@dataclass
class Tally:
    """What a run has counted so far. A checkpoint keeps it, as ``dataclasses.asdict`` gives it."""

    step: int = 0
    """Of this process's workers; where they differ, how often the loop went round."""
    looks: int = 0
    """Evaluations on the way so far."""
    seconds: float = 0.0
    """Of training, evaluations left out."""
    best: float | None = None
    """The best test score."""
    first_loss: float = math.inf
    """On the training set, before the first step."""
    totals: dict[str, float] = field(
        default_factory=lambda: {"rounds": 0, "bytes_sent": 0, "drift": 0.0, "drifts": 0, "samples": 0}
    )
    """Over the records; ``drifts`` is how many of them knew theirs."""
    evaluation: Evaluation | None = None
    """The last one."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tally:
        """Back from a checkpoint's values, among which others may be."""
        found = {name: values[name] for name in (f.name for f in fields(cls))}
        seen = found.pop("evaluation")
        return cls(**found, evaluation=None if seen is None else Evaluation.from_dict(seen))

    def add(self, record: Record) -> None:
        """Count one more average."""
        self.totals["rounds"] += 1
        self.totals["bytes_sent"] += record.bytes_sent
        if not record.fragment:  # the others' samples are of the same steps
            self.totals["samples"] += record.samples
        if record.drift is not None:  # a model's squared distance is the sum of its fragments'
            self.totals["drift"] += record.drift
            self.totals["drifts"] += not record.fragment

    def see(self, evaluation: Evaluation) -> None:
        """Take down one more evaluation."""
        self.evaluation = evaluation
        if not self.step:
            self.first_loss = evaluation.train_loss
        score = evaluation.test_score
        if score is not None and (self.best is None or metrics.find(evaluation.metric).is_better(score, self.best)):
            self.best = score

    def progress(self, taken: float, num_steps: int, steps_per_epoch: int, round: int) -> Progress:
        """For a display, when ``taken`` of ``num_steps`` steps are behind the workers."""
        part = min(1.0, taken / num_steps)
        return Progress(
            step=int(taken),
            num_steps=num_steps,
            epoch=taken / steps_per_epoch,
            num_epochs=num_steps / steps_per_epoch,
            round=round,
            evaluation=self.evaluation,
            seconds=self.seconds,
            seconds_left=self.seconds * (1 - part) / part if part else None,
        )

    def summary(self, label: str, *, weights_sha256: str) -> Summary:
        """How the run ended, which its last evaluation has seen; a DivergedError if its loss is no number."""
        last, totals = self.evaluation, self.totals
        assert last is not None
        if not math.isfinite(last.train_loss):
            raise DivergedError(f"the training loss is {last.train_loss} after {self.step} steps")
        return Summary(
            label=label,
            first_train_loss=self.first_loss,
            train_loss=last.train_loss,
            test_loss=last.test_loss,
            test_score=last.test_score,
            best_test_score=self.best,
            epochs=last.epoch,
            steps=self.step,
            rounds=int(totals["rounds"]),
            bytes_sent=int(totals["bytes_sent"]),
            mean_drift=totals["drift"] / totals["drifts"] if totals["drifts"] else None,
            seconds=self.seconds,
            samples=int(totals["samples"]),
            weights_sha256=weights_sha256,
            modelled_seconds=last.modelled_seconds,
            metric=last.metric,
        )
