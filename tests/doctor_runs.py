"""What the ranks of ``test_doctor.py`` do: set up a run, rightly or not, and let it be looked at."""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import prsgd


class Noisy(Dataset[Tensor]):
    """Augmented by torch's and by Python's random numbers."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) + torch.rand(4) + random.random()


class Stream(IterableDataset[Tensor]):
    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(self.first + i)) for i in range(20))


def network(norm: str = "") -> nn.Sequential:
    norms: dict[str, list[nn.Module]] = {"": [], "batch": [nn.BatchNorm1d(8)], "sync": [nn.SyncBatchNorm(8)]}
    return nn.Sequential(nn.Linear(4, 8), *norms[norm], nn.Linear(8, 1))


def looked_at(local: prsgd.LocalSGD, loader: Any = None) -> tuple[list[tuple[str, str]], str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = prsgd.doctor(local, loader)
    return [(one.level, one.about) for one in found], said.getvalue()


def loader_of(rank: int, kind: str) -> Any:
    generator = torch.Generator().manual_seed(rank)
    if kind == "sampler":
        return DataLoader(Noisy(), batch_size=4, sampler=DistributedSampler(Noisy(), 2, rank))
    if kind == "generator":
        return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=generator)
    if kind == "stream":
        return DataLoader(Stream(100 * rank), batch_size=4)
    if kind == "list":
        return [{"x": torch.ones(4, 4) * (rank + i)} for i in range(3)]
    assert kind == "single"
    return DataLoader(Noisy(), batch_size=None, shuffle=True)


def untouched(rank: int, kind: str) -> tuple[bool, str]:
    """Is a run that was looked at the same, to the last bit? And what was said of it?"""
    results, said = [], ""
    for looks in (False, True):
        torch.manual_seed(10 + rank)
        random.seed(10 + rank)
        model, loader = network("batch"), loader_of(rank, kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(3), overlap=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if looks:
                _, said = looked_at(local, loader)
        seen = []
        with local:
            for batch in (*loader, *loader):
                x = (batch["x"] if kind == "list" else batch).view(-1, 4)
                seen.append(x)
                if len(x) > 1 or kind != "single":
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    optimizer.step()
        results.append([*seen, *model.state_dict().values(), torch.rand(3), torch.tensor(random.random())])
    return len(results[0]) == len(results[1]) and all(map(torch.equal, *results)), said


def wrong(rank: int, kind: str) -> tuple[list[tuple[str, str]], str]:
    torch.manual_seed(0)
    model = network({"sync": "sync"}.get(kind, ""))
    loader: Any = None
    if kind.startswith("ddp"):
        wrapped = DistributedDataParallel(model)
        if kind == "ddp, dropped":
            del wrapped
    elif kind == "same":
        loader = DataLoader(list(range(40)), batch_size=4, shuffle=True)  # type: ignore[arg-type]  # a list will do
    elif kind == "scheduler":
        loader = [torch.tensor([rank, i]) for i in range(3 + 2 * rank)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert scheduler.get_last_lr() == [0.1]
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4))
    with wrapped.no_sync() if kind == "ddp, quiet" else contextlib.nullcontext():
        return looked_at(local, loader)


def sharded(rank: int) -> tuple[list[tuple[str, str]], str]:
    """One worker of two processes, with BatchNorm in the model."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = network("batch")
    for layer in model:
        fully_shard(layer, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = prsgd.TorchDistributed(mesh["dp_replicate"].get_group())
    return looked_at(prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4), comm=comm))


def of_other_versions(rank: int) -> tuple[list[tuple[str, str]], str, str]:
    """Doctor tells, and ``start()`` refuses."""
    own = prsgd.__version__
    prsgd.__version__ = f"{own}.{rank}"
    try:
        model = network()
        local = prsgd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=prsgd.every(4))
        found, said = looked_at(local)
        try:
            local.start()
        except prsgd.MismatchError as error:
            return found, said, str(error)
        raise AssertionError("it was started")
    finally:
        prsgd.__version__ = own


def refused(rank: int, kind: str) -> str:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4))
    loader: Any = {"iterator": iter([torch.ones(1)]), "empty": [], "path": "train.csv", "number": 8}[kind]
    try:
        looked_at(local, loader if rank == 0 else [torch.ones(1)])
    except (ValueError, prsgd.PrsgdError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
