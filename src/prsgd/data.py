"""One data set for many workers: batches are gathered from it by index, never copied per worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from prsgd._check import whole_number


@dataclass(frozen=True)
class Shards:
    """Equal shares of one data set, drawn anew each epoch: one permutation, shared by all workers.

    Every worker has the same number of steps an epoch; what is left over, less than a batch for each, waits for another
    epoch. ``workers`` are those hosted here, as in ``fleet.workers``: the others' batches are not fetched.

    >>> x, y = torch.arange(10.0), torch.arange(10)
    >>> shards = Shards(x, y, num_workers=2, batch_size=2)
    >>> shards.steps_per_epoch
    2
    >>> [xs.shape for xs, ys in shards.epoch(1)]  # worker, sample
    [torch.Size([2, 2]), torch.Size([2, 2])]
    """

    x: Tensor
    y: Tensor
    num_workers: int
    batch_size: int
    seed: int = 0
    workers: range | None = None

    def __post_init__(self) -> None:
        whole_number("num_workers", self.num_workers, at_least=1)
        whole_number("batch_size", self.batch_size, at_least=1)
        if len(self.x) != len(self.y):
            raise ValueError(f"x and y must have the same length, got {len(self.x)} and {len(self.y)}")
        if not self.steps_per_epoch:
            raise ValueError(
                f"batch_size must be at most {len(self.x) // self.num_workers} for {len(self.x)} samples and "
                f"{self.num_workers} workers, got {self.batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.x) // (self.num_workers * self.batch_size)

    def epoch(self, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The hosted workers' batches (n, batch_size, ...), step by step."""
        hosted = self.workers if self.workers is not None else range(self.num_workers)
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + number)
        size = self.num_workers * self.steps_per_epoch * self.batch_size
        chosen = torch.randperm(len(self.x), generator=generator)[:size]
        chosen = chosen.view(self.num_workers, self.steps_per_epoch, self.batch_size)[hosted.start : hosted.stop]
        for step in range(self.steps_per_epoch):
            yield self._gather(self.x, chosen[:, step]), self._gather(self.y, chosen[:, step])

    @staticmethod
    def _gather(data: Tensor, chosen: Tensor) -> Tensor:
        flat = data.index_select(0, chosen.reshape(-1).to(data.device))
        return flat.view(*chosen.shape, *data.shape[1:])
