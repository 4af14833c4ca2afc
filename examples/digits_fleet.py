"""Eight workers in one process learn the embedded digits and average their models every 1 and every 8 steps.

python examples/digits_fleet.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import prsgd
from prsgd.data.shards import Shards
from prsgd.tasks import digits
from prsgd.tasks.base import Data

NUM_WORKERS = 8


@dataclass(frozen=True)
class Result:
    """How one period ended."""

    period: int
    loss: float
    """Of the final model, over all training images."""
    accuracy: float
    """Of the final model, over all test images."""
    rounds: int
    megabytes: float
    """Sent by each worker."""


def main(epochs: int = 20, periods: Sequence[int] = (1, 8)) -> list[Result]:
    """Train once per period, print a table, return its numbers."""
    torch.set_num_threads(1)  # the model is tiny: more threads only wait for one another
    data = digits.load()
    print(f"{NUM_WORKERS} workers, MLP 64-64-10, {len(data.train_x):,} digits, {epochs} epochs")
    print()
    print("period   training loss   test accuracy   rounds   MB sent per worker")
    results = []
    for period in periods:
        result = train(data, period=period, epochs=epochs)
        print(
            f"{result.period:>6}   {result.loss:>13.4f}   {result.accuracy:>12.1%}    {result.rounds:>6}   "
            f"{result.megabytes:>18.2f}"
        )
        results.append(result)
    print()
    print(conclusion(results[0], results[-1]))
    return results


def train(data: Data, *, period: int, epochs: int, batch_size: int = 8, lr: float = 0.1) -> Result:
    """Train eight copies of one MLP, which end as one model."""
    torch.manual_seed(0)
    fleet = prsgd.Fleet(digits.mlp(), NUM_WORKERS)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=lr, momentum=0.9)
    shards = Shards(data.train_x, data.train_y, num_workers=NUM_WORKERS, batch_size=batch_size)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(period)) as local:
        for epoch in range(epochs):
            for x, y in shards.epoch(epoch):  # (worker, sample, ...)
                optimizer.zero_grad()
                fleet.backward(cross_entropy, x, y)
                optimizer.step()
    loss, accuracy = evaluate(fleet.modules[0], data)  # all workers ended with the same model
    sent_bytes = sum(record.bytes_sent for record in local.records)
    return Result(period, loss, accuracy, len(local.records), sent_bytes / 1e6)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> tuple[float, float]:
    """Training loss and test accuracy."""
    loss = cross_entropy(model(data.train_x), data.train_y)
    right = (model(data.test_x).argmax(dim=1) == data.test_y).sum()
    return float(loss), float(right) / len(data.test_y)


def conclusion(first: Result, last: Result) -> str:
    """One sentence that compares the last period with the first."""
    points = round(100 * (last.accuracy - first.accuracy), 1)
    outcome = f"{abs(points):.1f} points {'higher' if points > 0 else 'lower'}" if points else "the same"
    ratio = first.megabytes / last.megabytes
    return (
        f"Period {last.period} sent {ratio:.1f} times fewer bytes than period {first.period};\n"
        f"its test accuracy is {outcome}."
    )


if __name__ == "__main__":
    main()
