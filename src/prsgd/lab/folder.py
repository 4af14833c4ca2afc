"""A run's folder: who may write into it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

from prsgd import _json
from prsgd.errors import CheckpointError
from prsgd.lab.checkpoint import write
from prsgd.lab.config import Config

OURS = (
    ".lock", "config.json", "environment.json", "model.safetensors", "records.jsonl", "split.json", "summary.json",
    "checkpoints", "error.txt", "stop", "compare.json", "report.html", "figures", "curves.csv", "table.csv",
    "tensorboard", "trace.json", "cluster.toml",
)  # fmt: skip
"""What we put into a folder: --overwrite removes these and nothing else."""


_KINDS = {"config.json": "run", "compare.json": "comparison"}


def claim(folder: Path, *, marker: str, resume: bool, overwrite: bool) -> None:
    """See that ``folder`` can be written, and that it holds nothing that is not ours to replace.

    ``marker`` is the file that tells a folder of this kind: config.json of a run, compare.json of a comparison.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"out must be a folder, {folder} is a file")
    holds = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if holds and not resume:
        other = next((name for name in ("config.json", "compare.json") if name in holds and name != marker), None)
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


def clear(folder: Path) -> None:
    """Remove what we put there, runs that were compared included; nothing at all if there is anything else."""
    runs = [path for path in folder.iterdir() if path.is_dir() and (path / "config.json").exists()]
    for place in (folder, *runs):
        for path in place.iterdir():
            if path not in runs and not _is_ours(path.name):
                raise ValueError(f"{path} is not ours: move it away before {folder} is overwritten")
    for place in (*runs, folder):
        for path in place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _is_ours(name: str) -> bool:
    """Also a file that was being written when its process was killed.

    >>> _is_ours("summary.json"), _is_ours(".summary.json.4242"), _is_ours("trace-3.json"), _is_ours("thesis.txt")
    (True, True, True, False)
    """
    plain = re.sub(r"^trace-\d+\.", "trace.", re.sub(r"^\.|\.\d+$", "", name))
    return name in OURS or plain in OURS


def read_config(folder: Path) -> Config:
    """The config of the run in ``folder``."""
    return _config(_read(folder / "config.json", "run"), folder / "config.json")


def read_comparison(folder: Path) -> list[Config]:
    """The configs of the comparison in ``folder``."""
    path = folder / "compare.json"
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
    write(folder / "compare.json", content.encode())
