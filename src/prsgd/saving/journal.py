"""Every record of a run, a line each: memory keeps the newest alone."""

from __future__ import annotations

import json
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from prsgd.records import Record


class Journal:
    """The file, from which what came ``after`` so many records is cut off: the run goes on from there."""

    def __init__(self, path: Path, *, after: int) -> None:
        self._path, self._failed = path, False
        self._file = path.open("a+b", buffering=0)
        lines = path.read_bytes().splitlines(keepends=True)
        self._file.truncate(sum(map(len, lines[:after])))

    def write(self, record: Record) -> None:
        """A run does not end because a disk is full; the file ends then, with a warning."""
        if self._failed:
            return
        try:
            self._file.write(json.dumps(asdict(record)).encode() + b"\n")
        except OSError as error:
            self._failed = True
            warnings.warn(
                f"{self._path} ends with round {record.round - 1}: {error.strerror}", RuntimeWarning, stacklevel=2
            )

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()
