"""The connections of one communicator: how they are opened, and how they end.

gloo cannot stop a transfer: who drops its group waits for the transfer's thread, and that waits for the peers. A thread
that is still in there when the interpreter goes aborts the process. So connections are ended by their sockets, on which
every transfer fails at once, here and at the peers; then nothing is under way and the group can be dropped.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in torch's own export list
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from prsgd.comm import sockets
from prsgd.comm.absence import Absence
from prsgd.comm.works import Errands, first_line
from prsgd.errors import PeerError, UsageError

W = TypeVar("W", bound="dist.Work | Future[None]")
T = TypeVar("T", bound="dist.Work | Future[None] | list[dist.Work]")

SILENCE_SECONDS = 15
"""How long a machine may not answer before its connections count as lost: a cut cable is noticed by that."""

ENDING_SECONDS = 5.0
"""How long transfers whose sockets were shut may take to fail; they take a millisecond."""

COMBINING_SECONDS = 60.0
"""How long the interpreter waits, when it ends, for what a user's function still makes of what has come."""

_PAGE = 512
"""Bytes in which a process tells its endpoints: one, or a few if gloo was given several interfaces."""

_opened: Counter[tuple[int, ...]] = Counter()
"""How many connections this process has opened between which ranks: they are told apart by it in the store."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the processes of a group meet that are no job of torch's."""

    store: TCPStore
    name: str
    """In the store, like no other's."""
    address: str
    """Where the others reach this process, and where alone it listens."""

    def meet(self, process: int, processes: int, limit: timedelta) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # it has
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.address)]
        options._timeout = limit
        return dist.ProcessGroupGloo(PrefixStore(f"prsgd/{self.name}", self.store), process, processes, options)


class Connection:
    """A group over ``ranks`` of which this process is number ``process``, opened at the first call.

    With gloo it is a group of our own, whatever ``parent`` is, so that ending it touches nobody else's. With other
    backends it is ``parent`` if that is given, and else one that torch makes. With a ``Rendezvous`` it is gloo's, and
    torch need not know of any job.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        process: int,
        parent: dist.ProcessGroup | None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._ranks, self._process, self._parent, self._rendezvous = tuple(ranks), process, parent, rendezvous
        self._group: dist.ProcessGroup | None = None
        self._is_gloo = False
        self._endpoints: frozenset[str] = frozenset()
        self._num_links = 0
        self._lost_at: float | None = None
        self._under_way: list[dist.Work | Future[None]] = []
        self._messages: list[dist.Work] = []
        self._errands = Errands()
        self._absence: Absence | None = None
        self.transfers = 0
        """That were started: the same number is the same transfer in every process."""
        self._closed = False
        self._home = os.getpid(), threading.get_ident()

    def __repr__(self) -> str:
        return f"process {self._process} of {len(self._ranks)}"

    def start(self, launch: Callable[[dist.ProcessGroup], T], device: torch.device, timeout_seconds: float) -> T:
        """What ``launch`` starts over the group, which serves tensors on ``device``."""
        if self._closed:
            raise UsageError(f"{self}: the communicator was closed")
        try:
            if self._group is None:
                _end_with_the_interpreter()
                _close_left()
                self._group = self._open(device, timedelta(seconds=timeout_seconds))
            self.transfers += 1
            started = launch(self._group)
        except (RuntimeError, dist.DistError) as error:
            raise PeerError(f"{self}: a peer failed or left ({first_line(error)})") from None
        if isinstance(started, list):  # sends and receives: they are over when somebody has waited for them
            self._messages = [*_not_over(self._messages), *started]
        else:
            self._under_way = [*_not_over(self._under_way), started]
        return started

    def errand(self, call: Callable[[], None]) -> Future[None]:
        """``call``, which blocks, done in a thread of its own, after those before it."""
        return self._errands.run(call)

    @property
    def is_watched(self) -> bool:
        """Can it tell that a peer's end is gone?"""
        return self._num_links > 0

    def lost_seconds(self) -> float:
        """For how long it has been known that a peer's end is gone; 0: all are there."""
        if self._lost_at is None and self.lost_links() > 0:
            self._lost_at = time.monotonic()
        return 0.0 if self._lost_at is None else time.monotonic() - self._lost_at

    def tell_waiting(self, transfer: int) -> None:
        """Let the other processes know that this one waits in it."""
        if self._absence is not None:
            self._absence.tell(transfer)

    def missing(self, transfer: int) -> list[int]:
        """The processes that have not come to it, as far as is known."""
        return [] if self._absence is None else self._absence.missing(transfer)

    def lost_links(self) -> int:
        """How many peers' ends are known to be gone."""
        return self._num_links - sockets.established(self._endpoints)

    def close(self) -> None:
        """Leave: whoever is in a transfer with this process fails at once, and so does whoever comes to one."""
        self._closed = True
        _live.discard(self)
        self._errands.close()
        group, self._group = self._group, None
        under_way, self._under_way = _not_over(self._under_way), []
        messages, self._messages = _not_over(self._messages), []
        if group is None:
            return
        if os.getpid() != self._home[0]:  # a fork's copy: the sockets are the parent's, and the threads were not copied
            _keep_forever(group)
            return
        if (under_way or messages) and self._endpoints:
            sockets.shut(self._endpoints)
            deadline = time.monotonic() + ENDING_SECONDS
            while _not_over(under_way) and time.monotonic() < deadline:
                time.sleep(0.001)
        if _not_over(under_way):
            if self._endpoints:  # no transfer goes on, so an errand that does is not in one
                _busy[:] = [*(errands for errands in _busy if errands.is_alive), self._errands]
            _drop_later(group, under_way)
        else:
            self._errands.join(ENDING_SECONDS)
            _drop([group])

    def release(self) -> None:
        """Nobody has the communicator any more: give back what it holds.

        Not a group of another backend than gloo: that may be the user's, and ending one may need all ranks.
        """
        self._errands.close()
        if self._is_gloo and threading.get_ident() == self._home[1]:
            self.close()
        elif self._is_gloo:  # garbage collection runs in any thread; in one of gloo's own, this would wait for itself
            _left.append(self)

    def _open(self, device: torch.device, limit: timedelta) -> dist.ProcessGroup:
        if self._rendezvous is not None or (_backend(self._parent, device) or _spare(device)) == "gloo":
            self._is_gloo = True
            _live.add(self)
            return self._open_gloo(limit)
        if self._parent is not None:
            return self._parent
        made: dist.ProcessGroup = dist.new_group(list(self._ranks), timeout=limit)
        return made

    def _open_gloo(self, limit: timedelta) -> dist.ProcessGroup:
        before = sockets.listening()
        gloo = self._rendezvous.meet(self._process, len(self._ranks), limit) if self._rendezvous else self._join(limit)
        group = cast(dist.ProcessGroup, gloo)  # it has the same methods
        # Every connection is to or from the endpoint of one of its two processes.
        mine = " ".join(sorted(sockets.listening() - before)).encode()[:_PAGE]
        page = torch.frombuffer(bytearray(mine.ljust(_PAGE)), dtype=torch.uint8)
        pages = [torch.empty_like(page) for _ in self._ranks]
        group.allgather([pages], [page]).wait()
        self._endpoints = frozenset(name for page in pages for name in bytes(page.tolist()).decode().split())
        self._num_links = sockets.established(self._endpoints)
        sockets.notice_silence(self._endpoints, SILENCE_SECONDS)
        return group

    def _join(self, limit: timedelta) -> dist.ProcessGroupGloo:
        """Meet the others of the job in its store."""
        _opened[self._ranks] += 1
        ranks = hashlib.sha256(repr(self._ranks).encode()).hexdigest()[:16]
        store = PrefixStore(f"prsgd/{ranks}/{_opened[self._ranks]}", _get_default_store())
        self._absence = Absence(store, self._process, len(self._ranks))
        return dist.ProcessGroupGloo(store, self._process, len(self._ranks), limit)


def _backend(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """Which backend serves tensors on ``device``."""
    by_device = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
    return by_device.get(device.type, "")


def _spare(device: torch.device) -> str:
    """The backend that we can open ourselves where the job's serves no tensors on ``device``."""
    return "gloo" if device.type == "cpu" else ""


def _not_over(works: Sequence[W]) -> list[W]:
    return [work for work in works if not (work.done() if isinstance(work, Future) else work.is_completed())]


def _drop(holder: list[dist.ProcessGroup]) -> None:
    """Let go of the group in ``holder``, which nobody else has."""
    if isinstance(holder[0], dist.ProcessGroup) and dist.is_initialized():
        with contextlib.suppress(ValueError):  # the user has destroyed it
            dist.destroy_process_group(holder[0])
    holder.clear()


_live: set[Connection] = set()
"""Open connections of ours, each of which some communicator has."""
_left: list[Connection] = []
"""Those that nobody has any more, to be closed at the next occasion."""
_busy: list[Errands] = []
"""Those of closed connections that were not over."""
_exiting = threading.Event()
_droppers: list[threading.Thread] = []


def _drop_later(group: dist.ProcessGroup, under_way: list[dist.Work | Future[None]]) -> None:
    """Where sockets could not be found: drop the group as soon as nothing is under way, without waiting for that."""
    holder = [group]

    def wait() -> None:
        while _not_over(under_way):
            if _exiting.wait(0.02):  # by Python's means: a thread inside torch cannot be ended with the interpreter
                _keep_forever(holder[0])
                return
        under_way.clear()  # they hold the connections open
        _drop(holder)

    thread = threading.Thread(target=wait, daemon=True)
    _droppers[:] = [*(t for t in _droppers if t.is_alive()), thread]
    thread.start()


def _keep_forever(group: dist.ProcessGroup) -> None:
    """Never drop it, not even with the interpreter: dropping would wait for threads that do not end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


@functools.cache
def _end_with_the_interpreter() -> None:
    atexit.register(_end_all)


def _close_left() -> None:
    while _left:
        _left.pop().close()


def _end_all() -> None:
    """Before the interpreter goes: no thread may be inside torch that comes back to Python later."""
    _close_left()
    for connection in list(_live):
        connection.close()
    for errands in _busy:
        errands.join(COMBINING_SECONDS)
    _exiting.set()
    for thread in _droppers:
        thread.join()
