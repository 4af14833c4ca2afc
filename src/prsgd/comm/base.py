"""Where the workers live: the seam between the algorithm and what carries its numbers.

A communicator moves tensors between processes and knows which workers live in which. Workers are named by id,
0 ... N-1; a process hosts a contiguous range of them. Every call returns work to wait for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from prsgd.errors import PeerError

T = TypeVar("T", covariant=True)
S = TypeVar("S")

Route = tuple[int, int]
"""(from worker, to worker)"""
Combine = Callable[[Tensor, Tensor, range], Tensor]
"""All workers' lines (N, m, ...) and numbers (N, K), and the workers that own the lines -> (m, ...)"""


class Missed(PeerError):  # noqa: N818 - no error where it is taken care of
    """The others have gone on without this worker, and one of them has told it ``state``: what it waits for is to be
    launched again with that, and is there then."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__("the others have gone on without this worker: start it again")
        self.state = state


class Work(Protocol[T]):
    """A transfer, or what is made of one, under way.

    >>> import prsgd
    >>> work = prsgd.InProcess(2).all_reduce(torch.ones(3))
    >>> work.wait(), work.bytes_sent
    (tensor([1., 1., 1.]), 12)
    """

    bytes_sent: int
    """What one worker puts on the wire for it, were every worker its own process."""
    server_bytes_sent: int
    """What the parameter server sends, where there is one."""
    hops: int
    """Messages one after another that it takes; 0: a sum's, as many as the link's shape has."""

    def wait(self, timeout_seconds: float | None = None) -> T:
        """The result, as soon as it is there. Raises PeerError, or AverageTimeout after ``timeout_seconds``; or
        ``Missed``, where workers come and go."""
        ...

    def flight_seconds(self) -> float:
        """How long it was under way; to be asked after ``wait``."""
        ...


class Done(Generic[T]):
    """Work that was finished at once.

    >>> Done("the result", bytes_sent=8).wait()
    'the result'
    """

    def __init__(self, result: T, *, bytes_sent: int = 0, server_bytes_sent: int = 0, hops: int = 0) -> None:
        self._result, self.hops = result, hops
        self.bytes_sent, self.server_bytes_sent = bytes_sent, server_bytes_sent

    def wait(self, timeout_seconds: float | None = None) -> T:
        return self._result

    def flight_seconds(self) -> float:
        return 0.0


class Then(Generic[S, T]):
    """Work whose result is made from another's, once that one is there.

    >>> Then(Done(3), lambda number: number + 1).wait()
    4
    """

    def __init__(self, work: Work[S], make: Callable[[S], T]) -> None:
        self._work, self._make = work, make
        self._made: list[T] = []
        self.bytes_sent, self.server_bytes_sent, self.hops = work.bytes_sent, work.server_bytes_sent, work.hops

    def wait(self, timeout_seconds: float | None = None) -> T:
        """Wait for the other's result, and make this one of it."""
        if not self._made:
            self._made.append(self._make(self._work.wait(timeout_seconds)))
        return self._made[0]

    def flight_seconds(self) -> float:
        return self._work.flight_seconds()


class Both(Generic[S, T]):
    """Two works under way at the same time."""

    def __init__(self, first: Work[S], second: Work[T]) -> None:
        self._works = first, second
        self.bytes_sent = first.bytes_sent + second.bytes_sent
        self.server_bytes_sent = first.server_bytes_sent + second.server_bytes_sent
        self.hops = max(first.hops, second.hops)

    def wait(self, timeout_seconds: float | None = None) -> tuple[S, T]:
        """Both results."""
        began = time.monotonic()
        first = self._works[0].wait(timeout_seconds)
        left = None if timeout_seconds is None else max(0.001, timeout_seconds - (time.monotonic() - began))
        return first, self._works[1].wait(left)

    def flight_seconds(self) -> float:
        return max(work.flight_seconds() for work in self._works)


class Communicator(Protocol):
    """N workers spread over processes.

    >>> import prsgd
    >>> comm = prsgd.InProcess(num_workers=3)
    >>> comm.workers, comm.all_gather(torch.tensor([[1.0], [2.0], [3.0]])).wait().flatten()
    (range(0, 3), tensor([1., 2., 3.]))
    """

    num_workers: int
    workers: range
    """The ids of the workers hosted in this process."""

    @property
    def members(self) -> Sequence[int]:
        """The ids of all workers now."""
        return range(self.num_workers)

    ranks: tuple[int, ...] = ()
    """The torch.distributed ranks of the processes that host the workers; empty: no process but this one."""
    timeout_seconds: float
    """How long ``wait`` waits unless it is told."""

    is_elastic: bool = False
    """Do workers come and go? Then ``members`` changes when a call has come back, ``num_workers`` is the most that are
    ever there, and averages must be one sum."""

    def join(self, device: torch.device, launched: int) -> Mapping[str, Any] | None:
        """Join a run where workers come and go; this worker's own state has seen ``launched`` averages. If others have
        begun, one of them tells its state, which is returned, and the average at which it does so is what the next call
        returns. None: all begin together."""
        return None

    def invite(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Let others join with the next call, which is an average: they are told ``state()``."""
        return

    def all_reduce(self, flat: Tensor) -> Work[Tensor]:
        """Sum ``flat`` over the processes, in place."""
        ...

    def all_gather(self, payload: Tensor) -> Work[Tensor]:
        """From each process one row per hosted worker, (n, ...); to each all workers' rows by id, (N, ...)."""
        ...

    def all_combine(self, lines: Tensor, beside: Tensor, combine: Combine, *, out: Tensor) -> Work[Tensor]:
        """An all-reduce whose sum is the caller's: each line of all workers is brought to one owner, which combines it.

        From each process ``lines`` (n, M, ...) of its hosted workers, of which worker j owns ``hosted_range(M, N, j)``,
        and a few numbers ``beside`` (n, K), which all get. ``combine`` is called once, in any thread, with all workers'
        lines (N, m, ...) that hosted workers own, all workers' numbers and the hosted workers; what it makes, a line of
        each, fills those lines of ``out`` (M, ...) in all processes. The result is all workers' numbers by id, (N, K).

        Unless a communicator knows better, all gather all lines, and every process makes everything.
        """
        gathered = Both(self.all_gather(lines), self.all_gather(beside))

        def made(both: tuple[Tensor, Tensor]) -> Tensor:
            out.copy_(combine(*both, range(self.num_workers)))
            return both[1]

        return Then(gathered, made)

    def exchange(self, send: Mapping[Route, Tensor], receive: Mapping[Route, Tensor]) -> Work[None]:
        """Send each tensor along its route; fill each tensor of ``receive`` with what came along its."""
        ...

    def broadcast(self, flat: Tensor, worker: int = 0) -> Work[Tensor]:
        """Overwrite ``flat`` in every process with that of the process that hosts ``worker``."""
        ...

    def close(self) -> None:
        """Leave, so that whoever still waits for this process fails at once. Nothing works afterwards."""
        ...


def hosted_range(num_workers: int, num_processes: int, process: int) -> range:
    """The workers of one process: contiguous blocks, the first ones a worker larger when N is no multiple.

    >>> [list(hosted_range(5, 2, p)) for p in range(2)]
    [[0, 1, 2], [3, 4]]
    """
    small, extra = divmod(num_workers, num_processes)
    start = process * small + min(process, extra)
    return range(start, start + small + (process < extra))
