"""What train and compare do alike around a run: Ctrl-C, errors on the way, a name for the folder."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from prsgd.cli.parser import fail
from prsgd.errors import DivergedError, LaunchError, PrsgdError
from prsgd.lab import checkpoint
from prsgd.lab.folder import note_failure
from prsgd.lab.processes import last_line
from prsgd.lab.progress import Stopped

STOPPED = 130
"""Exit code after Ctrl-C."""
ONE_PRESS_SECONDS = 1.0
"""Signals that follow the first one within this time are the same Ctrl-C: ``timeout`` and torchrun pass it on, to a
group that has got it already."""


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks, the second stops at once. Yields whether it was asked."""
    first: float | None = None

    def on_interrupt(_: int, __: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
            print("stopping; Ctrl-C again stops at once", file=sys.stderr)
        elif now - first > ONE_PRESS_SECONDS:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: first is not None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def failing(command: str, folder: Path) -> Iterator[None]:
    """While training: what goes wrong is one line and exit 1; the traceback of a surprise lies in the folder."""

    def hint() -> str:
        kept = checkpoint.any_in(folder)
        return f"; the last checkpoint is kept, continue with --resume {folder}" if kept else ""

    try:
        yield
    except Stopped:
        raise
    except LaunchError as error:
        fail(command, last_line(error) + hint(), code=1)
    except DivergedError as error:
        fail(command, str(error), code=1)  # to continue would end in the same way
    except PrsgdError as error:
        fail(command, str(error) + hint(), code=1)
    except OSError as error:
        fail(command, f"{error.filename or folder}: {error.strerror or error}{hint()}", code=1)
    except Exception as error:
        place = note_failure(folder, traceback.format_exc())
        kept = f" (the traceback is in {place})" if place is not None else ""
        fail(command, f"{type(error).__name__}: {error}{kept}{hint()}", code=1)
