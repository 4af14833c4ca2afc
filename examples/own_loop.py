"""Your own training loop on two processes. Two lines make it PR-SGD: ``prsgd.init()`` and ``with prsgd.LocalSGD``.

torchrun --nproc-per-node 2 examples/own_loop.py
python examples/own_loop.py        # one process, the same program
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import prsgd
from prsgd.tasks import digits
from prsgd.tasks.base import Data


def main(epochs: int = 4, period: int = 8, batch_size: int = 16) -> list[float]:
    """Train, print on worker 0, return the averaged model's test accuracy after each epoch and at the end."""
    torch.set_num_threads(1)
    comm = prsgd.init()
    worker, num_workers = comm.workers.start, comm.num_workers

    data = digits.load()
    train_set = TensorDataset(data.train_x, data.train_y)
    # It pads, so that all workers reach the end of an epoch at the same step; without that, see `local.epoch()`.
    sampler: DistributedSampler[int] = DistributedSampler(train_set, num_replicas=num_workers, rank=worker)
    loader = DataLoader(train_set, batch_size=batch_size, sampler=sampler)
    torch.manual_seed(worker)  # the models differ here; all start from worker 0's
    model = digits.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    accuracies = []
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(period), overlap=1) as local:
        for epoch in range(1, epochs + 1):
            sampler.set_epoch(epoch)
            for x, y in loader:
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
            with local.consensus() as averaged:  # all workers come here; then each has its own model again
                accuracies.append(accuracy(averaged, data))
            if worker == 0:
                print(f"epoch {epoch}, step {local.step}: test accuracy of the averaged model {accuracies[-1]:.1%}")

    accuracies.append(accuracy(model, data))
    if worker == 0:
        sent_megabytes = local.totals.bytes_sent / 1e6
        print(f"all workers ({num_workers}) ended with one model: test accuracy {accuracies[-1]:.1%}")
        print(f"{local.totals.rounds} averages in {local.step} steps, {sent_megabytes:.2f} MB sent by each worker")
    if dist.is_initialized():
        dist.destroy_process_group()
    return accuracies


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Over all test images."""
    return float((model(data.test_x).argmax(dim=1) == data.test_y).float().mean())


if __name__ == "__main__":
    main()
