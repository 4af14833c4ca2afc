"""One data set for many workers: batches are gathered from it by index, never copied per worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from prsgd._check import whole_number
from prsgd.data.splits import Split, iid


@dataclass(frozen=True)
class Shards:
    """One data set dealt out to the workers; by default in equal shares, drawn anew each epoch.

    Every worker has the same number of steps an epoch; what is left over, less than a batch for each, waits for another
    epoch. ``split`` is who gets what: ``iid()``, ``pool()``, ``era()`` or ``dirichlet(alpha)`` of
    ``prsgd.data.splits``; it goes by ``labels``, one number for each sample, or else by ``y``.
    ``workers`` are those hosted here, as in ``fleet.workers``: the others' batches are not fetched.

    >>> import torch
    >>> x, y = torch.arange(10.0), torch.arange(10)
    >>> shards = Shards(x, y, num_workers=2, batch_size=2)
    >>> shards.steps_per_epoch
    2
    >>> [xs.shape for xs, ys in shards.epoch(1)]  # worker, sample
    [torch.Size([2, 2]), torch.Size([2, 2])]

    In a process of worker 1 alone, as under torchrun with ``workers=comm.workers``:

    >>> ours = Shards(x, y, num_workers=2, batch_size=2, workers=range(1, 2))
    >>> all(torch.equal(xs[0], every[1]) for (xs, _), (every, _) in zip(ours.epoch(1), shards.epoch(1)))
    True
    """

    x: Tensor
    y: Tensor
    num_workers: int
    batch_size: int
    seed: int = 0
    workers: range | None = None
    split: Split = field(default_factory=iid)
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        whole_number("num_workers", self.num_workers, at_least=1)
        whole_number("batch_size", self.batch_size, at_least=1)
        if len(self.x) != len(self.y):
            raise ValueError(f"x and y must have the same length, got {len(self.x)} and {len(self.y)}")
        if self.labels is not None and len(self.labels) != len(self.x):
            raise ValueError(f"labels must be as many as the samples {len(self.x)}, got {len(self.labels)}")
        if self.workers is not None and self.workers != range(self.num_workers)[self.workers.start : self.workers.stop]:
            raise ValueError(f"workers must be a range within 0 ... {self.num_workers - 1}, got {self.workers}")
        if self.num_workers > len(self.x):
            raise ValueError(f"num_workers must be at most the number of samples {len(self.x)}, got {self.num_workers}")
        if not self.steps_per_epoch:
            raise ValueError(
                f"batch_size must be at most {len(self.x) // self.num_workers} for {len(self.x)} samples and "
                f"{self.num_workers} workers, got {self.batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        return len(self.x) // (self.num_workers * self.batch_size)

    def epoch(self, number: int, *, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The hosted workers' batches (n, batch_size, ...), step by step, from step ``start`` on."""
        for chosen in self.indices(number)[start:]:
            yield self.gather(self.x, chosen), self.gather(self.y, chosen)

    def indices(self, number: int) -> Tensor:
        """Which samples the hosted workers see in an epoch: (steps, n, batch_size)."""
        hosted = self.workers if self.workers is not None else range(self.num_workers)
        per_worker = self.steps_per_epoch * self.batch_size
        labels = self.y if self.labels is None else self.labels
        chosen = self.split.deal(labels, self.num_workers, per_worker, seed=self.seed, epoch=number)
        chosen = chosen.view(self.num_workers, self.steps_per_epoch, self.batch_size)[hosted.start : hosted.stop]
        return chosen.transpose(0, 1)

    @staticmethod
    def gather(data: Tensor, chosen: Tensor) -> Tensor:
        """``data[chosen]``, faster."""
        flat = data.index_select(0, chosen.reshape(-1).to(data.device))
        return flat.view(*chosen.shape, *data.shape[1:])
