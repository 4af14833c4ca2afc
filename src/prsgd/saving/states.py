"""Exact states on disk: safetensors and JSON, nothing pickled.

    step-00000440/rank-0.safetensors    the tensors
                  rank-0.json           everything else, with a name where a tensor was
                  manifest-0.json       SHA-256 of both; written last

All files are written under other names, flushed, and then renamed, so a file that is there is whole, and a state
without a manifest was never finished.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prsgd import _json
from prsgd._warn import warn
from prsgd.errors import CheckpointError

FORMAT = 1
KEEP = 2
"""States that are kept: if the newest is damaged, the one before it serves."""


class DamagedCheckpointError(CheckpointError):
    """This one cannot be used; the one before it may."""


@dataclass(frozen=True)
class Packed:
    """A state (dicts, lists, numbers, texts, tensors) as it was when this was made: nothing in it changes any more."""

    tree: Any
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, state: Any) -> Packed:
        tensors: dict[str, Tensor] = {}
        return cls(_pack(state, tensors), tensors)

    def content(self) -> tuple[bytes, bytes]:
        """The two files: tensors, and everything else."""
        from safetensors.torch import save

        return save(dict(self.tensors)), json.dumps(self.tree).encode()


def unpacked(tensors: bytes, tree: bytes) -> Any:
    """Back from ``Packed.content``."""
    from safetensors.torch import load

    return _unpack(json.loads(tree), load(tensors))


class States:
    """The states of one ``owner`` ("rank", 0), in folders that are ``numbered`` by "step" or "round"."""

    def __init__(self, folder: Path, *, numbered: str, owner: tuple[str, int], remedy: str, keep: int = KEEP) -> None:
        self.folder, self._numbered, self._remedy, self._keep = folder, numbered, remedy, keep
        kind, number = owner
        self._files, self._manifest = f"{kind}-{number}", f"manifest-{number}.json"

    def save(self, number: int, state: Any) -> None:
        """Write ``state`` (dicts, lists, numbers, texts, tensors)."""
        self.write(number, Packed.of(state))

    def write(self, number: int, packed: Packed, **said: Any) -> None:
        """Write it whole or not at all, with ``said`` in the manifest, and forget all but the newest that are kept."""
        place = self._place(number)
        place.mkdir(parents=True, exist_ok=True)
        files = dict(zip(self._names, packed.content()))
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        manifest = {"format": FORMAT, self._numbered: number, **said, "sha256": sums}
        contents = {**files, self._manifest: json.dumps(manifest, indent=2).encode()}
        had, staged = (place / self._manifest).exists(), []
        try:
            for name, content in contents.items():
                staged.append((_staged(place / name, content), place / name))
        except OSError:
            with suppress(OSError):  # where there is no space, a part of a state must not take it
                for partial, _ in staged:
                    partial.unlink(missing_ok=True)
                if not had:
                    self._remove(place)
            raise
        for partial, path in staged:
            partial.replace(path)
        for old in self._places()[: -self._keep]:
            if old != place:  # newer ones may be of another run
                self._remove(old)

    def forget_all_but(self, numbers: Collection[int]) -> None:
        """Remove this owner's others: damaged, or newer than the one that a run continues from."""
        for place in self.folder.glob(f"{self._numbered}-*"):
            if self._number(place) not in numbers:
                self._remove(place)

    def whole(self, *, on_damage: Callable[[str], None] = warn) -> list[int]:
        """The numbers of those that are whole, oldest first.

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
                found.append(self._number(place))
        if places and not found:
            raise CheckpointError(f"no checkpoint in {self.folder} is whole: {self._remedy}")
        return found

    @property
    def oldest(self) -> int | None:
        """The number of the oldest that was finished; None: there is none."""
        return next(map(self._number, self._places()), None)

    def forget(self, number: int) -> None:
        """Remove this one."""
        self._remove(self._place(number))

    def check(self, number: int) -> dict[str, Any]:
        """Its manifest; a DamagedCheckpointError unless it is whole, a CheckpointError if it is of a newer format."""
        return self._check(self._place(number))

    def load(self, number: int) -> Any:
        """The state that was saved so."""
        place = self._place(number)
        self._check(place)
        tensors, tree = ((place / name).read_bytes() for name in self._names)
        return unpacked(tensors, tree)

    @property
    def _names(self) -> tuple[str, str]:
        return f"{self._files}.safetensors", f"{self._files}.json"

    def _place(self, number: int) -> Path:
        return self.folder / f"{self._numbered}-{number:08d}"

    def _number(self, place: Path) -> int:
        return int(place.name.removeprefix(f"{self._numbered}-"))

    def _places(self) -> list[Path]:
        """Finished ones, oldest first."""
        return sorted(p for p in self.folder.glob(f"{self._numbered}-*") if (p / self._manifest).exists())

    def _remove(self, place: Path) -> None:
        """This owner's files, the manifest first; the folder goes with the last owner's."""
        ours = self._manifest, *self._names
        for path in (place / ours[0], *(p for name in ours for p in (place / name, *in_place(place, f".{name}.*")))):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # the others' files are still there
            place.rmdir()

    def _check(self, place: Path) -> dict[str, Any]:
        where = f"checkpoint {place}"
        try:
            manifest = _json.parse((place / self._manifest).read_bytes())
            version, sums = manifest["format"], manifest["sha256"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCheckpointError(f"{where} has no readable manifest ({error})") from None
        if not isinstance(version, int) or version > FORMAT:
            raise CheckpointError(f"{where} has the format {version!r}, this version of prsgd reads up to {FORMAT}")
        expected = set(self._names)
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
        checked: dict[str, Any] = manifest
        return checked


def in_place(place: Path, pattern: str) -> list[Path]:
    """The files of a state that are named so; none if another process has just removed the last of them."""
    try:
        return list(place.glob(pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


def write(path: Path, content: bytes) -> None:
    """Put a file there whole, or not at all."""
    _staged(path, content).replace(path)


def _staged(path: Path, content: bytes) -> Path:
    """The file whole under another name beside it, or nothing."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return partial


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON has no tensors and no keys but texts: both become one-entry objects, marked by their key."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"a checkpoint holds dense tensors, got one that is {value.layout}")
        name = str(len(tensors))
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if not _is_plain(key):
                raise TypeError(f"a checkpoint holds dicts with plain keys, got the key {key!r}")
        return {"items": [[key, _pack(entry, tensors)] for key, entry in value.items()]}
    if isinstance(value, list | tuple):
        return [_pack(entry, tensors) for entry in value]
    if _is_plain(value):
        return value
    raise TypeError(f"a checkpoint holds plain values and tensors, got {type(value).__name__}")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, dict):
        [(kind, content)] = value.items()
        if kind == "tensor":
            return tensors[content]
        return {key: _unpack(entry, tensors) for key, entry in content}
    if isinstance(value, list):
        return [_unpack(entry, tensors) for entry in value]
    return value
