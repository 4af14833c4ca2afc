"""Exact states on disk: safetensors and JSON, nothing pickled.

    checkpoints/step-00000440/rank-0.safetensors    the tensors
                              rank-0.json           everything else, with a name where a tensor was
                              manifest-0.json       SHA-256 of both; written last

Each file is written under another name, flushed and renamed, so a file that is there is whole, and a checkpoint without
a manifest was never finished. Every process of a job keeps its own; they continue from the newest that all have.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prsgd import _json, files
from prsgd.errors import CheckpointError
from prsgd.replicas.fleet import Fleet

FORMAT = 1
KEEP = 2
"""Checkpoints that are kept: if the newest is damaged, the one before it serves."""


class DamagedCheckpointError(CheckpointError):
    """This one cannot be used; the one before it may."""


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=3)


class Checkpoints:
    """The checkpoints of one process of a run."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        self._folder, self._rank = folder / files.CHECKPOINTS, rank

    def save(self, step: int, state: Any) -> None:
        """Write ``state`` (dicts, lists, numbers, texts, tensors) as the checkpoint of ``step``."""
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        tree = json.dumps(_pack(state, tensors)).encode()
        place = self._folder / f"step-{step:08d}"
        place.mkdir(parents=True, exist_ok=True)
        files = {f"rank-{self._rank}.safetensors": save(tensors), f"rank-{self._rank}.json": tree}
        for name, content in files.items():
            write(place / name, content)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        manifest = {"format": FORMAT, "step": step, "sha256": sums}
        write(place / self._manifest, json.dumps(manifest, indent=2).encode())
        for old in self._places()[:-KEEP]:
            self._remove(old)

    def settle_on(self, fleet: Fleet) -> int | None:
        """The newest step of which every process of the fleet has a whole checkpoint; this process forgets the others.

        A collective, unless the whole fleet lives here. Checkpoints older than that one are kept.
        """
        steps = self.steps()
        alone = len(fleet.workers) == fleet.num_workers
        common = newest_common([steps] if alone else _everyones(steps, fleet), self._folder.parent)
        self.forget_all_but([step for step in steps if common is not None and step <= common])
        return common

    def forget_all_but(self, steps: Collection[int]) -> None:
        """Remove this process's other checkpoints: damaged, or newer than the one that a run continues from."""
        for place in self._folder.glob("step-*"):
            if _step(place) not in steps:
                self._remove(place)

    def steps(self, *, on_damage: Callable[[str], None] = _warn) -> list[int]:
        """The steps of those that are whole, oldest first.

        A damaged one is passed over, which ``on_damage`` is told. One of a newer format, or all of them damaged, is a
        CheckpointError: to begin anew in silence would throw away what was trained.
        """
        found, places = [], self._places()
        for place in places:
            try:
                self._check(place)
            except DamagedCheckpointError as error:
                on_damage(f"{error}; it is passed over")
            else:
                found.append(_step(place))
        if places and not found:
            raise CheckpointError(f"no checkpoint in {self._folder} is whole: begin anew with --overwrite")
        return found

    def load(self, step: int) -> Any:
        """The state that was saved at ``step``."""
        from safetensors.torch import load

        place = self._folder / f"step-{step:08d}"
        self._check(place)
        tensors = load((place / f"rank-{self._rank}.safetensors").read_bytes())
        return _unpack(json.loads((place / f"rank-{self._rank}.json").read_bytes()), tensors)

    def _remove(self, place: Path) -> None:
        """This process's files, the manifest first; the folder goes with the last process's."""
        for path in (place / self._manifest, *place.glob(f"rank-{self._rank}.*"), *place.glob(f".*-{self._rank}.*")):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # the others' files are still there
            place.rmdir()

    @property
    def _manifest(self) -> str:
        return f"manifest-{self._rank}.json"

    def _places(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        return sorted(p for p in self._folder.glob("step-*") if (p / self._manifest).exists())

    def _check(self, place: Path) -> None:
        where = f"checkpoint {place}"
        try:
            manifest = _json.parse((place / self._manifest).read_bytes())
            version, sums = manifest["format"], manifest["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"{where} has no readable manifest ({error})") from None
        if not isinstance(version, int) or version > FORMAT:
            raise CheckpointError(f"{where} has the format {version!r}, this version of prsgd reads up to {FORMAT}")
        expected = {f"rank-{self._rank}.safetensors", f"rank-{self._rank}.json"}
        if not isinstance(sums, dict) or set(sums) != expected:
            names = sorted(sums) if isinstance(sums, dict) else sums
            raise CheckpointError(f"{where} lists {names!r}, not {sorted(expected)!r}")
        for name in sorted(expected):
            try:
                found = hashlib.sha256((place / name).read_bytes()).hexdigest()
            except OSError as error:
                raise DamagedCheckpointError(f"{where}: {name} cannot be read ({error.strerror})") from None
            if found != sums[name]:
                raise DamagedCheckpointError(f"{where}: {name} is damaged (its SHA-256 is not the manifest's)")


def newest_common(steps: Sequence[Collection[int]], folder: Path) -> int | None:
    """The newest step of which every process has a whole checkpoint; None if some process has none at all.

    (A run that was stopped while it wrote its first one begins anew. That all have some and none in common is damage.)
    """
    common = set.intersection(*map(set, steps))
    if not common and all(steps):
        raise CheckpointError(
            f"the processes' checkpoints in {folder} have no step in common: begin anew with --overwrite"
        )
    return max(common, default=None)


def _everyones(steps: Sequence[int], fleet: Fleet) -> list[set[int]]:
    """The newest steps that each worker's process has a checkpoint of."""
    newest = torch.full((8,), -1, dtype=torch.int64)
    kept = steps[-len(newest) :]
    newest[: len(kept)] = torch.tensor(kept, dtype=torch.int64)
    device = next(fleet.modules[0].parameters()).device
    everyones = fleet.comm.all_gather(newest.expand(len(fleet.workers), -1).to(device, copy=True)).wait()
    return [{step for step in part.tolist() if step >= 0} for part in everyones]


def any_in(folder: Path) -> bool:
    """Is there a finished checkpoint, of this run or of one that is compared here?"""
    return any(folder.glob("**/manifest-*.json"))


def write(path: Path, content: bytes) -> None:
    """Put a file there whole, or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON has no tensors and no keys but texts: both become one-entry objects, marked by their key."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"items": [[key, _pack(entry, tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        return [_pack(entry, tensors) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint holds plain values and tensors, got {type(value).__name__}")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        [(kind, content)] = value.items()
        if kind == "tensor":
            return tensors[content]
        return {key: _unpack(entry, tensors) for key, entry in content}
    if isinstance(value, list):
        return [_unpack(entry, tensors) for entry in value]
    return value


def _step(place: Path) -> int:
    return int(place.name.removeprefix("step-"))


def fingerprint(tensors: list[Tensor]) -> str:
    """SHA-256 over the numbers, to compare two models to the last bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
