"""What is written down of a run while it runs: its lines, as JSON and for TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from prsgd import files
from prsgd.errors import CheckpointError
from prsgd.lab.events import Events


class Journal:
    """A run's lines. One process writes them; in the others nothing is opened, and nothing is written."""

    def __init__(self, folder: Path, *, writes: bool, tensorboard: bool) -> None:
        self._folder, self._writes, self._tensorboard = folder, writes, writes and tensorboard
        self._lines: IO[str] | None = None
        self._events: Events | None = None

    def open(self, *, num_bytes: int, step: int) -> None:
        """Go on behind the first ``num_bytes``, which were there when the checkpoint of ``step`` was saved."""
        if self._writes:
            self._lines = _cut(self._folder / files.RECORDS, num_bytes)
        if self._tensorboard:
            self._events = Events(self._folder, from_step=step)

    def write(self, kind: str, content: dict[str, Any]) -> None:
        """One line more: an "average" or an "evaluation"."""
        line = {"kind": kind, **content}
        if self._lines is not None:
            self._lines.write(json.dumps(line) + "\n")
        if self._events is not None:
            self._events.add(line)

    def num_bytes(self) -> int:
        """Written so far, and out of our hands."""
        if self._lines is None:
            return 0
        self._lines.flush()
        return self._lines.tell()

    def close(self) -> None:
        for open_file in (self._lines, self._events):
            if open_file is not None:
                open_file.close()


def _cut(path: Path, num_bytes: int) -> IO[str]:
    """The run's lines up to the checkpoint; what was written after it will be written again."""
    file = path.open("a")
    if file.seek(0, 2) < num_bytes:
        file.close()
        raise CheckpointError(f"{path} is shorter than when the checkpoint was written: lines are missing")
    file.truncate(num_bytes)
    file.seek(0, 2)
    return file
