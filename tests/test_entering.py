"""What LocalSGD is given: models in wrappers, optimizers in proxies, and numbers that must be exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer, lr_scheduler

import prsgd
from tests.problems import batch, model
from tests.ranks import run_ranks


def refusal(net: nn.Module, comm: prsgd.Communicator | None = None) -> str:
    """What LocalSGD says to it."""
    try:
        prsgd.LocalSGD(net, SGD(net.parameters(), lr=0.1), schedule=prsgd.every(4), comm=comm)
    except ValueError as error:
        return str(error)
    return "accepted"


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = 2 * self.inner(x)
        return out


def rank_ddp(rank: int) -> dict[str, str]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair, column = pairs[rank // 2], columns[rank % 2]
    everybody = DistributedDataParallel(model())
    return {
        "everybody": refusal(everybody),
        "nested": refusal(Doubled(everybody)),
        "some workers": refusal(DistributedDataParallel(model(), process_group=pair)),
        "without": refusal(everybody.module),
        # Two workers of two processes each: rank 0 and 1 are one, and 2 and 3 the other.
        "inside a worker": refusal(
            DistributedDataParallel(model(), process_group=pair), prsgd.TorchDistributed(column)
        ),
        "alone": refusal(DistributedDataParallel(model()), prsgd.InProcess()),
    }


def test_ddp_over_the_workers() -> None:
    for rank, said in enumerate(run_ranks(rank_ddp, 4)):
        told = (
            "in DistributedDataParallel, which sends every step's gradients to other workers "
            f"(ranks {[r for r in range(4) if r != rank]}): pass the module without it, model"
        )
        assert said["everybody"] == f"model must not be {told}.module"
        assert said["nested"] == f"model must not have its 'inner' {told}.inner.module"
        assert f"(ranks [{rank ^ 1}])" in said["some workers"]
        assert [said[key] for key in ("without", "inside a worker", "alone")] == ["accepted"] * 3


def rank_two_by_two(rank: int) -> tuple[Tensor, int]:
    """Two workers, each of them two processes that share its gradients."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    comm = prsgd.TorchDistributed(columns[rank % 2])
    net = DistributedDataParallel(model(), process_group=pairs[rank // 2])
    optimizer = SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(3), comm=comm) as local:
        for t in range(6):
            x, y = batch(rank // 2, t)
            half = slice(2 * (rank % 2), 2 * (rank % 2) + 2)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[half]), y[half]).backward()
            optimizer.step()
    dist.barrier()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), local.round


def test_ddp_inside_a_worker_is_one_worker() -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3)):
        for t in range(6):
            pairs = [batch(w, t) for w in range(2)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
    for row, round in run_ranks(rank_two_by_two, 4):
        torch.testing.assert_close(row, fleet.rows[0], rtol=1e-10, atol=1e-12)
        assert round == 2


def rank_sharded(rank: int) -> dict[str, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    two = model()
    fully_shard(two, mesh=init_device_mesh("cpu", (2,)))
    fsdp1 = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    said = {"fsdp2": refusal(two), "alone": refusal(two, prsgd.InProcess()), "fsdp1": refusal(fsdp1)}
    said["fsdp1 inside"] = refusal(Doubled(fsdp1))
    try:
        prsgd.Fleet(two, 2)
    except ValueError as error:
        said["fleet"] = str(error)
    said["mixed"] = refusal(nn.Sequential(two, nn.Linear(3, 3).double()))
    two.requires_grad_(False)  # as under an adapter that trains alone, and is in no fully_shard
    said["frozen"] = refusal(nn.Sequential(two, nn.Linear(3, 3).double()))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    three = model()
    fully_shard(three, mesh=both)
    said["two dimensions"] = refusal(three)
    torch.distributed.barrier()  # rank 0 has the store by which the other one makes its groups
    return said


@pytest.mark.filterwarnings("ignore")
def test_sharded_models() -> None:
    fsdp1 = (
        "in FullyShardedDataParallel, whose flat parameters cannot be averaged: use FSDP2, fully_shard(model, "
        "mesh=mesh['dp_shard']) of a mesh with the dimensions ('dp_replicate', 'dp_shard')"
    )
    for said in run_ranks(rank_sharded, 2):
        assert said["fsdp2"] == (
            "comm must be over one process of each worker, its ranks [0, 1] are more, since [0, 1] are one worker "
            "together: use comm=prsgd.TorchDistributed(mesh['dp_replicate'].get_group()), or comm=prsgd.InProcess() "
            "for one worker alone"
        )
        assert said["alone"] == "accepted"
        assert said["fleet"] == (
            "parameter '0.weight' is a shard (DTensor), and a Fleet's models are whole: give LocalSGD the sharded "
            "model itself, in each of its processes"
        )
        assert said["mixed"] == (
            "parameters that train must all be sharded or all be whole: '0.0.weight' is a shard (DTensor), '1.weight' "
            "is not: call fully_shard on the whole model too, or freeze it with requires_grad_(False)"
        )
        assert said["frozen"] == (
            "model must have a parameter that trains and is sharded, in Sequential only frozen ones are: call "
            "fully_shard on the whole model too"
        )
        assert said["two dimensions"].startswith(
            "a worker's model must be sharded over one dimension of a mesh, parameter '0.weight' lies as (Replicate(), "
            "Shard(dim=0)) on 2 (dp_replicate, dp_shard): use fully_shard(model, mesh=mesh['dp_shard']) of a mesh"
        )
        assert said["fsdp1"] == f"model is {fsdp1}"
        assert said["fsdp1 inside"] == f"model has its 'inner' {fsdp1}"


class Accelerated(Optimizer):
    """accelerate's AcceleratedOptimizer, as far as it matters: torch's own constructor never ran."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.accumulates = False

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> Any:
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: Any) -> None:
        self.optimizer.defaults = defaults

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        if not self.accumulates:
            self.optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.accumulates:
            self.optimizer.step(closure)


class Wrapped:
    """apex's and others': no optimizer of torch's at all."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()


PROXIES: dict[str, Callable[[Any], Any]] = {
    "accelerate": Accelerated,
    "other": Wrapped,
    "twice": lambda optimizer: Wrapped(Accelerated(optimizer)),
}


@pytest.mark.parametrize("optimizer_state", ["keep", "average"])
@pytest.mark.parametrize("proxy", PROXIES)
def test_optimizers_in_proxies(proxy: str, optimizer_state: str) -> None:
    rows = []
    for wrap in (PROXIES[proxy], lambda optimizer: optimizer):
        fleet = prsgd.Fleet(model(), 2)
        optimizer = wrap(SGD(fleet.parameters(), lr=0.1, momentum=0.9))
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3), optimizer_state=optimizer_state) as local:
            for t in range(7):
                pairs = [batch(w, t) for w in range(2)]
                optimizer.zero_grad()
                fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
                optimizer.step()
        assert (local.step, local.round) == (7, 3)
        rows.append(fleet.rows.clone())
    assert torch.equal(rows[0], rows[1])


def test_steps_that_a_proxy_holds_back_do_not_count() -> None:
    net = model()
    optimizer = Accelerated(SGD(net.parameters(), lr=0.1))
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)) as local:
        for t in range(8):
            optimizer.accumulates = t % 2 == 0
            x, y = batch(0, t)
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (local.step, local.round) == (4, 2)


class Own(Optimizer):
    """Steps another one, and has hooks of its own: its whole step is the step."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"]):
                p.mul_(0.5)


def test_an_optimizer_with_hooks_of_its_own_is_taken_as_it_is() -> None:
    fleet = prsgd.Fleet(nn.Linear(1, 1, bias=False), 2)
    optimizer = Own(SGD(fleet.parameters(), lr=1.0))
    with torch.no_grad():
        fleet.rows.fill_(8.0)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)):
        for module, gradient in zip(fleet.modules, (2.0, 4.0)):
            module.weight.grad = torch.full((1, 1), gradient)
        optimizer.step()
        assert fleet.rows.tolist() == [[2.5], [2.5]]  # the mean of (8 - 2) / 2 and (8 - 4) / 2, after its own halving


def test_what_is_no_optimizer() -> None:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.1)
    scheduler = lr_scheduler.StepLR(optimizer, 2)  # it holds an optimizer too, but does not step it
    with pytest.raises(ValueError, match=r"optimizer must be a torch.optim.Optimizer or a list of them, got .*StepLR"):
        prsgd.LocalSGD(net, scheduler, schedule=prsgd.every(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^optimizer must be .*, Accelerated has no hooks and no \.optimizer with"):
        prsgd.LocalSGD(net, Accelerated(None), schedule=prsgd.every(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_numbers_are_exact_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    net = model(dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        fleet = prsgd.Fleet(net, 257)
        optimizer = SGD(fleet.parameters(), lr=0.1)
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)) as local:
            for module in fleet.modules:
                for p in module.parameters():
                    p.grad = torch.ones_like(p)
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    assert local.records[0].workers == 257


def rank_many(rank: int) -> int:
    torch.set_default_dtype(torch.bfloat16)
    fleet = prsgd.Fleet(model(dtype=torch.float32), 17)
    optimizer = SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)) as local:
        for p in fleet.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    return local.records[0].workers


def test_seventeen_workers_in_two_processes_with_bfloat16_as_default() -> None:
    assert run_ranks(rank_many, 2) == [17, 17]
