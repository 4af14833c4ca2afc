"""The ways to train one model on several ranks: ours, torch's and other libraries'. A new one is a row in the table.

Each is a context manager that is given the rank's work and yields a function: one step of training, with whatever
communication is its way. All train by SGD with the same lr and momentum.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

import prsgd
from prsgd.bench.models import Work
from prsgd.comm.joining import loopback_store, open_store

Step = Callable[[], None]
WARM_UP_STEPS = 2
"""Of one that communicates at every step."""
LIMIT = timedelta(seconds=60)
"""How long a peer may wait for another rank."""


@dataclass(frozen=True)
class Ground:
    """Where a rank stands; the process group is up."""

    rank: int
    ranks: int
    address: str
    """Its own."""
    period: int


@dataclass(frozen=True)
class Contestant:
    """One row of the table."""

    summary: str
    train: Callable[[Work, Ground], AbstractContextManager[Step]]
    package: str | None = None
    """What has to be installed for it, as it is imported."""
    every_step: bool = False
    """Does it communicate at every step, whatever the period?"""
    settles: bool = False
    """Does it find its way in the first averages, so that it has to be given some?"""

    def warm_up(self, period: int) -> int:
        """Steps that are not looked at. A turn begins one step before a round ends: then every average that is launched
        in it has the steps to hide behind in it, also where these are a whole period."""
        return WARM_UP_STEPS if self.every_step else (6 if self.settles else 2) * period - 1


@dataclass(frozen=True)
class Recorded:
    """A step of a run whose averages leave records."""

    step: Step
    local: prsgd.LocalSGD

    def __call__(self) -> None:
        self.step()


def sgd(work: Work) -> SGD:
    return SGD(work.model.parameters(), lr=work.lr, momentum=0.9)


def plain(work: Work, optimizer: Optimizer, model: nn.Module | None = None) -> Step:
    """The user's usual step, by whatever optimizer; of the work's own model, or of what wraps it."""

    def step() -> None:
        optimizer.zero_grad()
        work.loss(model).backward()
        optimizer.step()

    return step


@contextmanager
def alone(work: Work, _: Ground) -> Iterator[Step]:
    yield plain(work, sgd(work))


@contextmanager
def ddp(work: Work, _: Ground, hook: str | None = None) -> Iterator[Step]:
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = DistributedDataParallel(work.model), sgd(work)
    if hook in ("bf16", "fp16"):  # torch has the former on CUDA and XPU alone
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, getattr(default_hooks, f"{hook}_compress_hook"))
    elif hook == "powersgd":
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=WARM_UP_STEPS)
        model.register_comm_hook(state, powerSGD_hook)
    yield plain(work, optimizer, model)


@contextmanager
def bare(work: Work, ground: Ground, hidden: int = 0) -> Iterator[Step]:
    """The least that averaging can cost: one sum of the model's numbers as they are, with nothing checked or told;
    travelling behind so many steps, after which its change is added."""
    optimizer, hidden = sgd(work), min(hidden, ground.period - 1)
    step, steps = plain(work, optimizer), count(1)
    parameters: list[torch.Tensor] = list(work.model.parameters())
    numbers = [p.numel() for p in parameters]
    flat, snap = torch.empty(sum(numbers)), torch.empty(sum(numbers) if hidden else 0)
    parts = [part.view_as(p) for part, p in zip(flat.split(numbers), parameters)]
    under_way: list[dist.Work] = []

    def launch() -> None:
        torch._foreach_copy_(parts, parameters)
        if hidden:
            snap.copy_(flat)
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        under_way.append(work)

    def land() -> None:
        under_way.pop().wait()
        flat.div_(ground.ranks)
        if hidden:
            flat.sub_(snap)
            torch._foreach_add_(parameters, parts)
        else:
            torch._foreach_copy_(parameters, parts)

    def step_and_sum() -> None:
        step()
        taken = next(steps)
        with torch.no_grad():
            if (taken + hidden) % ground.period == 0:  # so that it lands where the others do
                launch()
            if taken % ground.period == 0:
                land()

    yield step_and_sum


@contextmanager
def averager(work: Work, ground: Ground) -> Iterator[Step]:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    optimizer = PostLocalSGDOptimizer(sgd(work), PeriodicModelAverager(period=ground.period, warmup_steps=0))
    yield plain(work, optimizer)


@contextmanager
def accelerate(work: Work, ground: Ground) -> Iterator[Step]:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(work.model, sgd(work))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=ground.period) as local:

        def step() -> None:
            optimizer.zero_grad()
            accelerator.backward(work.loss(model))
            optimizer.step()
            local.step()

        yield step


@contextmanager
def torchft(work: Work, ground: Ground, hidden: int | None = None) -> Iterator[Step]:
    """Every rank is a replica group of its own, with its own store; the lighthouse is at rank 0.

    With ``hidden`` it is DiLoCo instead of LocalSGD, whose average travels in one bucket behind so many steps. An outer
    step of lr 1 leads to the mean, as the others have it.
    """
    # It tells the others the machine's name to find a rank by, which is the same in all network namespaces.
    socket.gethostname = lambda: ground.address
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    lighthouse, told = None, [""]
    if ground.rank == 0:
        lighthouse = LighthouseServer(bind=f"{ground.address}:0", min_replicas=ground.ranks, join_timeout_ms=1000)
        port = lighthouse.address().rsplit(":", 1)[1]
        told = [f"http://{ground.address}:{port}"]
    dist.broadcast_object_list(told)
    if ground.address.startswith("127."):
        store = loopback_store(0, 1, timeout=LIMIT)
    else:
        store = open_store(ground.address, timeout=LIMIT)
    optimizer = sgd(work)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=work.model.load_state_dict,
        state_dict=work.model.state_dict,
        min_replica_size=ground.ranks,
        use_async_quorum=False,
        timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr=ground.address,
        store_port=store.port,
        lighthouse_addr=told[0],
        replica_id=f"rank{ground.rank}",
        hostname=ground.address,
        init_sync=False,  # all begin alike
    )
    if hidden is None:
        averaging = LocalSGD(manager, work.model, optimizer, sync_every=ground.period)
    else:
        averaging = DiLoCo(
            manager,
            [work.model],
            optimizer,
            SGD(work.model.parameters(), lr=1.0),
            sync_every=ground.period,
            use_bucketization=True,
            fragment_sync_delay=min(hidden, ground.period - 1),
        )
    try:
        with averaging:
            yield plain(work, optimizer)
    finally:
        manager.shutdown(wait=False)
        dist.barrier()  # the lighthouse goes last
        if lighthouse is not None:
            lighthouse.shutdown()


@contextmanager
def ours(work: Work, ground: Ground, parts: Callable[[], dict[str, Any]] = dict) -> Iterator[Step]:
    optimizer = sgd(work)
    with prsgd.LocalSGD(work.model, optimizer, **{"schedule": prsgd.every(ground.period), **parts()}) as local:
        yield Recorded(plain(work, optimizer), local)


def _with(**parts: Any) -> Callable[[Work, Ground], AbstractContextManager[Step]]:
    return partial(ours, parts=lambda: {name: part() if callable(part) else part for name, part in parts.items()})


NONE = "none"
"""The limit: what the others' throughput is a fraction of."""
MEASURES = (NONE, "bare", "bare-6")
"""They take part to measure the others by, and are no way to train."""

CONTESTANTS = {
    NONE: Contestant("no communication: the limit", alone),
    "ddp": Contestant("torch's DistributedDataParallel", ddp, every_step=True),
    "ddp-bf16": Contestant("the same, gradients in bfloat16", partial(ddp, hook="bf16"), every_step=True),
    "ddp-fp16": Contestant("the same, gradients in float16", partial(ddp, hook="fp16"), every_step=True),
    "ddp-powersgd": Contestant("the same, gradients by PowerSGD", partial(ddp, hook="powersgd"), every_step=True),
    "bare": Contestant("one bare all-reduce a period: what averaging costs at least", bare),
    "bare-6": Contestant("the same behind six steps: what an overlap costs at least", partial(bare, hidden=6)),
    "averager": Contestant("torch's PostLocalSGDOptimizer, PeriodicModelAverager", averager),
    "accelerate": Contestant("accelerate's LocalSGD", accelerate, package="accelerate"),
    "torchft": Contestant("torchft's LocalSGD", torchft, package="torchft"),
    "torchft-diloco-6": Contestant(
        "torchft's DiLoCo behind six steps, to the mean", partial(torchft, hidden=6), package="torchft"
    ),
    "prsgd": Contestant("ours, blocking", _with()),
    "prsgd-overlap-1": Contestant("ours, overlap=1", _with(overlap=1)),
    "prsgd-overlap-6": Contestant("ours, overlap=6", _with(overlap=6)),
    "prsgd-auto": Contestant('ours, overlap="auto"', _with(overlap="auto"), settles=True),
    "prsgd-period-auto": Contestant("ours, schedule=auto()", _with(schedule=prsgd.auto, optimizer_state="average")),
    "prsgd-diloco": Contestant(
        "ours, outer Nesterov steps", _with(averaging=lambda: prsgd.outer(lr=0.7, momentum=0.9, nesterov=True))
    ),
    "prsgd-bf16": Contestant("ours, bfloat16 on the wire", _with(averaging=lambda: prsgd.mean(wire=prsgd.half()))),
    "prsgd-4bit": Contestant("ours, 4 bits on the wire", _with(averaging=lambda: prsgd.mean(wire=prsgd.quantized(4)))),
    "prsgd-auto-4bit": Contestant(
        'ours, overlap="auto", 4 bits on the wire',
        _with(overlap="auto", averaging=lambda: prsgd.mean(wire=prsgd.quantized(4))),
        settles=True,
    ),
}
"""By the names that the command line takes."""


def is_ours(name: str) -> bool:
    return name.split("-")[0] == "prsgd"
