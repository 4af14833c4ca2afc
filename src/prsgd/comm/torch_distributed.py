"""Workers spread over the processes of a torch.distributed group: gloo on CPU, nccl on GPU, launched by torchrun."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from datetime import timedelta
from queue import Queue
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from prsgd._check import one_of, positive, whole_number
from prsgd.comm.base import Communicator, Route, Then, Work, hosted_range
from prsgd.errors import AverageTimeout, PeerError, UsageError
from prsgd.links import SHAPES, bytes_of_sum

T = TypeVar("T")


class TorchDistributed(Communicator):
    """The N workers of a process group, one or more in each process.

    Without ``group`` all traffic goes through a group of our own over all ranks, made at the first call, so that
    closing it makes the peers fail without touching the default group. A ``group`` that is given is used as it is,
    and closed after an error.

    ``shape="parameter-server"`` collects a sum at the process of worker 0, which needs a second row for it, and sends
    it back from there, as the paper describes; "all-reduce" needs no server.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        num_workers: int | None = None,
        shape: str = "all-reduce",
        timeout_seconds: float = 600.0,
    ) -> None:
        self.shape = one_of("shape", shape, SHAPES)
        if not dist.is_initialized():
            raise UsageError(
                "TorchDistributed needs a process group: call prsgd.init() first, under torchrun or launch()"
            )
        self._ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self._process = dist.get_rank(group)
        if self._process < 0:
            raise ValueError(f"group must contain this process, rank {dist.get_rank()} is not in {self._ranks}")
        processes = len(self._ranks)
        self.num_workers = processes if num_workers is None else whole_number("num_workers", num_workers, at_least=1)
        if self.num_workers < processes:
            raise ValueError(
                f"num_workers must be at least the number of processes, got {self.num_workers} workers "
                f"for {processes} processes"
            )
        self._blocks = [hosted_range(self.num_workers, processes, p) for p in range(processes)]
        self.workers = self._blocks[self._process]
        self.timeout_seconds = positive("timeout_seconds", timeout_seconds)
        self._parent = group
        self._group: dist.ProcessGroup | None = None
        self._closed = False
        self._newest: dist.Work | Future[None] | None = None
        self._errands = _Errands()
        self._calls = 0

    def __repr__(self) -> str:
        return f"process {self._process} of {len(self._ranks)}"

    def all_reduce(self, flat: Tensor) -> Work[Tensor]:
        sent, by_server = bytes_of_sum(self.shape, self.num_workers, _num_bytes(flat))
        if self.shape == "parameter-server" and len(self._ranks) > 1:
            tag = self._next_tag()
            future = self._start(lambda group: self._errands.run(lambda: self._through_server(flat, group, tag)))
            return _Errand(future, flat, sent, by_server, self.timeout_seconds)
        work = self._start(lambda group: dist.all_reduce(flat, group=group, async_op=True))
        return _Pending(work, flat, sent, self.timeout_seconds, server_bytes_sent=by_server)

    def all_gather(self, payload: Tensor) -> Work[Tensor]:
        # The collective needs rows of equal number, and processes may host one worker more or less.
        largest = max(map(len, self._blocks))
        padded = payload.new_zeros((largest, *payload.shape[1:]))
        padded[: len(payload)] = payload
        parts = [torch.empty_like(padded) for _ in self._blocks]
        work = self._start(lambda group: dist.all_gather(parts, padded, group=group, async_op=True))
        bytes_sent = _num_bytes(payload[0]) * (self.num_workers - 1)
        pending = _Pending(work, parts, bytes_sent, self.timeout_seconds, hops=self.num_workers - 1)
        return Then(pending, lambda parts: torch.cat([p[: len(b)] for p, b in zip(parts, self._blocks)]))

    def exchange(self, send: Mapping[Route, Tensor], receive: Mapping[Route, Tensor]) -> Work[None]:
        tag = self._next_tag()

        def start(group: dist.ProcessGroup) -> list[dist.Work]:
            works = []
            # Both ends walk the routes in one order, so that messages between two processes match.
            for route in sorted(set(send) | set(receive)):
                source, target = (self._host(worker) for worker in route)
                if source == target:
                    receive[route].copy_(send[route])
                elif source == self._process:
                    works.append(dist.isend(send[route], self._ranks[target], group=group, tag=tag))
                else:
                    works.append(dist.irecv(receive[route], self._ranks[source], group=group, tag=tag))
            return [w for w in works if w is not None]

        works = self._start(start)
        bytes_sent = sum(map(_num_bytes, send.values())) // max(1, len(self.workers))
        return _PendingAll([_Pending(w, None, 0, self.timeout_seconds) for w in works], bytes_sent)

    def broadcast(self, flat: Tensor, worker: int = 0) -> Work[Tensor]:
        source = self._ranks[self._host(worker)]
        work = self._start(lambda group: dist.broadcast(flat, source, group=group, async_op=True))
        return _Pending(work, flat, _num_bytes(flat), self.timeout_seconds)

    def close(self) -> None:
        self._closed = True
        self._errands.close()
        group, self._group = self._group, None
        newest, self._newest = self._newest, None
        if group is None or not dist.is_initialized():
            return
        if newest is None or (newest.done() if isinstance(newest, Future) else newest.is_completed()):
            dist.destroy_process_group(group)
        else:
            # Dropping a gloo group joins the thread of a transfer under way, which ends only when the peers come or
            # their time is up. Whoever closes must not wait for that; the peers' next call fails.
            holder = [group]
            del group, newest
            threading.Thread(target=lambda: dist.destroy_process_group(holder.pop()), daemon=True).start()

    def _through_server(self, flat: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        server, others = self._ranks[0], self._ranks[1:]
        if self._process:
            dist.send(flat, server, group=group, tag=tag)
            dist.recv(flat, server, group=group, tag=tag)
            return
        received = torch.empty_like(flat)
        for rank in others:
            dist.recv(received, rank, group=group, tag=tag)
            flat += received
        for rank in others:
            dist.send(flat, rank, group=group, tag=tag)

    def _next_tag(self) -> int:
        """Calls come in the same order everywhere, so counting them keeps messages apart; nccl has no tags."""
        self._calls += 1
        return self._calls if dist.get_backend(self._parent) == "gloo" else 0

    def _host(self, worker: int) -> int:
        return next(p for p, block in enumerate(self._blocks) if worker in block)

    def _start(self, launch: Callable[[dist.ProcessGroup], T]) -> T:
        if self._closed:
            raise UsageError(f"{self}: the communicator was closed")
        try:
            if self._group is None:
                self._group = self._own_group()
            started = launch(self._group)
        except (RuntimeError, dist.DistError) as error:
            raise PeerError(f"{self}: a peer failed or left ({_first_line(error)})") from None
        self._newest = started if isinstance(started, dist.Work | Future) else None
        return started

    def _own_group(self) -> dist.ProcessGroup:
        if self._parent is not None:
            return self._parent
        limit = timedelta(seconds=self.timeout_seconds)
        group: dist.ProcessGroup = dist.new_group(self._ranks, timeout=limit)
        # That limit is for connecting. A transfer's own lies far above that of whoever waits for it, so that the
        # waiter's message is the one seen.
        for kind in group._device_types:
            group._get_backend(kind)._set_default_timeout(max(limit * 2, timedelta(days=1)))
        return group


class _UnderWay(Generic[T]):
    """What is common to work under way: its bytes, its limit, when it began and ended."""

    def __init__(
        self, result: T, bytes_sent: int, server_bytes_sent: int, timeout_seconds: float, hops: int = 0
    ) -> None:
        self._result, self._timeout_seconds, self.hops = result, timeout_seconds, hops
        self.bytes_sent, self.server_bytes_sent = bytes_sent, server_bytes_sent
        self._started = time.perf_counter()
        self._finished: float | None = None

    def flight_seconds(self) -> float:
        return (self._finished or time.perf_counter()) - self._started

    def _stamp(self, _: object) -> None:
        self._finished = time.perf_counter()

    def _limit(self, timeout_seconds: float | None) -> float:
        return self._timeout_seconds if timeout_seconds is None else timeout_seconds


class _Pending(_UnderWay[T]):
    """A torch.distributed operation under way."""

    def __init__(
        self,
        work: dist.Work,
        result: T,
        bytes_sent: int,
        timeout_seconds: float,
        *,
        server_bytes_sent: int = 0,
        hops: int = 0,
    ) -> None:
        super().__init__(result, bytes_sent, server_bytes_sent, timeout_seconds, hops)
        self._work: dist.Work | None = work
        self._error: PeerError | None = None
        if result is not None:  # a send or receive has no future to tell when it was over
            work.get_future().add_done_callback(self._stamp)

    def wait(self, timeout_seconds: float | None = None) -> T:
        limit = self._limit(timeout_seconds)
        if self._work is not None:
            try:
                self._work.wait(timedelta(seconds=limit))
            except RuntimeError as error:
                self._error = _translated(error, limit)
            self._work = None  # it holds the connections open, and a traceback would hold it
        if self._error is not None:
            raise self._error
        return self._result


class _Errands:
    """Runs calls one after another in a thread of its own, so that a sum through a server can travel beside steps."""

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

    def _work(self) -> None:
        while (errand := self._queue.get()) is not None:
            call, future = errand
            try:
                call()
            except BaseException as error:
                future.set_exception(RuntimeError(str(error)))
            else:
                future.set_result(None)
            del errand, call, future  # they hold the connections open


class _Errand(_UnderWay[T]):
    """A sum through the parameter server under way."""

    def __init__(
        self, future: Future[None], result: T, bytes_sent: int, server_bytes_sent: int, timeout_seconds: float
    ) -> None:
        super().__init__(result, bytes_sent, server_bytes_sent, timeout_seconds)
        self._future = future
        future.add_done_callback(self._stamp)

    def wait(self, timeout_seconds: float | None = None) -> T:
        limit = self._limit(timeout_seconds)
        try:
            self._future.result(limit)
        except (TimeoutError, FutureTimeoutError):
            raise AverageTimeout(f"a peer did not come within {limit:g} s") from None
        except RuntimeError as error:
            raise _translated(error, limit) from None
        return self._result


class _PendingAll:
    """Messages to and from several."""

    server_bytes_sent, hops = 0, 1

    def __init__(self, works: list[_Pending[None]], bytes_sent: int) -> None:
        self._works, self.bytes_sent = works, bytes_sent

    def wait(self, timeout_seconds: float | None = None) -> None:
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for work in self._works:
            work.wait(None if until is None else max(0.001, until - time.monotonic()))

    def flight_seconds(self) -> float:
        return max((w.flight_seconds() for w in self._works), default=0.0)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _translated(error: RuntimeError, limit: float) -> PeerError:
    message = _first_line(error)
    if "timed out" in message.lower():
        return AverageTimeout(f"a peer did not come within {limit:g} s")
    return PeerError(f"a peer failed or left ({message})")


def _first_line(error: BaseException) -> str:
    """gloo's message without the source path that it starts with and the general advice that follows."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (line.split("] ", 1)[-1] if line.startswith("[/") else line).split(". This is typically")[0]
