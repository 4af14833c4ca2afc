"""What the ranks of ``test_accelerate.py`` do: accelerate's example of local SGD, with its own class and with ours."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD as TheirLocalSGD
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import prsgd
from prsgd.integrations.accelerate import LocalSGD


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(112, 12, generator=chance)
    return TensorDataset(x, x[:, :3].argmax(1))


def network(norm: bool) -> nn.Sequential:
    between = [nn.BatchNorm1d(16)] if norm else []
    return nn.Sequential(nn.Linear(12, 16), *between, nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def train(rank: int, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """``kind``: "theirs", "ours", or "hand": prsgd.LocalSGD around a model that nobody has wrapped."""
    AcceleratorState._reset_state()  # of the training before
    set_seed(rank + 1)
    accumulate = settings.get("accumulate", 1)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        mixed_precision=settings.get("precision", "no"),
        dynamo_backend=settings.get("dynamo"),
    )
    model: Any = network(settings.get("norm", False))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader: Any = DataLoader(data(), batch_size=8)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    inner = model
    if kind == "hand":
        model = accelerator.prepare_model(model, evaluation_mode=True)
        optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
        for tensor in inner.state_dict().values():
            dist.broadcast(tensor, 0)  # as DDP does when a model is prepared
    else:
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    rounds: list[int] = []
    for _ in range(3):
        model.train()
        with ExitStack() as block:
            if kind == "theirs":
                local_sgd: Any = TheirLocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4)
                block.enter_context(local_sgd)
            elif kind == "ours":
                overlap = settings.get("overlap", 0)
                local_sgd = LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4, overlap=overlap)
                block.enter_context(local_sgd)
            else:
                local = prsgd.LocalSGD(inner, optimizer, schedule=prsgd.every(4), overlap=settings.get("overlap", 0))
                block.enter_context(local)
            for x, y in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                    if kind != "hand":
                        local_sgd.step()
        if kind != "theirs":
            rounds += [record.step for record in (local if kind == "hand" else local_sgd.local).records]
    state = {name: value.clone() for name, value in inner.state_dict().items()}
    return {"model": state, "rounds": rounds}


def compared(rank: int, kinds: list[str], settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [train(rank, kind, settings) for kind in kinds]


def said(rank: int, kind: str) -> str:
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    model: Any = network(False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    steps: Any = 4
    try:
        if kind == "fsdp, prepared":
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if kind == "compiled DDP":
            model = torch.compile(nn.parallel.DistributedDataParallel(model))
        if kind == "unprepared":
            accelerator.free_memory()
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
        if kind == "fsdp":
            model = nn.Sequential(FullyShardedDataParallel(model.module, device_id=torch.device("cpu")))
        steps = {"steps": 0, "schedule": "often"}.get(kind, 4)
        where: Any = model if kind == "swapped" else accelerator
        what: Any = {"swapped": accelerator, "optimizer": optimizer}.get(kind, model)
        with LocalSGD(where, what, steps, enabled=kind != "disabled") as local_sgd:
            return f"enabled {local_sgd.enabled}, local {type(local_sgd.local).__name__}"
    except (ValueError, prsgd.PrsgdError) as error:
        return f"{type(error).__name__}: {error}"


def looked(rank: int) -> tuple[bool, bool]:
    """Inside the block a look shows the mean, and a worker that raises leaves nothing hooked."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    inner = network(False)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    with LocalSGD(accelerator, model, 4) as local_sgd:
        with torch.no_grad():
            inner[0].weight.fill_(float(rank))
        model(torch.ones(2, 12)).sum().backward()
        optimizer.step()
        own = inner[0].weight.detach().clone()
        with local_sgd.consensus() as average:
            mean = average[0].weight.detach().clone()
        gathered = accelerator.gather(own[None]).mean(0)
        return bool(torch.equal(mean, gathered)), bool(torch.equal(inner[0].weight, own))  # type: ignore[arg-type]


def resumed(rank: int) -> bool:
    """Gone on from the states of all workers, in mid-round: to the last bit, statistics of BatchNorm among it?"""
    batches = data()[torch.arange(rank, 112, 2)]
    kept: dict[str, Any] = {}

    def trained(steps: range) -> dict[str, torch.Tensor]:
        AcceleratorState._reset_state()
        set_seed(rank + 1)
        accelerator = Accelerator(cpu=True)
        inner = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        local_sgd = LocalSGD(accelerator, model, 4)
        assert local_sgd.local is not None
        if steps.start:
            inner.load_state_dict(kept["model"])
            local_sgd.local.load_state_dict(kept["local"])
        with local_sgd:
            for step in steps:
                if step == 6:
                    kept["model"] = {name: value.clone() for name, value in inner.state_dict().items()}
                    kept["local"] = local_sgd.local.state_dict()
                x, y = (whole[7 * step : 7 * step + 7] for whole in batches)
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            model.eval()(batches[0])  # alone, as where the main process evaluates: nothing is sent
        return {name: value.clone() for name, value in inner.state_dict().items()}

    expected, got = trained(range(8)), trained(range(6, 8))
    return all(torch.equal(value, got[name]) for name, value in expected.items())
