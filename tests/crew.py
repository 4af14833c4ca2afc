"""Workers that come and go, for tests: processes that take steps when they are told to, and their lighthouse."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

import torch
from torch import nn

import prsgd
from prsgd.comm import lighthouse, membership
from prsgd.comm.quorum import Caller
from prsgd.comm.sockets import listening
from tests.ranks import free_port, warmed

LIMIT_SECONDS = 60.0


class Died(Exception):  # noqa: N818 - what a test waits for
    """The worker is gone, or raised."""


class Quadratic(nn.Module):
    """(x - c)^2 / 2 in float64: a step with lr r moves x by r (c - x)."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(width, dtype=torch.float64))

    def forward(self, c: float) -> torch.Tensor:
        return ((self.x - c) ** 2).sum() / 2


@dataclass
class Answer:
    """Where a worker is."""

    x: torch.Tensor
    round: int
    step: int
    lr: float
    members: list[tuple[int, ...] | None]
    listens: set[str]
    seconds: float
    said: list[str]
    """Its warnings."""


@dataclass
class Crew:
    """Up to ``num_workers`` workers, whose runs are ``options``; worker i's c is i."""

    num_workers: int
    options: dict[str, Any]
    min_workers: int = 1
    workers: dict[int, Worker] = field(default_factory=dict)

    def __enter__(self) -> Crew:
        self.port = free_port()
        self.light()
        return self

    def light(self) -> None:
        """Start the lighthouse, at the place where it always is."""
        self.lighthouse = warmed().Process(target=_lighthouse, args=(self.port,), daemon=True)
        self.lighthouse.start()

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.process.kill()
        self.lighthouse.kill()

    def start(self, *ids: int, **options: Any) -> list[Worker]:
        """New processes of these workers."""
        for id in ids:
            self.workers[id] = Worker(id, self, {**self.options, **options})
        return [self.workers[id] for id in ids]

    def step(self, count: int, ids: Sequence[int] | None = None) -> dict[int, Answer]:
        """All, or these, take so many steps."""
        chosen = [self.workers[id] for id in (sorted(self.workers) if ids is None else ids)]
        for worker in chosen:
            worker.send(count)
        return {worker.id: worker.hear() for worker in chosen}

    def end(self, ids: Sequence[int]) -> dict[int, Answer]:
        for id in ids:
            self.workers[id].send("end")
        return {id: self.workers[id].hear() for id in ids}


class Worker:
    """One process."""

    def __init__(self, id: int, crew: Crew, options: dict[str, Any]) -> None:
        self.id = id
        self.pipe, theirs = warmed().Pipe()
        self.calls = warmed().Event()
        """Set whenever it asks the lighthouse who is there."""
        args = (theirs, self.calls, id, crew.num_workers, crew.min_workers, f"127.0.0.1:{crew.port}", options)
        self.process = warmed().Process(target=life, args=args, daemon=True)
        self.process.start()
        theirs.close()

    def send(self, what: Any) -> None:
        with suppress(OSError):
            self.pipe.send(what)

    def hear(self, seconds: float = LIMIT_SECONDS) -> Any:
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"worker {self.id} did not answer within {seconds:g} s")
        try:
            said = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise Died(f"worker {self.id} is gone") from None
        if isinstance(said, str):
            raise Died(said)
        return said

    def await_call(self) -> None:
        """It is in a call, and waits for the others."""
        self.calls.clear()
        if not self.calls.wait(LIMIT_SECONDS):
            raise TimeoutError(f"worker {self.id} did not call within {LIMIT_SECONDS:g} s")
        time.sleep(0.5)  # what it asks is on its way

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def signal(self, which: signal.Signals) -> None:
        os.kill(self.process.pid, which)


def _lighthouse(port: int) -> None:
    _, server = lighthouse.serve("127.0.0.1", port)
    time.sleep(600)
    server.shutdown()


def life(
    pipe: Connection, calls: Event, id: int, num_workers: int, min_workers: int, address: str, options: dict[str, Any]
) -> None:
    """A worker: takes the steps that it is told to, and tells where it is."""
    torch.set_num_threads(1)
    warnings.showwarning = lambda message, *_, **__: said_so_far.append(str(message))  # in threads too
    ask = lighthouse.Lighthouse.ask

    def called(self: lighthouse.Lighthouse, caller: Caller) -> tuple[str, list[Caller]] | None:
        calls.set()
        return ask(self, caller)

    lighthouse.Lighthouse.ask = called  # type: ignore[method-assign]
    options.pop("fault", _no_fault)()
    options = {"schedule": prsgd.every(4), **options}
    limit, state = options.pop("limit_seconds", None), options.pop("state", None)
    membership.START_SECONDS = options.pop("start_seconds", membership.START_SECONDS)
    local: prsgd.LocalSGD | None = None
    try:
        model: nn.Module = options.pop("model", Quadratic)()
        optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.25))
        with torch.no_grad():
            model.x.fill_(10.0 + id)
        comm = prsgd.TorchFT(num_workers, worker=id, lighthouse=address, min_workers=min_workers, timeout_seconds=limit)
        local = prsgd.LocalSGD(model, optimizer, comm=comm, **options)
        if state is not None:
            local.load_state_dict(state[0])
            model.load_state_dict(state[1])
        with local:
            pipe.send_bytes(pickle.dumps(_answer(model, local, optimizer, 0.0)))
            while (told := pipe.recv()) != "end":
                began = time.monotonic()
                if told == "state":
                    pipe.send_bytes(pickle.dumps((local.state_dict(), model.state_dict())))
                    continue
                if told == "epoch":
                    with local.epoch():
                        pass
                    pipe.send_bytes(pickle.dumps(_answer(model, local, optimizer, 0.0)))
                    continue
                if told == "nan":
                    with torch.no_grad():
                        model.x.fill_(torch.nan)
                    continue
                if told == "look":
                    with local.consensus() as shown:
                        pipe.send_bytes(pickle.dumps(shown.x.detach().clone()))
                    continue
                for _ in range(told):
                    optimizer.zero_grad()
                    model(float(id)).backward()
                    optimizer.step()
                pipe.send_bytes(pickle.dumps(_answer(model, local, optimizer, time.monotonic() - began)))
        said = pickle.dumps(_answer(model, local, optimizer, 0.0))
    except BaseException as error:
        said = pickle.dumps(f"{type(error).__name__}: {error}{_saved(error, local)}")
    pipe.send_bytes(said)
    pipe.close()
    os._exit(0)


said_so_far: list[str] = []


def _no_fault() -> None:
    pass


def hangs_while_it_is_told() -> None:
    """To be given as ``fault``: the worker is stopped when it has heard how much it is to be told."""
    do, left = membership.Group.do, [False, True]

    def stopped(self: membership.Group, launch: Any) -> None:
        if left and not left.pop():
            os.kill(os.getpid(), signal.SIGSTOP)
        do(self, launch)

    membership.Group.do = stopped  # type: ignore[method-assign]


def reaches_the_lighthouse_alone() -> None:
    """To be given as ``fault``: as behind a firewall, the others are out of reach, when it first tries."""
    reach, left = membership._client, [0]
    membership.REST_TIMES = 1

    def unreachable(store: str) -> Any:
        if left:
            left.pop()
            raise prsgd.PeerError("the others do not answer")
        return reach(store)

    membership._client = unreachable


def _saved(error: BaseException, local: prsgd.LocalSGD | None) -> str:
    """Can the state be saved after the others are lost?"""
    if local is None or not isinstance(error, prsgd.PeerError):
        return ""
    return f", saved after {local.state_dict()['lanes'][0]['books']['round']} rounds"


def _answer(model: nn.Module, local: prsgd.LocalSGD, optimizer: torch.optim.Optimizer, seconds: float) -> Answer:
    members = [record.members for record in local.records]
    lr = optimizer.param_groups[0]["lr"]
    x = model.x.detach().clone()
    return Answer(x, local.round, local.step, lr, members, listening(), seconds, list(said_so_far))
