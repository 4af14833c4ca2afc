"""Workers that come and go: live membership by torchft's lighthouse."""

from __future__ import annotations

import socket
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]  # one is not in torch's export list
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
)

from prsgd._check import positive, whole_number
from prsgd._warn import warn
from prsgd.comm import job
from prsgd.comm.base import Communicator, Done, Missed, Route, Then, Work
from prsgd.comm.links import bytes_of_sum
from prsgd.comm.membership import Group, Membership, Run
from prsgd.comm.quorum import Caller, Plan
from prsgd.comm.works import Errand, Wire
from prsgd.errors import AverageTimeout, UsageError

T = TypeVar("T")


class TorchFT(Communicator):
    """Workers that come and go: each is a process of its own, and they find each other by a torchft lighthouse.

    Whoever dies, hangs or is cut off is left out of the average that is under way, and the others go on within a
    second or two, without restarting. A worker that joins, or comes back, is told the state by one of them (the
    averaging's memory, the round, the lr, what the schedule has learned), takes over the average, and counts from its
    next round on.

    - ``num_workers``: the most that are ever there, whose ids are below it; torchrun's WORLD_SIZE unless given.
    - ``worker``: this one's id, which it keeps when it comes back; torchrun's RANK unless given.
    - ``lighthouse``: where it listens, as "127.0.0.1:29510"; the environment's TORCHFT_LIGHTHOUSE unless given.
    - ``min_workers``: with fewer the run waits, as long as ``LocalSGD(timeout_seconds=)`` allows. (When it begins, all
      ``num_workers`` are waited for, but no longer than 10 s.)
    - ``timeout_seconds``: how long a worker that hangs or is slow may hold the others in a round; three times as long
      as the last rounds took unless given, and at least 1.5 s.
    - ``address``: where the others reach this process; the one by which it reaches the lighthouse unless given, so
      that nothing listens beyond loopback if that is there.

    It takes averagings that are one sum: ``mean()`` without a wire, ``outer()`` and ``easgd()``.

    ``prsgd launch --elastic --workers 4 train.py`` starts a lighthouse and four workers, and tells them these numbers,
    so that train.py says ``prsgd.TorchFT()``. A lighthouse by hand is a command:

        torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --heartbeat_timeout_ms 500 --quorum_tick_ms 20

    Here it is in this process, beside the only worker of a run:

    >>> import torch, prsgd
    >>> from torchft.coordination import LighthouseServer
    >>> lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
    >>> place = "127.0.0.1:" + lighthouse.address().rpartition(":")[2]
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> comm = prsgd.TorchFT(num_workers=1, worker=0, lighthouse=place)
    >>> with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4), comm=comm) as local:
    ...     for _ in range(8):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).square().mean().backward()
    ...         optimizer.step()
    >>> [(record.round, record.members) for record in local.records]
    [(1, (0,)), (2, (0,))]
    >>> lighthouse.shutdown()
    """

    is_elastic = True

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        worker: int | None = None,
        lighthouse: str | None = None,
        min_workers: int = 1,
        timeout_seconds: float | None = None,
        address: str | None = None,
    ) -> None:
        ours = job.find()
        if num_workers is None or worker is None:
            if ours is None:
                raise ValueError("TorchFT needs num_workers and worker, where no torchrun tells WORLD_SIZE and RANK")
            num_workers, worker = num_workers or ours.size, ours.rank if worker is None else worker
        self.num_workers = whole_number("num_workers", num_workers, at_least=1)
        worker = whole_number("worker", worker, at_least=0, at_most=self.num_workers - 1)
        min_workers = whole_number("min_workers", min_workers, at_least=1)
        if min_workers > self.num_workers:
            raise ValueError(
                f"min_workers must be at most num_workers, the most that are ever there: got {min_workers} of "
                f"{self.num_workers}"
            )
        limit = None if timeout_seconds is None else positive("timeout_seconds", timeout_seconds)
        lighthouse = lighthouse or job.lighthouse()
        if not lighthouse:
            raise ValueError('lighthouse must be an address such as "127.0.0.1:29510", or TORCHFT_LIGHTHOUSE be set')
        host, port = _place(lighthouse)
        self.workers = range(worker, worker + 1)
        self.timeout_seconds = 600.0
        self._members: Sequence[int] = self.workers
        self._membership = Membership(
            Caller(f"{worker:06d}:{uuid.uuid4().hex}", worker, min_workers=min_workers),
            f"http://{host}:{port}",
            address or _own_address(host, port),
            num_workers=self.num_workers,
            min_workers=min_workers,
            timeout_seconds=limit,
        )
        weakref.finalize(self, self._membership.close)
        self._state: Callable[[], Mapping[str, Any]] | None = None
        self._scratch = torch.empty(0)
        self._held: Tensor | None = None
        """The sum that this worker came in with, for the average that it makes next."""

    def __repr__(self) -> str:
        return f"worker {self.workers.start}"

    @property
    def members(self) -> Sequence[int]:
        """The workers that took part in the newest average, or other call, that this process has waited for."""
        return self._members

    @property
    def limit_seconds(self) -> float:
        """How long a worker that hangs or is slow holds the others now."""
        return self._membership.limit_seconds

    def invite(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._state = state

    def join(self, device: torch.device, launched: int) -> Mapping[str, Any] | None:
        def come_in(group: Group, plan: Plan) -> None:
            if plan.call:  # others have begun, and are in an average
                _, number, dtype = plan.call.split()
                self._held = torch.zeros(int(number), dtype=getattr(torch, dtype), device=device)
                _sum(group, self._held)

        try:
            self._call("", come_in, device, lambda: None, launched=launched).wait()
        except Missed as missed:
            return missed.state
        met = self._membership.met
        assert met is not None
        there = len(met.plan.callers)
        if there < self.num_workers and self._speaks(met.plan):
            warn(
                f"the run begins with {there} of {self.num_workers} workers: the others did not come in time, and "
                "join when they do",
                RuntimeWarning,
            )
        return None

    def all_reduce(self, flat: Tensor) -> Work[Tensor]:
        sent, _ = bytes_of_sum("all-reduce", len(self._members), flat.nbytes)
        if self._held is not None:
            held, self._held, self._state = self._held, None, None  # what was to be told was for this average
            return Done(flat.copy_(held), bytes_sent=sent)
        total = self._scratch_like(flat)

        def summed(group: Group, plan: Plan) -> None:
            # A sum that fails leaves garbage behind, and is taken again.
            if self._leads(plan):
                total.copy_(flat)
            else:
                total.zero_()
            _sum(group, total)

        dtype = str(flat.dtype).removeprefix("torch.")
        return self._call(f"sum {flat.numel()} {dtype}", summed, flat.device, lambda: flat.copy_(total), sent, total)

    def all_gather(self, payload: Tensor) -> Work[Tensor]:
        parts: list[Tensor] = []

        def gathered(group: Group, plan: Plan) -> None:
            parts[:] = [torch.empty_like(payload) for _ in plan.callers]
            options = AllgatherOptions()
            options.timeout = group.limit
            group.do(lambda g: g.allgather([parts], [payload], options))

        sent = payload.nbytes * (len(self._members) - 1)
        return self._call(f"gather {payload.nbytes}", gathered, payload.device, lambda: torch.cat(parts), sent)

    def broadcast(self, flat: Tensor, worker: int = 0) -> Work[Tensor]:
        """From ``worker``, or from the first member if that worker is not there."""
        copy = self._scratch_like(flat)

        def sent(group: Group, plan: Plan) -> None:
            copy.copy_(flat)
            options = BroadcastOptions()
            options.timeout = group.limit
            ids = [caller.worker for caller in plan.callers]
            options.rootRank = ids.index(worker) if worker in ids else 0
            group.do(lambda g: g.broadcast([copy], options))

        return self._call(f"broadcast {flat.nbytes}", sent, flat.device, lambda: flat.copy_(copy), flat.nbytes)

    def exchange(self, send: Mapping[Route, Tensor], receive: Mapping[Route, Tensor]) -> Work[None]:
        raise UsageError("workers that come and go have no routes between two of them: TorchFT sums over all")

    def close(self) -> None:
        self._membership.close()

    def _call(
        self, what: str, run: Run, device: torch.device, result: Callable[[], T], bytes_sent: int = 0,
        held: Tensor | None = None, launched: int = 0,
    ) -> Work[T]:  # fmt: skip
        state, self._state = self._state, None
        future = self._membership.call(what, run, device, state, launched)

        def made(_: None) -> T:
            met = self._membership.met
            assert met is not None
            lost = sorted(set(self._members) - set(met.plan.members))
            self._members = met.plan.members
            if lost and self._speaks(met.plan):
                warn(
                    f"{len(self._members)} of {self.num_workers} workers go on without {', '.join(map(str, lost))}: "
                    "dead, cut off, or too slow",
                    RuntimeWarning,
                )
            if met.state is None:
                return result()
            if held is not None:
                self._held = held
            raise Missed(met.state)

        return Then(_Call(self._membership, future, self.timeout_seconds, bytes_sent), made)

    def _leads(self, plan: Plan) -> bool:
        return self.workers.start in plan.members

    def _speaks(self, plan: Plan) -> bool:
        """Is this the one that warns, for all that were there?"""
        return self.workers.start == plan.members[0]

    def _scratch_like(self, flat: Tensor) -> Tensor:
        """Room for what is under way; calls come one after another, so all share it."""
        if self._scratch.numel() != flat.numel() or self._scratch.dtype != flat.dtype:
            with torch.inference_mode(False):
                self._scratch = torch.empty_like(flat)
        return self._scratch


class _Call(Errand[None]):
    """A call under way, which watches its connections itself."""

    def __init__(self, membership: Membership, future: Future[None], timeout_seconds: float, bytes_sent: int) -> None:
        super().__init__(_Unwatched(timeout_seconds), future, None, bytes_sent)
        self._membership = membership

    def _finish(self, comm: Wire, limit: float) -> None:
        try:
            super()._finish(comm, limit)
        except AverageTimeout:
            raise AverageTimeout(f"no average was made within {limit:g} s: {self._membership.seen}") from None


class _Unwatched:
    is_watched, transfers = False, 0

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds

    def lost_seconds(self) -> float:
        return 0.0

    def tell_waiting(self, transfer: int) -> None:
        """The lighthouse knows."""

    def absent(self, transfer: int) -> str:
        return "a peer"


def _sum(group: Group, total: Tensor) -> None:
    options = AllreduceOptions()
    options.timeout = group.limit
    group.do(lambda g: g.allreduce([total], options))


def _place(lighthouse: str) -> tuple[str, int]:
    host, _, port = lighthouse.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f'lighthouse must be an address such as "127.0.0.1:29510", got {lighthouse!r}')
    return host, int(port)


def _own_address(host: str, port: int) -> str:
    """Of this machine, as seen from there; nothing is sent."""
    family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
