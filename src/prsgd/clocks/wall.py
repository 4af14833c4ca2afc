"""The machine's clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prsgd.clocks.base import Sent
from prsgd.clocks.trace import Trace
from prsgd.records import Modelled

LATELY = 32
"""Steps by which it is told what one takes."""
PAUSE = 3.0
"""Times the usual step: what took longer was none, but somebody's evaluation, checkpoint or meal between two steps."""


class WallClock:
    """The real time. A process's workers step together, so they share a row of the trace: the first one's. ``shared``
    makes of what the clock says here what it says in all processes that go by it."""

    def __init__(
        self,
        workers: range,
        clock: Callable[[int], float] | None = None,
        shared: Callable[[float], float] | None = None,
    ) -> None:
        self.trace = Trace()
        self._first, self._hosted, self._clock, self._shared = workers.start, len(workers), clock, shared
        self._at = time.monotonic()
        """Until when all is told."""
        self._computed: float | None = None
        self._updating = 0.0
        """Since when it is: the last step's gradient was there, and what landed in it written."""
        self._launched, self._prepared_seconds = 0.0, 0.0
        """When the newest average was, and what that took since the gradient before: an update and a snapshot."""
        self._paused_seconds = 0.0
        self._stepping_seconds, self._step = 0.0, 0
        """Of the step under way; the last one's number."""
        self._lately: deque[float] = deque(maxlen=LATELY)
        """Seconds of the newest steps."""
        self._warm = ""

    def __call__(self, worker: int) -> float:
        return self._here(worker) if self._shared is None else self._shared(self._here(worker))

    def _here(self, worker: int) -> float:
        return (time.monotonic() if self._clock is None else self._clock(worker)) - self._paused_seconds

    def check(self, num_workers: int, hosted: range) -> None:
        """Any will do."""

    def begin(self) -> None:
        self._at = time.monotonic()

    def computed(self, places: Sequence[int]) -> None:
        self._computed = self._updating = time.monotonic()

    def stepped(self, step: int) -> None:
        now = time.monotonic()
        self.trace.add("step", self._first, self._at, now, step)
        self._lately.append(self._stepping_seconds + now - self._at)
        if self._warm == "next":
            self._warm = "yes"
            self._lately.clear()
        self._stepping_seconds, self._step = 0.0, step
        self._at, self._computed = now, None

    def closed(self, place: int) -> None:
        """Nothing takes time but what is measured."""

    def launched(self, done: Sequence[int]) -> None:
        self._launched = time.monotonic()
        self._prepared_seconds = self._launched - self._updating if self._updating and len(done) < self._hosted else 0.0

    def arrived(self, sent: Sent, *, round: int, flight_seconds: float) -> Sequence[float]:
        if self._computed is not None:  # inside a step: its gradient came before
            self.trace.add("step", self._first, self._at, self._computed, self._step + 1)
            self._stepping_seconds += self._computed - self._at
            self._at, self._computed = self._computed, None
        self._block(round)
        end = min(self._launched + flight_seconds, self._at) if flight_seconds else self._at
        self.trace.add("flight", self._first, self._launched, end, round)
        # A launch comes after an update, and a landing before one: of the steps between them one update hides nothing.
        prepared = min(self._prepared_seconds, self._usual())
        return [flight_seconds + prepared if flight_seconds else 0.0] * self._hosted

    def landed(self, place: int, round: int) -> None:
        if self._computed is None:
            self._block(round)

    def _block(self, round: int) -> None:
        now = time.monotonic()
        self.trace.add("blocked", self._first, self._at, now, round)
        self._at = self._updating = now

    def completed(self) -> Modelled | None:
        self._warm = self._warm or "next"  # after the step that is under way
        return None

    def step_seconds(self, place: int) -> float:
        longest = PAUSE * self._usual()
        steps = [seconds for seconds in self._lately if seconds <= longest]
        return sum(steps) / len(steps) if steps else 0.0

    def _usual(self) -> float:
        return sorted(self._lately)[len(self._lately) // 2] if self._lately else 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._at, at = time.monotonic(), self._here(self._first)
        try:
            yield
        finally:
            self._paused_seconds += self._here(self._first) - at
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
