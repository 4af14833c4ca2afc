"""Looking at a run's consensus: its losses and its accuracy, on the data of the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prsgd.replicas.fleet import Fleet
from prsgd.tasks.base import Data, Task

TRAINING_SAMPLES = 5_000
"""In an evaluation, at most; the test set is taken whole."""
BATCH = 500


@dataclass(frozen=True)
class Look:
    """What all processes have found together, the same in each of them."""

    train_loss: float
    test_loss: float
    test_accuracy: float | None
    """None where the task has none."""
    stop: bool
    """Was any process asked to stop?"""
    steps: float
    """Of all workers together."""


def look_at(
    model: nn.Module, task: Task, data: Data, fleet: Fleet, *, steps: int, should_stop: Callable[[], bool]
) -> Look:
    """Evaluate ``model``, each process on its part of the samples; and learn whether to stop.

    ``steps`` are those of the workers that are hosted here.
    """
    own = [*_sums(model, task, data, fleet), float(should_stop()), float(steps)]
    sums = torch.tensor(own, dtype=torch.float64)
    if len(fleet.workers) < fleet.num_workers:
        summed: Tensor = fleet.comm.all_reduce(sums.to(data.train_x.device)).wait()
        sums = summed.cpu()
    train_loss, train_size, test_loss, test_size, right, stop, all_steps = sums.tolist()
    return Look(
        train_loss=train_loss / train_size,
        test_loss=test_loss / test_size,
        test_accuracy=right / test_size if task.has_accuracy else None,
        stop=stop > 0,
        steps=all_steps,
    )


@torch.no_grad()
def _sums(model: nn.Module, task: Task, data: Data, fleet: Fleet) -> list[float]:
    """Train loss and samples, test loss and samples, right answers: sums over this process's part of the samples."""
    model.eval()
    workers, everyone = fleet.workers, fleet.num_workers
    found: list[float] = []
    right = 0.0
    for x, y in ((data.train_x[:TRAINING_SAMPLES], data.train_y), (data.test_x, data.test_y)):
        mine = range(len(x) * workers.start // everyone, len(x) * workers.stop // everyone)
        total = right = 0.0
        for begin in range(mine.start, mine.stop, BATCH):
            end = min(begin + BATCH, mine.stop)
            out = model(task.prepare(x[begin:end]))
            total += float(task.loss_fn(out, y[begin:end])) * (end - begin)
            if task.has_accuracy:
                right += float((out.argmax(dim=1) == y[begin:end]).sum())
        found += [total, float(len(mine))]
    model.train()
    return [*found, right]
