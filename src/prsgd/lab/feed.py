"""What the workers of a run train on, step by step: a config's data, dealt out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from prsgd import tasks
from prsgd.data import splits
from prsgd.data.shards import Shards
from prsgd.lab.config import Config
from prsgd.tasks.base import Data, Task


def load(config: Config) -> Data:
    """The data of a run, whole."""
    return tasks.load(config.task, config.data, config.data_sha256)


def deal(config: Config, data: Data, workers: range | None = None) -> Shards:
    """The data of a run, dealt out."""
    split = splits.parse(config.split)
    if isinstance(split, splits.era) and not data.in_order:
        raise ValueError(
            f"split era deals out samples that stand in the order of time, and those of task {config.task} do not: "
            "take pool, iid or dirichlet:ALPHA"
        )
    assert config.batch_size is not None
    if config.workers > len(data.train_x):
        raise ValueError(f"workers must be at most the {len(data.train_x)} samples, got {config.workers}")
    return Shards(
        data.train_x,
        data.train_y,
        num_workers=config.workers,
        batch_size=config.batch_size,
        seed=config.seed,
        workers=workers,
        split=split,
        labels=data.labels,
    )


def who_saw_what(config: Config) -> dict[str, Any]:
    """How many samples of each group each worker sees in the first epoch; what the groups are, and their names."""
    data = load(config)
    shards = deal(config, data)
    seen = data.labels[shards.indices(0)].transpose(0, 1).flatten(1)
    size = int(data.labels.max()) + 1
    names = data.group_names or tuple(map(str, range(size)))
    return {"counts": [row.bincount(minlength=size).tolist() for row in seen], "names": names, "word": data.group_word}


def num_steps(config: Config, shards: Shards) -> int:
    """Steps of each worker; of workers of different speeds, their mean."""
    return config.steps if config.steps is not None else (config.epochs or 0) * shards.steps_per_epoch


def stream(config: Config, *, first_epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """A lone worker's batches as its model sees them, without end."""
    task = tasks.find(config.task, config.task_sha256)
    shards = deal(config, load(config))
    for epoch in itertools.count(first_epoch):
        for x, y in shards.epoch(epoch):
            yield task.prepare(x[0]), y[0]


class Feed:
    """The hosted workers' batches. Each worker goes through its own part of each epoch at its own pace."""

    def __init__(self, config: Config, task: Task, data: Data, shards: Shards, workers: range) -> None:
        self._config, self._task, self._data, self._shards, self._workers = config, task, data, shards, workers
        self._epochs: dict[int, Tensor] = {}

    def batch(self, steps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """For hosted workers that have taken so many steps: (n, batch, ...) and (n, batch)."""
        length = self._shards.steps_per_epoch
        for epoch in [epoch for epoch in self._epochs if epoch < min(steps) // length]:
            del self._epochs[epoch]
        if min(steps) == max(steps):
            chosen = self._indices(steps[0] // length)[steps[0] % length]
        else:
            chosen = torch.stack([self._indices(step // length)[step % length, i] for i, step in enumerate(steps)])
        return self._inputs(chosen, steps), Shards.gather(self._data.train_y, chosen)

    def _indices(self, epoch: int) -> Tensor:
        if epoch not in self._epochs:
            self._epochs[epoch] = self._shards.indices(epoch)
        return self._epochs[epoch]

    def _inputs(self, chosen: Tensor, steps: Sequence[int]) -> Tensor:
        x = Shards.gather(self._data.train_x, chosen)
        if self._task.augment is not None:
            seeds = (splits.mixed(self._config.seed, step, worker) for step, worker in zip(steps, self._workers))
            generators = (torch.Generator().manual_seed(seed) for seed in seeds)
            x = torch.stack([self._task.augment(part, generator) for part, generator in zip(x, generators)])
        seen: Tensor = self._task.prepare(x.flatten(0, 1)).unflatten(0, chosen.shape)
        return seen
