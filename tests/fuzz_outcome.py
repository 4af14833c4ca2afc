"""What a process that ran a scenario tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

NUMBERS = (
    "round",
    "step",
    "period",
    "overlap",
    "workers",
    "bad_workers",
    "outliers",
    "samples",
    "bytes_sent",
    "hops",
    "server_bytes_sent",
)
"""Of a record: compared exactly."""


@dataclass(frozen=True)
class Look:
    """A consensus(): how many batches each worker has had by then, and who had left."""

    at: tuple[int, ...]
    gone: frozenset[int]


@dataclass
class Outcome:
    """What a process ends with."""

    error: str = ""
    """Its type and text; the run ended there."""
    parameters: dict[int, Tensor] = field(default_factory=dict)
    """By worker."""
    buffers: dict[int, list[Tensor]] = field(default_factory=dict)
    state: dict[int, list[Tensor]] = field(default_factory=dict)
    """The optimizer's."""
    records: list[dict[str, Any]] = field(default_factory=list)
    seen: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)
    """Parameters and buffers that each look yielded."""
    looks: list[Look] = field(default_factory=list)
    """Where it looked; in a rank: which of those that it was told of were left."""
    spoilt: str = ""
    """What a look did not put back."""
    lost: bool = False
    """After an error in a fleet: was no model finite?"""
    rest: Look | None = None
    """Where the scenario's run is stopped, if ranks can be stopped there too."""
    ahead: bool = False
    """Did a worker run out of data with its round closed, which the fleet had not launched since others were late?"""
