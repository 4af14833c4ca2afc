"""Who waits in which transfer, told over the job's store: so that whoever has waited long enough can say for whom."""

from __future__ import annotations

import atexit
import functools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's own export list

T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""How long the store may take: the process that serves it may be the one that hangs."""


class Absence:
    """Tells the other processes that this one waits, and finds those that have not come to the same transfer."""

    def __init__(self, store: Store, process: int, num_processes: int) -> None:
        self._store, self._process, self._num_processes = store, process, num_processes

    def tell(self, transfer: int) -> None:
        """This process waits in it. Nobody waits for the store to hear that."""
        _beside(lambda: self._store.set(self._key(self._process), str(transfer)))

    def missing(self, transfer: int) -> list[int]:
        """Those that have not told so; none if the store does not answer."""
        others = [process for process in range(self._num_processes) if process != self._process]
        asked = _beside(lambda: [p for p in others if self._newest(p) < transfer])
        return asked(ANSWER_SECONDS) or []

    def _newest(self, process: int) -> int:
        """The last transfer in which it told that it waits; -1: none."""
        key = self._key(process)
        return int(self._store.get(key)) if self._store.check([key]) else -1

    def _key(self, process: int) -> str:
        """One a process, however long the run: the store forgets nothing."""
        return f"waits/{process}"


_asking: list[threading.Thread] = []
"""Those that may still be inside the store."""


@functools.cache
def _end_with_the_interpreter() -> None:
    atexit.register(_end_all)


def _end_all() -> None:
    """Before the interpreter goes: a thread that comes back to it from the store later aborts the process."""
    until = time.monotonic() + ANSWER_SECONDS
    for thread in _asking:
        thread.join(max(0.0, until - time.monotonic()))


def _beside(call: Callable[[], T]) -> Callable[[float], T | None]:
    """Do it in a thread, which may hang without harm; what is returned waits so many seconds for the result."""
    _end_with_the_interpreter()
    found: list[T] = []

    def run() -> None:
        try:
            found.append(call())
        except RuntimeError:  # the store is gone, and so is the job
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _asking[:] = [*(t for t in _asking if t.is_alive()), thread]

    def result(seconds: float) -> T | None:
        thread.join(seconds)
        return found[0] if found else None

    return result
