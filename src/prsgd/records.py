"""What is written down of a run: a record for each average, evaluations, how it ended. Needs no torch.

A field's annotation is all that readers of a file need to check it by (``_fields``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from prsgd._check import shown
from prsgd._fields import Counted, Finite, restored


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


def _modelled(name: str, value: Any, largest: float) -> Modelled:
    """Checked as a whole: which of its numbers is wrong says less than what it should be."""
    try:
        found = Modelled.from_dict(value)
        times = (found.seconds, *found.computing, *found.waiting, *found.communicating, *found.hidden)
        if not all(abs(time) <= largest for time in times):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must have seconds and one number per worker, got {shown(value)}") from None
    return found


@dataclass(frozen=True)
class Record:
    """One average. ``json.dumps(dataclasses.asdict(record))`` works as it is.

    The drift, loss, samples, noise and workers are of all processes, and the same everywhere; the rest is this
    process's. Since the former travel with the next average, a record appears one average after its own.

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4)) as local:
    ...     for _ in range(8):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).square().mean().backward()
    ...         optimizer.step()
    >>> [(record.round, record.step, record.period, record.workers) for record in local.records]
    [(1, 4, 4, 1), (2, 8, 4, 1)]
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
    """How many were left out because their models were not finite; ``outliers`` are others."""
    bytes_sent: int
    """Per worker."""
    server_bytes_sent: int
    """By the parameter server, where there is one."""
    wait_seconds: Finite
    """Blocked, waiting for the others and the transfer."""
    copy_seconds: Finite
    """Copying, checking and writing models."""
    flight_seconds: Finite
    """From launch to arrival."""
    lr: Finite
    """Of the first parameter group, when it landed."""
    drift: float | None
    """Mean over the workers of the squared distance of their snapshot from the mean of all; None if unknown: where
    processes exchange compressed changes, or with neighbours only, nobody knows that mean."""
    loss: float | None
    """Mean of the losses given to ``log`` in this round; None if there were none."""
    samples: int
    """Sum of the samples given to ``log`` in this round."""
    step_seconds: tuple[float, ...] | None = None
    """Mean seconds of a step lately, pauses left out, by worker id, as known one average later; None unless the
    schedule asks for it, or the overlap is chosen by it."""
    hops: int = 0
    """Messages one after another that it took; 0: as many as a sum takes."""
    noise: float | None = None
    """How far the scatter of one step's gradients would move a model at lr 1, squared: the mean of what the workers saw
    in this round; None unless the schedule asks for it, or if nobody looked."""
    momentum: float | None = None
    """The share of a step's move that the next one repeats, where the noise was seen; None if it is not one number for
    all parameters, or not as in plain momentum (Nesterov, Adam)."""
    reason: str = ""
    """Why the schedule made the round longer or shorter than the one before, and why its overlap is another."""
    modelled: Annotated[Modelled, _modelled] | None = None
    """With a ``prsgd.cluster.ClusterClock``."""
    members: tuple[int, ...] | None = None
    """The ids of the workers that took part, where workers come and go; None: all."""
    outliers: int = 0
    """How many were left out because their models, finite as they were, had changed far more than is usual."""
    fragment: int | None = None
    """Which part of the model was averaged, counted from 0, where it travels in ``fragments``; None: all of it. The
    drift is the fragment's; loss and samples are of the steps since its last average."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Record:
        """Back from ``dataclasses.asdict``; a ValueError names a field that cannot be what it is.

        The model is the user's own, so its loss and drift may be any number that a float can be.
        """
        return restored(cls, values, largest=sys.float_info.max)


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
        self.samples += 0 if record.fragment else record.samples  # the others' are of the same steps
        self.wait_seconds += record.wait_seconds
        self.copy_seconds += record.copy_seconds


@dataclass(frozen=True)
class Evaluation:
    """The consensus of all workers, looked at between two epochs."""

    epoch: Finite
    step: int
    """Of each worker; where workers differ, the step at which this epoch would end if they did not."""
    train_loss: float
    """Of up to 5,000 training samples as they are, without augmentation."""
    test_loss: float
    test_score: float | None
    """By the task's metric; None where it has none."""
    seconds: Finite
    """Of training so far, evaluations left out."""
    modelled_seconds: Finite | None = None
    """The same on a modelled cluster."""
    metric: str | None = None
    """The name of what ``test_score`` is, one of ``prsgd.metrics``."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        """Back from ``dataclasses.asdict``, as of a record."""
        return restored(cls, values, largest=sys.float_info.max)


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    label: str
    train_loss: float
    test_loss: float
    test_score: float | None
    """By the task's metric; None where it has none."""
    best_test_score: float | None
    """Of all evaluations."""
    epochs: Counted
    steps: int
    rounds: int
    bytes_sent: int
    """Per worker."""
    mean_drift: float | None
    seconds: Counted
    """Of training, on this machine."""
    samples: int
    weights_sha256: str
    """Of the final model: two runs with the same one are the same to the last bit."""
    first_train_loss: float = math.inf
    """Before the first step."""
    modelled_seconds: Counted | None = None
    """Of training, on a modelled cluster."""
    metric: str | None = None
    """The name of what the scores are, one of ``prsgd.metrics``."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Summary:
        """Back from JSON, which others may have written: a TypeError or a ValueError names what cannot be."""
        return restored(cls, values)
