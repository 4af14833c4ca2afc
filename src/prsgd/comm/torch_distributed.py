"""Workers spread over the processes of a torch.distributed group: gloo on CPU, nccl on GPU, launched by torchrun."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # one is not in torch's export list
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from prsgd._check import one_of, positive, whole_number
from prsgd.comm.base import Combine, Communicator, Done, Route, Then, Work, hosted_range
from prsgd.comm.combining import Peers, combine_over, listens_first
from prsgd.comm.connection import Connection
from prsgd.comm.links import SHAPES, bytes_of_combination, bytes_of_sum
from prsgd.comm.works import Errand, Pending, PendingAll
from prsgd.errors import UsageError

T = TypeVar("T", bound="dist.Work | Future[None] | list[dist.Work]")

SWAPPED_BYTES = 1 << 22
"""Two processes swap up to so many and add up by themselves: one message each way, where a ring takes two, as long as
that is no slower in all on loopback. The room for the other's is as large."""


class TorchDistributed(Communicator):
    """The N workers of a process group, one or more in each process.

    All traffic goes over connections of our own between the ranks of ``group``, or between all ranks without one. They
    are made at the first call, so that closing them makes the peers fail without touching anybody's group. (Only with
    other backends than gloo a ``group`` that is given is used as it is, and closed after an error.) They are given back
    when the communicator is closed, and when nobody has it any more.

    ``shape="parameter-server"`` collects a sum at the process of worker 0, which needs a second row for it, and sends
    it back from there, as the paper describes; "all-reduce" needs no server.

    >>> import prsgd
    >>> prsgd.TorchDistributed()
    Traceback (most recent call last):
    prsgd.errors.UsageError: TorchDistributed needs a process group: call prsgd.init() first, under torchrun or launch()
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
        self.ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
        self._process = dist.get_rank(group)
        if self._process < 0:
            raise ValueError(f"group must contain this process, rank {dist.get_rank()} is not in {list(self.ranks)}")
        processes = len(self.ranks)
        self.num_workers = processes if num_workers is None else whole_number("num_workers", num_workers, at_least=1)
        if self.num_workers < processes:
            raise ValueError(
                f"num_workers must be at least the number of processes, got {self.num_workers} workers "
                f"for {processes} processes"
            )
        self._blocks = [hosted_range(self.num_workers, processes, p) for p in range(processes)]
        self.workers = self._blocks[self._process]
        self.timeout_seconds = positive("timeout_seconds", timeout_seconds)
        self._connection = Connection(self.ranks, self._process, group)
        weakref.finalize(self, self._connection.release).atexit = False  # the connection sees to that itself
        self._calls = 0
        self._others = torch.empty(0)

    def __repr__(self) -> str:
        return repr(self._connection)

    def all_reduce(self, flat: Tensor) -> Work[Tensor]:
        sent, by_server = bytes_of_sum(self.shape, self.num_workers, _num_bytes(flat))
        if self.shape == "parameter-server" and len(self.ranks) > 1:
            tag, limit, peers = self._next_tag(), self._transfer_limit(), range(1, len(self.ranks))
            call = partial(_collect, peers=peers) if self._process == 0 else _hand_in
            future = self._start(lambda g: self._connection.errand(lambda: call(g, flat, tag, limit)), flat)
            return Errand(self, future, flat, sent, server_bytes_sent=by_server)
        if len(self.ranks) == 2 and flat.device.type == "cpu" and _num_bytes(flat) <= SWAPPED_BYTES:
            tag, limit, others = self._next_tag(), self._transfer_limit(), self._others_like(flat)
            swap = partial(_swap, peer=1 - self._process)
            future = self._start(lambda g: self._connection.errand(lambda: swap(g, flat, others, tag, limit)), flat)
            return Errand(self, future, flat, sent, server_bytes_sent=by_server)
        options = AllreduceOptions()
        options.timeout = self._transfer_limit()
        work = self._start(lambda group: group.allreduce([flat], options), flat)
        return Pending(self, work, flat, sent, server_bytes_sent=by_server)

    def all_gather(self, payload: Tensor) -> Work[Tensor]:
        # The collective needs rows of equal number, and processes may host one worker more or less.
        blocks = self._blocks
        padded = payload.new_zeros((max(map(len, blocks)), *payload.shape[1:]))
        padded[: len(payload)] = payload
        parts = [torch.empty_like(padded) for _ in blocks]
        options = AllgatherOptions()
        options.timeout = self._transfer_limit()
        work = self._start(lambda group: group.allgather([parts], [padded], options), padded)
        bytes_sent = _num_bytes(payload[0]) * (self.num_workers - 1)
        pending = Pending(self, work, parts, bytes_sent, hops=self.num_workers - 1)
        return Then(pending, lambda parts: torch.cat([p[: len(b)] for p, b in zip(parts, blocks)]))

    def all_combine(self, lines: Tensor, beside: Tensor, combine: Combine, *, out: Tensor) -> Work[Tensor]:
        sent = bytes_of_combination(self.num_workers, _num_bytes(lines[0]), _num_bytes(out), _num_bytes(beside[0]))
        if len(self.ranks) == 1:
            out.copy_(combine(lines, beside, self.workers))
            return Done(beside, bytes_sent=sent, hops=2 if self.num_workers > 1 else 0)
        numbers = beside.new_empty(self.num_workers, *beside.shape[1:])
        peers = Peers(self._process, self._blocks, self._transfer_limit(), [self._next_tag() for _ in range(3)])
        call = partial(combine_over, peers, lines, beside, combine, out, numbers)
        future = self._start(lambda group: self._connection.errand(lambda: call(group)), lines)
        return Errand(self, future, numbers, sent, hops=2)

    def exchange(self, send: Mapping[Route, Tensor], receive: Mapping[Route, Tensor]) -> Work[None]:
        tag = self._next_tag()

        def start(group: dist.ProcessGroup) -> list[dist.Work]:
            works = []
            # Both ends walk the routes in one order, so that messages between two processes match.
            routes = sorted(set(send) | set(receive))
            if listens_first(group):
                routes.sort(key=lambda route: self._host(route[1]) != self._process)
            for route in routes:
                source, target = (self._host(worker) for worker in route)
                if source == target:
                    receive[route].copy_(send[route])
                elif source == self._process:
                    works.append(group.send([send[route]], target, tag))
                else:
                    works.append(group.recv([receive[route]], source, tag))
            return works

        works = self._start(start, next(iter({**send, **receive}.values())))
        bytes_sent = sum(map(_num_bytes, send.values())) // max(1, len(self.workers))
        return PendingAll([Pending(self, w, None, 0) for w in works], bytes_sent)

    def broadcast(self, flat: Tensor, worker: int = 0) -> Work[Tensor]:
        options = BroadcastOptions()
        options.rootRank, options.timeout = self._host(worker), self._transfer_limit()
        work = self._start(lambda group: group.broadcast([flat], options), flat)
        return Pending(self, work, flat, _num_bytes(flat))

    def close(self) -> None:
        self._connection.close()

    @property
    def is_watched(self) -> bool:
        """Can it tell that a peer's end is gone?"""
        return self._connection.is_watched

    def lost_seconds(self) -> float:
        """For how long it has been known that a peer's end is gone; 0: all are there."""
        return self._connection.lost_seconds()

    @property
    def transfers(self) -> int:
        """How many were started: the same number is the same transfer in every process."""
        return self._connection.transfers

    def tell_waiting(self, transfer: int) -> None:
        """Let the others know that this process waits in it."""
        self._connection.tell_waiting(transfer)

    def absent(self, transfer: int) -> str:
        """Who has not come to it: "worker 3", or "a peer" if that is not known."""
        ids = [str(worker) for process in self._connection.missing(transfer) for worker in self._blocks[process]]
        return f"worker{'s' if len(ids) > 1 else ''} {', '.join(ids)}" if ids else "a peer"

    def _start(self, launch: Callable[[dist.ProcessGroup], T], tensor: Tensor) -> T:
        return self._connection.start(launch, tensor.device, self.timeout_seconds)

    def _transfer_limit(self) -> timedelta:
        """A transfer's own, far above that of whoever waits for it, so that the waiter's message is the one seen."""
        return timedelta(seconds=max(2 * self.timeout_seconds, 86400))

    def _others_like(self, flat: Tensor) -> Tensor:
        """Room for the other process's numbers. Errands come one after another, so all share it."""
        if self._others.shape != flat.shape or self._others.dtype != flat.dtype:
            with torch.inference_mode(False):
                self._others = torch.empty(flat.shape, dtype=flat.dtype)
        return self._others

    def _next_tag(self) -> int:
        """Calls come in the same order everywhere, so counting them keeps messages apart (nccl does so by itself)."""
        self._calls += 1
        return self._calls

    def _host(self, worker: int) -> int:
        return next(p for p, block in enumerate(self._blocks) if worker in block)


def _collect(group: dist.ProcessGroup, flat: Tensor, tag: int, limit: timedelta, *, peers: range) -> None:
    """The server's part of a sum."""
    received = torch.empty_like(flat)
    for peer in peers:
        group.recv([received], peer, tag).wait(limit)
        _add(flat, received)
    for peer in peers:
        group.send([flat], peer, tag).wait(limit)


def _hand_in(group: dist.ProcessGroup, flat: Tensor, tag: int, limit: timedelta) -> None:
    """The others' part."""
    group.send([flat], 0, tag).wait(limit)
    group.recv([flat], 0, tag).wait(limit)


def _swap(group: dist.ProcessGroup, flat: Tensor, others: Tensor, tag: int, limit: timedelta, *, peer: int) -> None:
    """Both processes' part of a sum of two: a + b and b + a are the same to the last bit.
    It is for ``listens_first`` alone."""
    received, sent = group.recv([others], peer, tag), group.send([flat.contiguous()], peer, tag)
    received.wait(limit)
    sent.wait(limit)
    _add(flat, others)


@torch.no_grad()
def _add(flat: Tensor, others: Tensor) -> None:
    """In a thread of ours, which is not in the inference mode in which ``flat`` may have been made."""
    with torch.inference_mode(flat.is_inference()):
        flat += others


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
