"""A user's own task by where it is: ``mytask.py`` or ``package.module``, and if it has several, ``mytask.py:name``."""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from prsgd.errors import DataError

if TYPE_CHECKING:
    from prsgd.tasks.base import Task

EXAMPLE = "task = prsgd.task(model=..., train=..., test=..., loss=...)"


@dataclass(frozen=True)
class Place:
    """Where a task is."""

    path: Path
    module: str | None
    """Its dotted name; None: the file is run by itself."""
    which: str | None
    """The task's name in it; None: the only one."""

    @property
    def name(self) -> str:
        """That finds it again: a file from every folder."""
        return f"{self.module or self.path}{f':{self.which}' if self.which else ''}"


def locate(name: str) -> Place | None:
    """Where the task is that was called so; None if that is neither a file's name nor a module's."""
    file = re.fullmatch(r"(.+\.py)(?::(\w+))?", name, re.DOTALL)
    if file is not None:
        return Place(Path(os.path.abspath(file[1])), None, file[2])
    dotted = re.fullmatch(r"([A-Za-z_][\w.]*[.:])(\w+)", name)
    if dotted is None:
        return None
    module, which = (dotted[1][:-1], dotted[2]) if dotted[1].endswith(":") else (name, None)
    _reach(os.getcwd())
    try:
        spec = find_spec(module)
    except Exception as error:  # a package above it is imported for that
        raise ValueError(f"task {name} cannot be found: {type(error).__name__}: {error}") from None
    if spec is None or spec.origin is None:
        raise ValueError(f"task {name} cannot be found: there is no module {module} here; a file is called mytask.py")
    return Place(Path(spec.origin), module, which)


def find(place: Place, sha256: str | None) -> Task:
    """The task there; a DataError if the file has another SHA-256."""
    content = _content(place)
    found = hashlib.sha256(content).hexdigest()
    if sha256 is not None and found != sha256:
        raise DataError(
            f"task has changed since the run was begun: {place.path} has the SHA-256 {found[:16]}..., "
            f"not {sha256[:16]}...: put it back as it was, or begin anew"
        )
    return _task(place, content)


def sha256_of(place: Place) -> str:
    """Of the file."""
    return hashlib.sha256(_content(place)).hexdigest()


def _content(place: Place) -> bytes:
    try:
        return place.path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"task must be a file that can be read, got {str(place.path)!r}: {reason}") from None


@lru_cache(maxsize=4)
def _task(place: Place, content: bytes) -> Task:
    """Run the file, once a process, and take the task that it has."""
    from prsgd.tasks.base import Task

    with _named(place), _alike_everywhere():
        values = vars(import_module(place.module) if place.module is not None else _run(place.path, content))
    found = {name: value for name, value in values.items() if isinstance(value, Task)}
    if place.which is not None:
        if place.which not in found:
            raise ValueError(f"task {place.path} holds none called {place.which!r}{_listed(found)}")
        return replace(found[place.which], name=place.name)
    if len(found) > 1:
        one = next(iter(found))
        raise ValueError(f"task {place.path} holds several{_listed(found)}; say which, as in {place.name}:{one}")
    if not found:
        raise ValueError(f"task {place.path} holds none{_listed(found)}")
    return replace(next(iter(found.values())), name=place.name)


def _listed(found: dict[str, Task]) -> str:
    return f": {', '.join(found)}" if found else f": it needs a line like {EXAMPLE}"


def _run(path: Path, content: bytes) -> ModuleType:
    """As ``python PATH`` would, but for its name: what it imports may lie beside it."""
    module = ModuleType(f"prsgd_task_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for what it defines
    _reach(str(path.parent))
    exec(compile(content, str(path), "exec"), vars(module))  # what was hashed, not what lies in a cache
    return module


def _reach(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


@contextmanager
def _named(place: Place) -> Iterator[None]:
    """Whatever is raised by the file is one line that says where."""
    try:
        with redirect_stdout(sys.stderr):  # --json promises nothing else on stdout
            yield
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(place.path)]
        line = frames[-1].lineno if frames else None
        if isinstance(error, SyntaxError) and error.filename == str(place.path):
            line = error.lineno
        where = f"{place.path}{'' if line is None else f', line {line}'}"
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ValueError(f"task {where}: {kind}{error}") from error


@contextmanager
def _alike_everywhere() -> Iterator[None]:
    """Data that a file draws at random are the same in all processes of a run."""
    import numpy as np
    import torch

    from prsgd.saving.random_numbers import random_state, restore_random_state

    before = random_state()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        restore_random_state(before)
