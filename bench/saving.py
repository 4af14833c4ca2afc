"""What saving costs: the digits MLP under ``prsgd.resumable`` with one state per 50 averages of 8 steps, and without
(twice, to see the noise). Target: under 2 % of the steps. Then a long run, whose memory must not grow.

python bench/saving.py [--soak 200000]
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import prsgd
from prsgd.tasks import digits

PASSES, PERIOD, EVERY = 20, 8, 50


class Loop:
    """One run, of which blocks of steps are taken."""

    def __init__(self, folder: Path | None) -> None:
        data = digits.load()
        self._x, self._y = data.train_x[:8], data.train_y[:8]
        self._model = digits.mlp()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01, momentum=0.9)
        self._local = prsgd.LocalSGD(self._model, self._optimizer, schedule=prsgd.every(PERIOD))
        self._run = None
        if folder is None:
            self._local.start()
        else:
            held = {"model": self._model, "optimizer": self._optimizer}
            self._run = prsgd.resumable(folder, self._local, every=EVERY, **held).__enter__()

    def take(self, steps: int) -> float:
        """Returns the seconds of a step."""
        began = time.perf_counter()
        for _ in range(steps):
            self._optimizer.zero_grad()
            torch.nn.functional.cross_entropy(self._model(self._x), self._y).backward()
            self._optimizer.step()
            if self._run is not None:
                self._run.tick()
        return (time.perf_counter() - began) / steps

    def end(self) -> None:
        if self._run is not None:
            self._run.__exit__(None, None, None)


def cost() -> None:
    with tempfile.TemporaryDirectory() as folder:
        loops = [Loop(Path(folder)), Loop(None), Loop(None)]
        times: list[list[float]] = [[], [], []]
        for number in range(PASSES):
            for turn in range(3):
                which = (number + turn) % 3
                times[which].append(loops[which].take(PERIOD * EVERY))
        loops[0].end()
    saving, plain, again = times
    share = median(a / b for a, b in zip(saving, plain)) - 1
    noise = median(a / b for a, b in zip(again, plain)) - 1
    print(
        f"{1e6 * median(saving):.1f} us a step, without {1e6 * median(plain):.1f} us: {share:+.1%} ({noise:+.1%} noise)"
    )


def soak(steps: int) -> None:
    """Rounds of one step, so that records and spans come fastest."""
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(1)) as local:
        for taken in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            if taken % (steps // 10) == 0:
                kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                print(f"{local.round:,} averages, {len(local.records):,} records kept: {kept:.0f} MB at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cost()
    if args.soak:
        soak(args.soak)


if __name__ == "__main__":
    main()
