"""What a step of the text task costs: a fleet of GPTs against as many plain modules, one thread.

    python bench/text.py                     # tiny, 8 workers, batches of 1, 4 and 8: a few minutes
    python bench/text.py --model small --pairs 3

All variants take the same step (AdamW, gradients clipped, 128 bytes a sample) in turns. Printed are medians of the
thread's own seconds, which other programs on the machine do not change much. "auto" is what a fleet chooses.

What the methods reach on this task is docs/results/text.md, made by ``bench/text_methods.py``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn

import prsgd
from prsgd.tasks.text import CONTEXT, TASK, next_byte_loss

BATCHES = (1, 4, 8)


def plain(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """The loop that a user would write."""
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-3) for module in modules]

    def step() -> None:
        for module, optimizer, x_i, y_i in zip(modules, optimizers, x, y):
            optimizer.zero_grad()
            next_byte_loss(module(x_i), y_i).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()

    return step


def ours(fleet: prsgd.Fleet, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(fleet.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        fleet.backward(next_byte_loss, x, y)
        fleet.clip_grad_norm_(1.0)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=list(TASK.models))
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=7, help="turns (7)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    make = TASK.models[args.model]
    print("batch   plain s  auto is   auto s   vmap s   auto / plain")
    for batch in BATCHES:
        window = torch.randint(256, (args.workers, batch, CONTEXT + 1))
        x, y = window[..., :-1], window[..., 1:]
        fleets = {mode: prsgd.Fleet(make(), args.workers, mode=mode) for mode in ("auto", "vmap")}
        steps = {"plain": plain([make() for _ in range(args.workers)], x, y)}
        steps |= {mode: ours(fleet, x, y) for mode, fleet in fleets.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(args.pairs + 1):
            for name, step in steps.items():
                began = time.thread_time()
                step()
                if turn:  # the first one loads what it needs
                    seconds[name].append(time.thread_time() - began)
        found = {name: median(values) for name, values in seconds.items()}
        print(
            f"{batch:>5} {found['plain']:>9.3f}  {fleets['auto'].mode:<7} {found['auto']:>8.3f} {found['vmap']:>8.3f} "
            f"{found['auto'] / found['plain']:>14.2f}"
        )


if __name__ == "__main__":
    main()
