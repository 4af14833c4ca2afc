"""What a task is: a model, data and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Augment = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, eq=False)
class Data:
    """Samples in front, as they are kept in memory: images may be bytes, ``Task.prepare`` makes numbers of them."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def as_it_is(x: Tensor) -> Tensor:
    return x


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
    has_accuracy: bool = True
    """Is the model's output a score for each class?"""
    prepare: Callable[[Tensor], Tensor] = as_it_is
    """What the model sees of a batch (n, ...)."""
    augment: Augment | None = None
    """A random change of a training batch, before ``prepare``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What this task sets otherwise than the others: batch_size, epochs, ..."""
