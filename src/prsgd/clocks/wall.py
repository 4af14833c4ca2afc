"""The machine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prsgd.clocks.base import Sent
from prsgd.clocks.trace import Trace
from prsgd.records import Modelled


class WallClock:
    """The real time. A process's workers step together, so they share a row of the trace: the first one's."""

    def __init__(self, workers: range, clock: Callable[[int], float] | None = None) -> None:
        self.trace = Trace()
        self._first, self._hosted, self._clock = workers.start, len(workers), clock
        self._at = time.monotonic()
        """Until when all is told."""
        self._computed: float | None = None
        self._launched = 0.0
        self._paused_seconds = 0.0
        self._stepping_seconds, self._steps, self._step = 0.0, 0, 0
        self._warm = ""

    def __call__(self, worker: int) -> float:
        return (time.monotonic() if self._clock is None else self._clock(worker)) - self._paused_seconds

    def check(self, num_workers: int, hosted: range) -> None:
        """Any will do."""

    def begin(self) -> None:
        self._at = time.monotonic()

    def computed(self, places: Sequence[int]) -> None:
        self._computed = time.monotonic()

    def stepped(self, step: int) -> None:
        now = time.monotonic()
        self.trace.add("step", self._first, self._at, now, step)
        self._stepping_seconds += now - self._at
        self._steps += 1
        if self._warm == "next":
            self._warm, self._stepping_seconds, self._steps = "yes", 0.0, 0
        self._step = step
        self._at, self._computed = now, None

    def closed(self, place: int) -> None:
        """Nothing takes time but what is measured."""

    def launched(self, done: Sequence[int]) -> None:
        self._launched = time.monotonic()

    def arrived(self, sent: Sent, *, round: int, flight_seconds: float) -> Sequence[float]:
        if self._computed is not None:  # inside a step: its gradient came before
            self.trace.add("step", self._first, self._at, self._computed, self._step + 1)
            self._stepping_seconds += self._computed - self._at
            self._at, self._computed = self._computed, None
        self._block(round)
        end = min(self._launched + flight_seconds, self._at) if flight_seconds else self._at
        self.trace.add("flight", self._first, self._launched, end, round)
        return [flight_seconds] * self._hosted

    def landed(self, place: int, round: int) -> None:
        if self._computed is None:
            self._block(round)

    def _block(self, round: int) -> None:
        now = time.monotonic()
        self.trace.add("blocked", self._first, self._at, now, round)
        self._at = now

    def completed(self) -> Modelled | None:
        self._warm = self._warm or "next"  # after the step that is under way
        return None

    def step_seconds(self, place: int) -> float:
        return self._stepping_seconds / self._steps if self._steps else 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._at, at = time.monotonic(), self(self._first)
        try:
            yield
        finally:
            self._paused_seconds += self(self._first) - at
            now = time.monotonic()
            self.trace.add("pause", self._first, self._at, now, 0)
            self._at = now

    def gathered(self, round: int) -> None:
        now = time.monotonic()
        self.trace.add("wait", self._first, self._at, now, round)
        self._at = now

    def state_dict(self) -> dict[str, Any]:
        """Nothing of it outlives a process: the rounds' elapsed seconds are the workers'."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError("the state is of a run with a cluster's clock: give it one")
