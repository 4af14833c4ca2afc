"""Models with their data and loss, by name."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from prsgd._check import one_of
from prsgd.errors import DataError

if TYPE_CHECKING:
    from prsgd.tasks.base import Data, Task

MODULES = {
    "digits": "prsgd.tasks.digits",
    "fashion-mnist": "prsgd.tasks.fashion_mnist",
    "cifar10": "prsgd.tasks.cifar10",
    "cifar10-16px": "prsgd.tasks.cifar10_16px",
    "synthetic": "prsgd.tasks.synthetic",
    "text": "prsgd.tasks.text",
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
def load(name: str, file: str | None = None, sha256: str | None = None) -> Data:
    """The data of this task, or those in a file of the user's own: read and checked once, however often a run asks.

    A file whose SHA-256 is another than ``sha256`` is refused.
    """
    task = find(name)
    if file is None:
        return task.load()
    content = _content(file)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise DataError(
            f"data has changed since the run was begun: {file} has the SHA-256 {found[:16]}..., not {sha256[:16]}..."
        )
    if task.read is None:
        raise ValueError(f"task {name} takes no data of your own, got {file!r}")
    try:
        return task.read(content)
    except ValueError as error:
        raise ValueError(f"data {error}: {file}") from None


def sha256_of(file: str) -> str:
    """Of a file that is to be trained on."""
    return hashlib.sha256(_content(file)).hexdigest()


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"data must be a file that can be read, got {file!r}: {reason}") from None
