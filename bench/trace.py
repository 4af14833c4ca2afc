"""What the trace costs: steps of the digits MLP with it and without (twice, to see the noise). Target: under 2 %.

python bench/trace.py
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

import prsgd
from prsgd.clocks.trace import Trace
from prsgd.clocks.wall import WallClock
from prsgd.tasks import digits

PASSES, STEPS = 60, 150


class Silent(WallClock):
    """Keeps time for rounds by the clock, and no trace."""

    def computed(self, places: Any) -> None:
        pass

    def stepped(self, step: int) -> None:
        pass

    def launched(self, done: Any) -> None:
        pass

    def arrived(self, sent: Any, **_: Any) -> list[float]:
        return []

    def landed(self, place: int, round: int) -> None:
        pass


def run(workers: int) -> None:
    data = digits.load()
    x, y = data.train_x[: workers * 8].unflatten(0, (workers, 8)), data.train_y[: workers * 8].view(workers, 8)
    loops = []
    for clock in (None, Silent(range(workers)), Silent(range(workers))):
        fleet = prsgd.Fleet(digits.mlp(), workers)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.01, momentum=0.9, foreach=True)
        local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(8), clock=clock)
        loops.append((fleet, optimizer, local.start()))
    times: list[list[float]] = [[], [], []]
    for number in range(PASSES):
        for turn in range(3):
            found, (fleet, optimizer, _local) = times[(number + turn) % 3], loops[(number + turn) % 3]
            began = time.perf_counter()
            for _ in range(STEPS):
                optimizer.zero_grad()
                fleet.backward(torch.nn.functional.cross_entropy, x, y)
                optimizer.step()
            found.append((time.perf_counter() - began) / STEPS)
    for *_, local in loops:
        local.finish()
    traced, silent, other = map(median, times)
    print(
        f"{workers} workers: {1e6 * traced:.1f} us a step, without {1e6 * silent:.1f} and {1e6 * other:.1f} us: "
        f"{2 * traced / (silent + other) - 1:+.1%} (the two without differ by {abs(silent / other - 1):.1%})"
    )
    trace, began = Trace(), time.perf_counter()
    for step in range(100_000):
        trace.add("step", 0, 0.0, 1.0, step)
    print(f"  one entry: {10 * (time.perf_counter() - began):.2f} us")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for workers in (1, 8):
        run(workers)
