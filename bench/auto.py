"""What ``auto()`` costs: steps of the digits MLP with it and with a fixed period of the same length (twice, to see the
noise). Target: at most 3 %.

python bench/auto.py

It looks at the gradients of two steps in every 16, and thinks at every average. Printed are the training thread's own
seconds, which other programs on the machine do not change much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch.nn.parameter import Parameter

import prsgd
from prsgd.tasks import digits

PASSES, STEPS, PERIOD = 30, 160, 8


def run(workers: int, make: Callable[[Iterator[Parameter]], torch.optim.Optimizer]) -> str:
    data = digits.load()
    x, y = data.train_x[: workers * 8].unflatten(0, (workers, 8)), data.train_y[: workers * 8].view(workers, 8)
    loops = []
    for schedule in (prsgd.auto(tolerance=1e9, longest=PERIOD), prsgd.every(PERIOD), prsgd.every(PERIOD)):
        fleet = prsgd.Fleet(digits.mlp(), workers)
        optimizer = make(fleet.parameters())
        loops.append((fleet, optimizer, prsgd.LocalSGD(fleet, optimizer, schedule=schedule).start()))
    times: list[list[float]] = [[], [], []]
    for number in range(PASSES + 1):
        for turn in range(3):
            which = (number + turn) % 3
            fleet, optimizer, _ = loops[which]
            began = time.thread_time()
            for _ in range(STEPS):
                optimizer.zero_grad()
                fleet.backward(torch.nn.functional.cross_entropy, x, y)
                optimizer.step()
            if number:  # in the first one its period grows
                times[which].append((time.thread_time() - began) / STEPS)
    for *_, local in loops:
        local.finish()
    own, fixed, other = (1e6 * median(found) for found in times)
    return (
        f"{workers} workers, {type(optimizer).__name__}: {own:.0f} us a step, with every({PERIOD}) {fixed:.0f} and "
        f"{other:.0f} us: {2 * own / (fixed + other) - 1:+.1%} (those two differ by {abs(fixed / other - 1):.1%})"
    )


def main() -> None:
    torch.set_num_threads(1)
    for workers in (2, 8):
        print(run(workers, partial(torch.optim.SGD, lr=0.01, momentum=0.9, foreach=True)), flush=True)
        print(run(workers, partial(torch.optim.AdamW, lr=0.001, foreach=True)), flush=True)


if __name__ == "__main__":
    main()
