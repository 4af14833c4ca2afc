"""Models with their data and loss, by name."""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

from prsgd._check import one_of

if TYPE_CHECKING:
    from prsgd.tasks.base import Data, Task

MODULES = {
    "digits": "prsgd.tasks.digits",
    "fashion-mnist": "prsgd.tasks.fashion_mnist",
    "cifar10": "prsgd.tasks.cifar10",
    "cifar10-16px": "prsgd.tasks.cifar10_16px",
    "synthetic": "prsgd.tasks.synthetic",
}
"""Each has a ``TASK``. Loaded when asked for: they import torch."""


def find(name: str) -> Task:
    """The task of this name.

    >>> find("digits").summary
    'handwritten digits 8x8, embedded: 1,437 train, 360 test'
    """
    task: Task = import_module(MODULES[one_of("task", name, MODULES)]).TASK
    return task


@lru_cache(maxsize=1)
def load(name: str) -> Data:
    """The data of this task: read and checked once, however often a run asks."""
    return find(name).load()
