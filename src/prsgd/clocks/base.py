"""What keeps the time of a run: the machine's clock, or a model of a cluster.

The loop tells it what happens; it knows what that takes, keeps the trace, and is asked by rounds that end by the clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from prsgd.clocks.trace import Trace
from prsgd.records import Modelled


@dataclass(frozen=True)
class Sent:
    """What an average put on the wire."""

    bytes_sent: int
    """Per worker."""
    server_bytes_sent: int = 0
    hops: int = 0
    """Messages one after another; 0: as many as a sum takes."""
    hears: tuple[tuple[int, ...], ...] | None = None
    """By hosted worker: those whose models it waits for; None: all."""


@runtime_checkable
class Timekeeper(Protocol):
    """Workers are named by their place among those hosted here."""

    trace: Trace

    def __call__(self, worker: int) -> float:
        """Seconds now, of the worker with this id."""
        ...

    def check(self, num_workers: int, hosted: range) -> None:
        """Raise a ValueError if it cannot keep these workers' time."""
        ...

    def begin(self) -> None:
        """The run starts, or goes on."""
        ...

    def computed(self, places: Sequence[int]) -> None:
        """They have the gradients of their next step."""
        ...

    def stepped(self, step: int) -> None:
        """And have taken it; ``step`` is the furthest one's number."""
        ...

    def closed(self, place: int) -> None:
        """Its round is over, its snapshot taken."""
        ...

    def launched(self, done: Sequence[int]) -> None:
        """The average of all hosted workers; those that are done brought theirs only now."""
        ...

    def arrived(self, sent: Sent, *, round: int, flight_seconds: float) -> Sequence[float]:
        """Somebody waited for it, and it is there: by place, what steps have to hide of it, which is the time since the
        last gradient before the worker's launch (an update and a snapshot come between); 0 if unknown."""
        ...

    def landed(self, place: int, round: int) -> None:
        """It has been written to a worker's model."""
        ...

    def completed(self) -> Modelled | None:
        """It has landed on all hosted workers; what a model knows of the round."""
        ...

    def step_seconds(self, place: int) -> float:
        """Mean seconds of a worker's step, lately and without pauses, its first round left out once there are others; 0
        if unknown."""
        ...

    def paused(self) -> Any:
        """A context in which time does not count."""
        ...

    def gathered(self, round: int) -> None:
        """In a pause: until now it was waiting for the others to come to a consensus."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
