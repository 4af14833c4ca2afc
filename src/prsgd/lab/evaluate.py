"""Looking at a run's consensus: its losses and its score, on the data of the task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prsgd.replicas.fleet import Fleet
from prsgd.tasks.base import Data, Task

BATCH = 500
"""Samples that go through the model at once, of one label each; of sequences fewer."""


@dataclass(frozen=True)
class Look:
    """What all processes have found together, the same in each of them."""

    train_loss: float
    test_loss: float
    test_score: float | None
    """By the task's metric; None where it has none."""
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
    train_loss, train_size, test_loss, test_size, score, stop, all_steps = sums.tolist()
    return Look(
        train_loss=train_loss / train_size,
        test_loss=test_loss / test_size,
        test_score=None if task.metric is None else score / test_size,
        stop=stop > 0,
        steps=all_steps,
    )


@torch.no_grad()
def _sums(model: nn.Module, task: Task, data: Data, fleet: Fleet) -> list[float]:
    """Train loss and samples, test loss and samples, test score: sums over this process's part of the samples.

    Of the training samples some are taken that lie evenly spaced, since they may be in an order; of the test set all.
    """
    model.eval()
    workers, everyone = fleet.workers, fleet.num_workers
    found: list[float] = []
    score = 0.0
    apart = -(-len(data.train_x) // task.training_looks)
    batch = max(1, BATCH // round(data.test_y[0].numel() ** 0.5))
    for x, y in ((data.train_x[::apart], data.train_y[::apart]), (data.test_x, data.test_y)):
        mine = range(len(x) * workers.start // everyone, len(x) * workers.stop // everyone)
        total = score = 0.0
        for begin in range(mine.start, mine.stop, batch):
            end = min(begin + batch, mine.stop)
            out = model(task.prepare(x[begin:end]))
            total += float(task.loss_fn(out, y[begin:end])) * (end - begin)
            if task.metric is not None:
                score += float(task.score_fn(out, y[begin:end]))
        found += [total, float(len(mine))]
    model.train()
    return [*found, score]
