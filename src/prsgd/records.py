"""What is known of an average once it is over: one record per round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prsgd.trace import Modelled


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


@dataclass
class Tally:
    """What one worker logged in one round. The loss stays a tensor until an average asks: logging never waits."""

    loss: float | Tensor = 0.0
    losses: int | Tensor = 0
    samples: int = 0

    def add(self, loss: float | Tensor | None, samples: int) -> None:
        """A loss that is not finite is left out: it would spoil all workers' mean."""
        if isinstance(loss, Tensor):
            finite = loss.isfinite()
            self.loss = self.loss + torch.where(finite, loss, 0.0)
            self.losses = self.losses + finite
        elif loss is not None and math.isfinite(loss):
            self.loss = self.loss + float(loss)
            self.losses = self.losses + 1
        self.samples += samples
