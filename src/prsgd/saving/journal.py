"""Every record of a run, a line each: memory keeps the newest alone."""

from __future__ import annotations

import errno
import json
import math
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from prsgd._warn import warn
from prsgd.records import Record


class Journal:
    """The file, from which what came ``after`` this round's record is cut off: the run goes on from there. Rounds may
    be missing: worker 0 may have been on another machine, or its disk full."""

    def __init__(self, path: Path, *, after: int) -> None:
        self._path, self._failed = path, False
        self._file = path.open("a+b", buffering=0)
        kept = 0
        for line in path.read_bytes().splitlines(keepends=True):
            if _round(line) > after:
                break
            kept += len(line)
        self._file.truncate(kept)

    def write(self, record: Record) -> None:
        """A run does not end because a disk is full; the file ends then, with a warning."""
        if self._failed:
            return
        try:
            line = json.dumps(vars(record), default=asdict).encode() + b"\n"  # asdict() of all takes four times as long
            if self._file.write(line) < len(line):  # there was room for a part of it
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._failed = True
            warn(f"{self._path} ends with round {record.round - 1}: {error.strerror}", RuntimeWarning)

    def close(self) -> None:
        with suppress(OSError):
            self._file.close()


def _round(line: bytes) -> float:
    """Whose record it is; infinite: it ends in the middle."""
    try:
        return int(json.loads(line)["round"]) if line.endswith(b"\n") else math.inf
    except (ValueError, KeyError, TypeError):
        return math.inf
