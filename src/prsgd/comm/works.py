"""Operations of torch.distributed under way."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from queue import Queue
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

from prsgd.errors import AverageTimeout, PeerError

T = TypeVar("T")

GRACE_SECONDS = 5.0
"""How long a transfer may go on after a peer's connection was lost, beside the time that it had taken before: a peer
that has finished may leave while others still send. (gloo does not always tell a transfer that it cannot go on.)"""


class OwnError(Exception):
    """What the caller's own function raised in an errand: no peer's fault, and raised again where it is waited for."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Wire(Protocol):
    """What a transfer goes over."""

    timeout_seconds: float

    @property
    def is_watched(self) -> bool:
        """Can it tell that a peer's end is gone?"""
        ...

    def lost_seconds(self) -> float:
        """For how long it has been known that a peer's end is gone; 0: all are there."""
        ...

    @property
    def transfers(self) -> int:
        """How many were started: the same number is the same transfer in every process."""
        ...

    def tell_waiting(self, transfer: int) -> None:
        """Let the others know that this process waits in it."""
        ...

    def absent(self, transfer: int) -> str:
        """Who has not come to it: "worker 3", or "a peer" if that is not known."""
        ...


class UnderWay(ABC, Generic[T]):
    """What is common to work under way: its bytes, its limit, when it began and ended."""

    def __init__(self, comm: Wire, result: T, bytes_sent: int, *, server_bytes_sent: int = 0, hops: int = 0) -> None:
        self._comm: Wire | None = comm  # it lives as long as somebody may wait for this
        self._result, self._timeout_seconds, self.hops = result, comm.timeout_seconds, hops
        self.bytes_sent, self.server_bytes_sent = bytes_sent, server_bytes_sent
        self._started = time.perf_counter()
        self._finished: list[float] = []
        self._error: Exception | None = None
        self._transfer = comm.transfers

    def flight_seconds(self) -> float:
        return (self._finished[0] if self._finished else time.perf_counter()) - self._started

    def _stamp(self) -> Callable[[object], None]:
        """To be called when it is over. Whoever is to call it does not hold this work, nor its communicator."""
        finished = self._finished
        return lambda _: finished.append(time.perf_counter())

    def wait(self, timeout_seconds: float | None = None) -> T:
        if self._comm is not None:
            limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
            try:
                self._finish(self._comm, limit)
            except PeerError as error:
                self._error = error
            except OwnError as own:
                self._error = own.error
            except RuntimeError as error:
                self._error = translated(error, limit)
            self._comm = None
            self._let_go()
        if self._error is not None:
            raise self._error
        return self._result

    @abstractmethod
    def _finish(self, comm: Wire, limit: float) -> None:
        """Wait until it is over; raises what went wrong."""

    def _let_go(self) -> None:
        """It is over."""

    def _watch(self, comm: Wire, come: Callable[[float], bool], limit: float) -> None:
        """Wait until ``come(seconds)`` says that it has; a PeerError if it does not, or cannot any more."""
        deadline = time.monotonic() + limit
        slice_seconds, told = 1.0 if comm.is_watched else limit, False
        while not come(max(0.001, min(slice_seconds, deadline - time.monotonic()))):
            if not told:
                comm.tell_waiting(self._transfer)
                told = True
            if time.monotonic() >= deadline:
                raise AverageTimeout(f"{comm.absent(self._transfer)} did not come within {limit:g} s")
            lost = comm.lost_seconds()
            if lost > GRACE_SECONDS + max(0.0, time.perf_counter() - self._started - lost):
                raise PeerError("a peer failed or left (its connection is gone)")


class Pending(UnderWay[T]):
    """A torch.distributed operation under way."""

    def __init__(
        self,
        comm: Wire,
        work: dist.Work,
        result: T,
        bytes_sent: int,
        *,
        server_bytes_sent: int = 0,
        hops: int = 0,
    ) -> None:
        super().__init__(comm, result, bytes_sent, server_bytes_sent=server_bytes_sent, hops=hops)
        self._work: dist.Work | None = work
        if result is not None:  # a send or receive has no future to tell when it was over
            work.get_future().add_done_callback(self._stamp())

    def _finish(self, comm: Wire, limit: float) -> None:
        assert self._work is not None
        if self._result is None:
            self._work.wait(timedelta(seconds=limit))  # a message is given up with its first wait
        else:
            self._watch(comm, self._come, limit)

    def _let_go(self) -> None:
        self._work = None  # it holds the connections open, and a traceback would hold it

    def _come(self, seconds: float) -> bool:
        assert self._work is not None
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # raises what went wrong; nothing did if it came just after the time was up
        return True


class Errands:
    """Runs calls one after another in a thread of its own, so that what needs somebody to send on what has come can
    travel beside steps: a sum through a server, and what owners combine for all."""

    def __init__(self) -> None:
        self._queue: Queue[tuple[Callable[[], None], Future[None]] | None] = Queue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None]) -> Future[None]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        future: Future[None] = Future()
        self._queue.put((call, future))
        return future

    def close(self) -> None:
        """End the thread, once what is under way is over."""
        self._queue.put(None)

    @property
    def is_alive(self) -> bool:
        """Is its thread there?"""
        return self._thread is not None and self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait so long for the thread to end: until then it may hold a group, and be in torch."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _work(self) -> None:
        while (errand := self._queue.get()) is not None:
            call, future = errand
            try:
                call()
            except OwnError as own:
                # Without the frame of the errand itself, which holds the connections open.
                inside = getattr(own.error.__traceback__, "tb_next", None)
                future.set_exception(OwnError(own.error.with_traceback(inside)))
                del inside
            except BaseException as error:
                future.set_exception(RuntimeError(str(error)))
            else:
                future.set_result(None)
            del errand, call, future  # they hold the connections open


class Errand(UnderWay[T]):
    """An errand under way."""

    def __init__(
        self,
        comm: Wire,
        future: Future[None],
        result: T,
        bytes_sent: int,
        *,
        server_bytes_sent: int = 0,
        hops: int = 0,
    ) -> None:
        super().__init__(comm, result, bytes_sent, server_bytes_sent=server_bytes_sent, hops=hops)
        self._future: Future[None] | None = future
        future.add_done_callback(self._stamp())

    def _finish(self, comm: Wire, limit: float) -> None:
        assert self._future is not None
        self._watch(comm, self._come, limit)
        self._future.result()

    def _let_go(self) -> None:
        self._future = None  # its error's traceback would hold the communicator

    def _come(self, seconds: float) -> bool:
        assert self._future is not None
        return bool(wait([self._future], seconds).done)


class PendingAll:
    """Messages to and from several."""

    server_bytes_sent, hops = 0, 1

    def __init__(self, works: list[Pending[None]], bytes_sent: int) -> None:
        self._works, self.bytes_sent = works, bytes_sent

    def wait(self, timeout_seconds: float | None = None) -> None:
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for work in self._works:
            work.wait(None if until is None else max(0.001, until - time.monotonic()))

    def flight_seconds(self) -> float:
        return max((w.flight_seconds() for w in self._works), default=0.0)


def translated(error: RuntimeError, limit: float) -> PeerError:
    message = first_line(error)
    if "timed out" in message.lower() and "connection timed out" not in message.lower():  # that one is TCP's own
        return AverageTimeout(f"a peer did not come within {limit:g} s")
    return PeerError(f"a peer failed or left ({message})")


def first_line(error: BaseException) -> str:
    """gloo's message without the source path that it starts with and the general advice that follows."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (line.split("] ", 1)[-1] if line.startswith("[/") else line).split(". This is typically")[0]
