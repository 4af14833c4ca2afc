"""A run's folder: who may write into it, what is put there before a run starts and what is read back from it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import prsgd
from prsgd import _json, files
from prsgd import cluster as clusters
from prsgd.errors import CheckpointError
from prsgd.lab.config import Config
from prsgd.lab.feed import who_saw_what
from prsgd.records import Summary
from prsgd.saving.states import write

_KINDS = {files.CONFIG: "run", files.COMPARISON: "comparison"}


def claim(folder: Path, *, marker: str, resume: bool, overwrite: bool) -> None:
    """See that ``folder`` can be written, and that it holds nothing that is not ours to replace.

    ``marker`` is the file that tells a folder of this kind: config.json of a run, compare.json of a comparison.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, {folder} is a file")
    holds = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if holds and not resume:
        other = next((name for name in _KINDS if name in holds and name != marker), None)
        if other is not None and marker not in holds:
            raise ValueError(f"{folder} holds a {_KINDS[other]}: give another folder, or delete it")
        if marker not in holds:
            raise ValueError(f"out must be an empty or new folder, {folder} holds {holds[0]!r} and is no run of ours")
        if not overwrite:
            raise ValueError(f"{folder} holds another run: continue it with --resume, or replace it with --overwrite")
        clear(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"out cannot be written: {folder}: {error.strerror}") from None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep others from training in the same folder. Where a file system has no locks, they are trusted."""
    with (folder / files.LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is training in {folder}") from None
        except OSError:
            pass
        yield


def prepare(config: Config, folder: Path) -> None:
    """Make a new run's folder, with what is known before it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / files.SPLIT, json.dumps(who_saw_what(config)).encode())
    write(folder / files.ENVIRONMENT, json.dumps(environment(), indent=2).encode())
    cluster = config.modelled()
    if cluster is not None:
        clusters.write(cluster, folder / files.CLUSTER)
    write(folder / files.CONFIG, config.to_json().encode())


def environment() -> dict[str, Any]:
    """What a run's numbers may depend on beside its config."""
    return {
        "prsgd": prsgd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }


def clear(folder: Path) -> None:
    """Remove what we put there, runs that were compared included; nothing at all if there is anything else."""
    runs = [path for path in folder.iterdir() if path.is_dir() and (path / files.CONFIG).exists()]
    for place in (folder, *runs):
        for path in place.iterdir():
            if path not in runs and not files.is_ours(path.name):
                raise ValueError(f"{path} is not ours: move it away before {folder} is overwritten")
    for place in (*runs, folder):
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_config(folder: Path) -> Config:
    """The config of the run in ``folder``."""
    return _config(_read(folder / files.CONFIG, "run"), folder / files.CONFIG)


def read_comparison(folder: Path) -> list[Config]:
    """The configs of the comparison in ``folder``."""
    path = folder / files.COMPARISON
    runs = _read(path, "comparison").get("runs")
    if not isinstance(runs, list) or not runs:
        raise CheckpointError(f"{path} is not a comparison's: it lists no runs")
    return [_config(entry, path) for entry in runs]


def _config(values: Any, path: Path) -> Config:
    try:
        if not isinstance(values, dict):
            raise ValueError(f"a config must be an object, got {values!r}")
        config = Config.from_dict(values)
        if config != config.resolve():
            raise ValueError("choices are missing")
    except ValueError as error:
        raise CheckpointError(f"{path} is not a {_KINDS[path.name]}'s: {error}") from None
    return config


def finished_run(folder: Path) -> Summary | None:
    """How the run in ``folder`` ended, if it did."""
    place = folder / files.SUMMARY
    try:
        return Summary.from_dict(_json.parse(place.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{place} cannot be read: {error}") from None


def note_failure(folder: Path, trace: str) -> Path | None:
    """Keep a traceback for those who want it; returns where, None if it could not be kept."""
    place = folder / files.ERROR
    try:
        write(place, trace.encode())
    except OSError:
        return None
    return place


def same(saved: Config, given: dict[str, Any], folder: Path) -> None:
    """What was given along with --resume must be what the run has."""
    for key, value in given.items():
        has = getattr(saved, key)
        if value is not None and has != value:
            raise CheckpointError(f"{folder} has {key} {has!r}, got {value!r}: a run is continued as it was begun")


def _read(path: Path, kind: str) -> dict[str, Any]:
    try:
        content = _json.parse(path.read_bytes())
    except FileNotFoundError:
        hint = ""
        for name, other in _KINDS.items():
            if other != kind and path.with_name(name).exists():
                hint = f", but a {other}: prsgd {'train' if other == 'run' else 'compare'} --resume {path.parent}"
        raise CheckpointError(f"{path.parent} holds no {kind}{hint or f': it has no {path.name}'}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a {kind}'s")
    return content


def write_comparison(folder: Path, configs: list[Config]) -> None:
    """Say in ``folder`` what is compared there."""
    content = json.dumps({"runs": [dataclasses.asdict(c) for c in configs]}, indent=2)
    write(folder / files.COMPARISON, content.encode())
