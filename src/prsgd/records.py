"""What is written down of a run: a record for each average, evaluations, how it ended. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from prsgd._check import shown, whole_number, within

MOST = 2**63
"""Of a whole number that is read back."""
LARGEST = 1e100
"""Of a finite number that is read back: sums and products of such numbers are floats still."""


@dataclass(frozen=True)
class Modelled:
    """What a round would have taken on a modelled cluster, in seconds; one entry per worker."""

    seconds: float
    """Since the start, when the last worker went on."""
    computing: tuple[float, ...]
    waiting: tuple[float, ...]
    """For the others to close their rounds."""
    communicating: tuple[float, ...]
    """Waiting for the transfer, and copying."""
    hidden: tuple[float, ...]
    """Of the transfer, while it computed."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Modelled:
        """Back from ``dataclasses.asdict``, or from JSON."""
        seconds, *parts = (values[field.name] for field in fields(cls))
        return cls(float(seconds), *(tuple(map(float, part)) for part in parts))


@dataclass(frozen=True)
class Record:
    """One average. ``json.dumps(dataclasses.asdict(record))`` works as it is.

    The drift, loss, samples and workers are those of all processes and the same everywhere; the rest is this process's.
    Since the former travel with the next average, a record appears one average after its own.
    """

    round: int
    """Counted from 1."""
    step: int
    """The step at which it landed: the hosted worker's, or the largest of several."""
    period: int
    """Steps the round had here, the largest of the hosted workers'."""
    overlap: int
    """Steps that began while it travelled."""
    workers: int
    """How many workers' models were averaged."""
    bad_workers: int
    """How many were left out because their models were not finite."""
    bytes_sent: int
    """Per worker."""
    server_bytes_sent: int
    """By the parameter server, where there is one."""
    wait_seconds: float
    """Blocked, waiting for the others and the transfer."""
    copy_seconds: float
    """Copying, checking and writing models."""
    flight_seconds: float
    """From launch to arrival."""
    lr: float
    """Of the first parameter group, when it landed."""
    drift: float | None
    """Mean over the workers of the squared distance of their snapshot from the mean of all; None if unknown: where
    processes exchange compressed changes, or with neighbours only, nobody knows that mean."""
    loss: float | None
    """Mean of the losses given to ``log`` in this round; None if there were none."""
    samples: int
    """Sum of the samples given to ``log`` in this round."""
    step_seconds: tuple[float, ...] | None = None
    """Mean seconds of a step, by worker id, as known one average later; None unless the schedule asks for it."""
    hops: int = 0
    """Messages one after another that it took; 0: as many as a sum takes."""
    modelled: Modelled | None = None
    """With a ``prsgd.cluster.ClusterClock``."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Back from ``dataclasses.asdict``."""
        found = dict(values)
        if found.get("step_seconds") is not None:
            found["step_seconds"] = tuple(found["step_seconds"])
        if found.get("modelled") is not None:
            found["modelled"] = Modelled.from_dict(found["modelled"])
        return cls(**found)


@dataclass
class Totals:
    """Of all averages of a run, also of those whose records are no longer kept."""

    rounds: int = 0
    bytes_sent: int = 0
    """Per worker."""
    server_bytes_sent: int = 0
    samples: int = 0
    wait_seconds: float = 0.0
    copy_seconds: float = 0.0

    def add(self, record: Record) -> None:
        """Count one more."""
        self.rounds += 1
        self.bytes_sent += record.bytes_sent
        self.server_bytes_sent += record.server_bytes_sent
        self.samples += record.samples
        self.wait_seconds += record.wait_seconds
        self.copy_seconds += record.copy_seconds


@dataclass(frozen=True)
class Evaluation:
    """The consensus of all workers, looked at between two epochs."""

    epoch: float
    step: int
    """Of each worker; where workers differ, the step at which this epoch would end if they did not."""
    train_loss: float
    """Of up to 5,000 training samples as they are, without augmentation."""
    test_loss: float
    test_accuracy: float | None
    seconds: float
    """Of training so far, evaluations left out."""
    modelled_seconds: float | None = None
    """The same on a modelled cluster."""


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    label: str
    train_loss: float
    test_loss: float
    test_accuracy: float | None
    best_test_accuracy: float | None
    epochs: float
    steps: int
    rounds: int
    bytes_sent: int
    """Per worker."""
    mean_drift: float | None
    seconds: float
    """Of training, on this machine."""
    samples: int
    weights_sha256: str
    """Of the final model: two runs with the same one are the same to the last bit."""
    first_train_loss: float = math.inf
    """Before the first step."""
    modelled_seconds: float | None = None
    """Of training, on a modelled cluster."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """Back from JSON, which others may have written: a TypeError or a ValueError names what cannot be.

        The seconds and epochs are finite, since they are counted; a loss may be anything that a float can be.
        """
        found = cls(**values)
        for field in fields(cls):
            name, kind, value = field.name, str(field.type), getattr(found, field.name)
            if value is None and "None" in kind:
                continue
            if "int" in kind:
                whole_number(name, value, at_least=0, at_most=MOST)
            elif "str" in kind:
                if not isinstance(value, str):
                    raise ValueError(f"{name} must be a text, got {shown(value)}")
            elif name.endswith("seconds") or name == "epochs":
                within(name, value, 0.0, LARGEST)
            elif isinstance(value, bool) or not isinstance(value, int | float) or LARGEST < abs(value) < math.inf:
                raise ValueError(f"{name} must be a number, got {shown(value)}")
        return found
