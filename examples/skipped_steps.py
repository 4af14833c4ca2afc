"""Mixed precision: a step that GradScaler skips is no step, and averages fall on multiples of the steps that ran.

    torchrun --nproc-per-node 4 examples/skipped_steps.py
    python examples/skipped_steps.py

Gradients overflow now and then in half precision. GradScaler sees it, skips the step and halves its scale. Here the
overflow is put in by hand, on other batches for every worker, so the workers take their steps at different batches.
Averages match by round, so nothing hangs: a worker that skipped comes to its average one batch later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import prsgd
from prsgd.tasks import digits


@dataclass(frozen=True)
class Result:
    """What one worker did."""

    batches: int
    steps: int
    skipped: list[int]
    """The batches that gave no step."""
    landings: list[int]
    """The steps at which averages landed."""


def main(num_batches: int = 40, period: int = 8, batch_size: int = 32) -> Result:
    """Train, print on worker 0, return what this worker did."""
    torch.set_num_threads(1)
    comm = prsgd.init()
    worker, num_workers = comm.workers.start, comm.num_workers
    data = digits.load()
    order = torch.Generator().manual_seed(worker)
    torch.manual_seed(0)
    model = digits.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    skipped = []
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(period)) as local:
        for batch in range(1, num_batches + 1):
            chosen = torch.randint(len(data.train_x), (batch_size,), generator=order)
            optimizer.zero_grad()
            loss = cross_entropy(model(data.train_x[chosen]), data.train_y[chosen])
            scaler.scale(loss).backward()
            if batch % 10 == 3 + worker % 7:
                overflow(model)
            before = local.step
            scaler.step(optimizer)
            scaler.update()
            if local.step == before:
                skipped.append(batch)

    result = Result(num_batches, local.step, skipped, [record.step for record in local.records])
    if worker == 0:
        print(f"worker 0 of {num_workers}: {num_batches} batches, of which GradScaler skipped {skipped}")
        print(f"steps that ran: {result.steps}; averages landed at steps {result.landings}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def overflow(model: torch.nn.Module) -> None:
    """What half precision does to a gradient that is too large."""
    gradient = next(model.parameters()).grad
    assert gradient is not None
    gradient.view(-1)[0] = float("inf")


if __name__ == "__main__":
    main()
