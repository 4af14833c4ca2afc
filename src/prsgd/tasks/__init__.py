"""Models with their data and loss, by name."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from prsgd._check import nearest, shown
from prsgd.errors import DataError
from prsgd.tasks import by_path

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


def find(name: str, sha256: str | None = None) -> Task:
    """The task of this name, or in a file of the user's own, which is run; one with another SHA-256 is refused.

    >>> find("digits").summary
    'handwritten digits 8x8, embedded: 1,437 train, 360 test'
    """
    place = _own(name)
    if place is not None:
        return by_path.find(place, sha256)
    task: Task = import_module(MODULES[name]).TASK
    return task


def known_by(name: str) -> dict[str, str]:
    """Of a task of the user's own, fields of a config: how to find it from every folder, and by what to know it and its
    data again. Nothing of one of ours."""
    place = _own(name)
    if place is None:
        return {}
    data = by_path.find(place, None).load()
    return {"task": place.name, "task_sha256": by_path.sha256_of(place), "data_sha256": _digest(data)}


def short(name: str) -> str:
    """As people call it, and a folder.

    >>> short("digits"), short("/home/ann/flowers.py"), short("/home/ann/flowers.py:roses")
    ('digits', 'flowers', 'flowers-roses')
    """
    place, _, which = name.rpartition(":") if ":" in Path(name).name else (name, "", "")
    stem = Path(place).name.removesuffix(".py")
    return f"{stem}-{which}" if which else stem


def _own(name: str) -> by_path.Place | None:
    """Where the user's own is; None: it is one of ours."""
    if name in MODULES:
        return None
    place = by_path.locate(name)
    if place is None:
        raise ValueError(
            f"task must be one of {', '.join(map(repr, MODULES))}, or a file of your own such as mytask.py, "
            f"got {shown(name)}{nearest(name, MODULES)}"
        )
    return place


@lru_cache(maxsize=1)
def load(name: str, file: str | None = None, sha256: str | None = None) -> Data:
    """The data of this task, or those in a file of the user's own: read and checked once, however often a run asks.

    A file whose SHA-256 is another than ``sha256`` is refused, and data of a user's own task.
    """
    task = find(name)
    if file is None:
        data = task.load()
        if sha256 is not None and (found := _digest(data)) != sha256:
            raise DataError(
                f"data have changed since the run was begun: those of task {name} have the SHA-256 {found[:16]}..., "
                f"not {sha256[:16]}...; does the file read or draw others each time?"
            )
        return data
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


def _digest(data: Data) -> str:
    from prsgd.tasks.own import digest  # which imports torch

    return digest(data)


def _content(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"data must be a file that can be read, got {file!r}: {reason}") from None
