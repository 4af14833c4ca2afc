"""What the experiment runner adds to a step: fetching, augmenting and recording, as a share of the whole step.

    python bench/experiment.py            # about two minutes
    python bench/experiment.py --quick    # does it run?

One thread, in one process. The steps' own work (zero_grad, backward, optimizer.step with its averages) is timed in a
real run; what is left of the run's training time is bookkeeping and data. Evaluations and checkpoints come beside it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from prsgd.lab.config import Config
from prsgd.lab.folder import prepare
from prsgd.lab.run import run
from prsgd.replicas.fleet import Fleet


class Stopwatch:
    """Adds up the seconds of the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        timed.hooked = True  # type: ignore[attr-defined]  # torch wraps a step that is not, and would call hooks outside
        return timed


def measure(config: Config) -> tuple[float, float]:
    """Milliseconds of a step, and the share of it that is not the step's own work."""
    watch = Stopwatch()
    torch.optim.SGD([torch.zeros(1)])  # from now on its step calls the hooks itself: averages are inside
    originals = Fleet.backward, torch.optim.SGD.step, torch.optim.SGD.zero_grad
    Fleet.backward = watch.wrap(Fleet.backward)  # type: ignore[method-assign]
    torch.optim.SGD.step = watch.wrap(torch.optim.SGD.step)  # type: ignore[method-assign]
    torch.optim.SGD.zero_grad = watch.wrap(torch.optim.SGD.zero_grad)  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as place:
            prepare(config, Path(place))
            summary = run(config, Path(place))
    finally:
        Fleet.backward, torch.optim.SGD.step, torch.optim.SGD.zero_grad = originals  # type: ignore[method-assign]
    return 1e3 * summary.seconds / summary.steps, 1 - watch.seconds / summary.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Bookkeeping and data as a share of a step.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few steps, no meaningful numbers")
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        (Config(task="digits", period=8, steps=20 if args.quick else 880), 10),
        (Config(task="digits", period=1, steps=20 if args.quick else 880), 10),
        (Config(task="cifar10", period=8, workers=8, steps=2 if args.quick else 40), 2),
    ]
    print("| run | ms a step | bookkeeping and data | at most |\n|---|---|---|---|")
    for config, limit in cases:
        milliseconds, share = measure(config.resolve())
        name = f"{config.task}, 8 workers, period {config.period}"
        print(f"| {name} | {milliseconds:.2f} | {share:.1%} | {limit} % |", flush=True)


if __name__ == "__main__":
    main()
