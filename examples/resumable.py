"""A loop that may be killed: every worker saves its state now and then, and torchrun starts what has died again.

torchrun --nproc-per-node 3 --max-restarts 3 examples/resumable.py runs/resumable
kill -9 PID                        # of any worker, in another terminal, while it trains
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import prsgd
from prsgd.tasks import digits


def batches(worker: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's, in an order that is the same whenever it is started."""
    data = digits.load()
    generator = torch.Generator().manual_seed(worker)
    while True:
        chosen = torch.randint(len(data.train_y), (16,), generator=generator)
        yield data.train_x[chosen], data.train_y[chosen]


def main(folder: Path, steps: int = 2000, pause_seconds: float = 0.005) -> None:
    """Train for so many steps in all, however often it is started."""
    torch.set_num_threads(1)
    comm = prsgd.init()
    worker = comm.workers.start
    torch.manual_seed(0)
    model = digits.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(8))

    with prsgd.resumable(folder, local, every=10, model=model, optimizer=optimizer) as run:
        print(f"worker {worker} of {comm.num_workers}: PID {os.getpid()}, from step {run.step} on", flush=True)
        for x, y in itertools.islice(batches(worker), run.step, steps):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            run.tick()
            time.sleep(pause_seconds)  # so that there is time to kill it

    data = digits.load()
    accuracy = (model(data.test_x).argmax(dim=1) == data.test_y).float().mean()
    print(f"worker {worker}: test accuracy {accuracy:.1%} after {local.step} steps", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/resumable"))
