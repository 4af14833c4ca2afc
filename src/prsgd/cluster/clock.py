"""The clock of a run on a modelled cluster: what real machines would have needed, exactly and repeatably.

    step      of worker i: step_seconds / speed_i, times a log-normal number of mean 1 where there is jitter
    average   begins for a worker when the last of those that it hears (all, but in gossip) has closed its round, and
              takes what the link takes for its bytes
    landing   a worker that is not there yet computes on, what is left of the flight it waits for, then it copies

An average that travels while a worker computes is hidden; evaluations and the machine's own time do not count.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prsgd.clocks.base import Sent
from prsgd.clocks.trace import Trace
from prsgd.cluster.model import Cluster
from prsgd.records import Modelled

TICK = 2.0**-30
"""Seconds: times are whole numbers of it, so that their sums and differences are exact."""
BLOCK = 256
"""Random numbers drawn at once."""

Vector = NDArray[np.float64]


class ClusterClock:
    """The time that passes on a modelled cluster, for ``LocalSGD(..., clock=ClusterClock(cluster))``.

    All workers live in one process; each has its own time, and they meet at averages.

    >>> import torch, prsgd
    >>> from prsgd.cluster.model import Cluster
    >>> from prsgd.cluster.clock import ClusterClock
    >>> two = Cluster("two", speeds=(2.0, 1.0), step_seconds=1.0, bytes_per_second=1e12)
    >>> fleet = prsgd.Fleet(torch.nn.Linear(1, 1), 2)
    >>> optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    >>> with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), clock=ClusterClock(two)) as local:
    ...     for _ in range(8):
    ...         optimizer.zero_grad()
    ...         losses = fleet.backward(lambda out, _: out.sum(), torch.randn(2, 1, 1), torch.ones(2, 1))
    ...         optimizer.step()
    >>> local.records[0].modelled.waiting  # the fast one takes 2 seconds for 4 steps, the slow one 4
    (2.0, 0.0)
    """

    def __init__(self, cluster: Cluster, *, seed: int = 0) -> None:
        if not isinstance(cluster, Cluster):
            raise ValueError(f"cluster must be a Cluster, such as load('mixed', workers=4), got {cluster!r}")
        self.cluster, self.trace = cluster, Trace()
        n = len(cluster.speeds)
        self._seed = seed
        self._base: Vector = cluster.step_seconds / np.asarray(cluster.speeds, dtype=np.float64)
        self._draws: list[tuple[int, Vector]] = [(-1, np.zeros(0))] * n
        self._now: Vector = np.zeros(n)
        self._closed: Vector = np.zeros(n)
        self._steps: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        self._total: Vector = np.zeros(n)
        """Of all steps."""
        self._start, self._arrival = np.zeros(n), np.zeros(n)
        """Of the newest average, for each worker: when the last that it waits for had closed, and when it was there."""
        self._computing, self._waiting, self._communicating, self._hidden = (np.zeros(n) for _ in range(4))
        """Since the last average that landed on all."""

    def __call__(self, worker: int) -> float:
        return float(self._now[worker])

    def check(self, num_workers: int, hosted: range) -> None:
        if num_workers != len(self.cluster.speeds):
            raise ValueError(f"the cluster has {len(self.cluster.speeds)} workers, the run {num_workers}")
        if len(hosted) != num_workers:
            raise ValueError("a cluster's clock needs all workers in one process")

    def begin(self) -> None:
        """It begins at 0, or where the loaded state was."""

    def computed(self, places: Sequence[int]) -> None:
        chosen = np.asarray(places)
        seconds = self._durations(chosen)
        before = self._now[chosen]
        self._now[chosen] += seconds
        self._steps[chosen] += 1
        self._total[chosen] += seconds
        self._computing[chosen] += seconds
        self.trace.add("step", chosen, before, self._now[chosen], self._steps[chosen])

    def stepped(self, step: int) -> None:
        """The update takes no time of its own."""

    def closed(self, place: int) -> None:
        self._closed[place] = self._now[place]

    def launched(self, done: Sequence[int]) -> None:
        self._closed[done] = self._now[done]

    def arrived(self, sent: Sent, *, round: int, flight_seconds: float) -> Sequence[float]:
        n = len(self._now)
        if sent.hears is None:
            self._start = np.full(n, self._closed.max())
        else:
            self._start = np.array([self._closed[list(sources)].max() for sources in sent.hears])
        seconds = self.cluster.average_seconds(sent.bytes_sent, sent.server_bytes_sent, sent.hops)
        self._arrival = self._start + _ticks(seconds)
        self.trace.add("flight", range(n), self._closed.copy(), self._arrival.copy(), round)
        flights: list[float] = (self._arrival - self._closed).tolist()
        return flights

    def landed(self, place: int, round: int) -> None:
        here, start, arrival = float(self._now[place]), float(self._start[place]), float(self._arrival[place])
        copying = _ticks(self.cluster.copy_seconds)
        self._now[place] = max(here, arrival) + copying
        exposed = max(0.0, arrival - max(here, start))
        self._waiting[place] += max(0.0, start - here)
        self._communicating[place] += exposed + copying
        self._hidden[place] += arrival - start - exposed
        self.trace.add("blocked", place, here, float(self._now[place]), round)

    def completed(self) -> Modelled | None:
        parts = (self._computing, self._waiting, self._communicating, self._hidden)
        made = Modelled(float(self._now.max()), *(tuple(part.tolist()) for part in parts))
        for part in parts:
            part[:] = 0.0
        return made

    def step_seconds(self, place: int) -> float:
        return float(self._total[place] / self._steps[place]) if self._steps[place] else 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing passes between steps and averages."""
        yield

    def gathered(self, round: int) -> None:
        """An evaluation is free: workers are looked at where they are."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "cluster": dataclasses.asdict(self.cluster),
            "seed": self._seed,
            "vectors": {name: getattr(self, f"_{name}").tolist() for name in _VECTORS},
            "steps": self._steps.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "cluster" not in state:
            raise ValueError("the state is of a run without a cluster's clock")
        saved = dict(state["cluster"])
        if {**saved, "speeds": tuple(saved["speeds"])} != dataclasses.asdict(self.cluster):
            raise ValueError(f"the state is of another cluster than {self.cluster.name}")
        if state["seed"] != self._seed:
            raise ValueError(f"the state is of a clock with seed {state['seed']}, got {self._seed}")
        for name in _VECTORS:
            setattr(self, f"_{name}", np.asarray(state["vectors"][name], dtype=np.float64))
        self._steps = np.asarray(state["steps"], dtype=np.int64)

    def _durations(self, places: NDArray[np.int64]) -> Vector:
        seconds = self._base[places]
        if self.cluster.jitter:
            seconds = seconds * np.array([self._draw(int(place)) for place in places])
        rounded: Vector = np.maximum(1.0, np.ceil(seconds / TICK - 1e-6)) * TICK  # up: 8 of 20 ms fill 160 ms
        return rounded

    def _draw(self, place: int) -> float:
        """Log-normal with mean 1, from the worker's own stream: it depends on seed, worker and step alone."""
        step = int(self._steps[place])
        block, numbers = self._draws[place]
        if block != step // BLOCK:
            block = step // BLOCK
            numbers = np.random.default_rng((self._seed, place, block)).standard_normal(BLOCK)
            self._draws[place] = (block, numbers)
        jitter = self.cluster.jitter
        return math.exp(jitter * float(numbers[step % BLOCK]) - jitter**2 / 2)


class Sleeper:
    """Plays one worker of a cluster on a faster machine: sleeps until a step has taken what it takes there."""

    def __init__(self, cluster: Cluster, worker: int, seed: int = 0) -> None:
        self._clock, self._worker = ClusterClock(cluster, seed=seed), worker

    def wait(self, began: float) -> None:
        """The step began at this ``time.perf_counter()``."""
        before = self._clock(self._worker)
        self._clock.computed([self._worker])
        left = began + self._clock(self._worker) - before - time.perf_counter()
        if left > 0:
            time.sleep(left)


_VECTORS = ("now", "closed", "start", "arrival", "total", "computing", "waiting", "communicating", "hidden")


def _ticks(seconds: float) -> float:
    return round(seconds / TICK) * TICK
