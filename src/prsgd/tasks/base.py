"""What a task is: a model, data and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prsgd.metrics import ACCURACY, Metric

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class Data:
    """Samples in front, as they are kept in memory: images may be bytes, ``Task.prepare`` makes numbers of them."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    groups: Tensor | None = None
    """Which group each training sample belongs to, a whole number from 0; None: its label is its group."""
    group_names: tuple[str, ...] = ()
    """Empty: their numbers."""
    group_word: str = "class"
    """What a group is."""
    in_order: bool = False
    """Do the training samples follow each other, as in time, so that neighbours are alike?"""

    @property
    def labels(self) -> Tensor:
        """What a split deals the training samples by."""
        return self.train_y if self.groups is None else self.groups


def as_it_is(x: Tensor) -> Tensor:
    return x


def right_answers(out: Tensor, y: Tensor) -> Tensor:
    """How often the class with the largest number is the label.

    >>> right_answers(torch.tensor([[0.1, 0.9], [0.2, 0.8]]), torch.tensor([1, 0]))
    tensor(1)
    """
    return (out.argmax(dim=1) == y).sum()


@dataclass(frozen=True)
class Task:
    """Something to train."""

    name: str
    summary: str
    """One line for a list."""
    models: Mapping[str, Callable[[], nn.Module]]
    """By name; the first is the default."""
    load: Callable[[], Data]
    loss_fn: Callable[[Any, Any], Tensor] = nn.functional.cross_entropy
    metric: Metric | None = ACCURACY
    """What a model is judged by on the test set, beside its loss; None: by nothing else."""
    score_fn: Callable[[Any, Any], Tensor] = right_answers
    """That metric of the model's output and a batch's labels, summed over the samples."""
    training_looks: int = 5_000
    """Of the training samples so many are looked at in an evaluation, at most."""
    prepare: Callable[[Tensor], Tensor] = as_it_is
    """What the model sees of a batch (n, ...)."""
    augment: Augment | None = None
    """A random change of a training batch, before ``prepare``."""
    read: Callable[[bytes], Data] | None = None
    """The data that a file of the user's own holds; None: the task takes none."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What this task sets otherwise than the others: batch_size, epochs, ..."""
