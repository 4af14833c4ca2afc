"""``prsgd.save`` and ``prsgd.load`` where one process is enough: what is refused, and in which words."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but not in torch's own export list
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import prsgd

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
}
Run = tuple[nn.Module, torch.optim.Optimizer, prsgd.LocalSGD]


def new(kind: str = "AdamW", model: nn.Module | None = None, **options: Any) -> Run:
    model = nn.Linear(3, 2) if model is None else model
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, prsgd.LocalSGD(model, optimizer, **{"schedule": prsgd.every(2), **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


def saved(folder: Path, run: Run, steps: int = 3, **others: Any) -> None:
    model, optimizer, local = run
    with local:
        for _ in range(steps):
            step(model, optimizer)
        prsgd.save(local, model, optimizer, folder, **others)


@pytest.mark.parametrize(("before", "now"), list(itertools.permutations(OPTIMIZERS, 2)))
@pytest.mark.parametrize("by", ["load", "resumable"])
def test_the_state_of_another_kind_of_optimizer_is_refused_before_anything_changes(
    before: str, now: str, by: str, tmp_path: Path
) -> None:
    saved(tmp_path, new(before))
    model, optimizer, local = new(now)
    was = deepcopy((model.state_dict(), optimizer.state_dict()))
    go_on = {
        "load": lambda: prsgd.load(local, model, optimizer, tmp_path),
        "resumable": prsgd.resumable(tmp_path, local, model=model, optimizer=optimizer).__enter__,
    }
    said = f"^the state is of a run with {before}, this one has {now}: an optimizer goes on from the state of its own"
    with pytest.raises(prsgd.CheckpointError, match=said):
        go_on[by]()
    assert repr((model.state_dict(), optimizer.state_dict())) == repr(was)


def test_a_state_of_the_users_own_keeping_is_refused_too() -> None:
    with new("SGD")[2] as local:
        state = local.state_dict()
    with pytest.raises(prsgd.CheckpointError, match="of a run with SGD, this one has AdamW"):
        new()[2].load_state_dict(state)


# Beside model and optimizer


def scheduled(folder: Path, steps: int, stop: int | None = None) -> tuple[Any, list[float]]:
    """Weights and lr after so many steps, from the state that is found."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, optimizer, local = new()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    if (folder / "model.safetensors").exists():
        prsgd.load(local, model, optimizer, folder, scheduler=scheduler)
    with local:
        for _ in range(local.step, stop or steps):
            step(model, optimizer)
            scheduler.step()
        if stop:
            prsgd.save(local, model, optimizer, folder, scheduler=scheduler)
    return model.weight.detach().clone(), [float(lr) for lr in scheduler.get_last_lr()]


def test_an_lr_schedule_goes_on_where_it_was(tmp_path: Path) -> None:
    unbroken, lr = scheduled(tmp_path, 8)
    scheduled(tmp_path, 8, stop=5)
    resumed, again = scheduled(tmp_path, 8)
    assert torch.equal(resumed, unbroken)
    assert again == lr


def test_what_is_saved_beside_them_must_be_the_same_and_can_be_saved(tmp_path: Path) -> None:
    saved(tmp_path, new(), counts={"batches": 3})
    model, optimizer, local = new()
    with pytest.raises(
        prsgd.CheckpointError, match=r"are of \['counts', 'model', 'optimizer'\], this run has \['model', 'o"
    ):
        prsgd.load(local, model, optimizer, tmp_path)
    counts: dict[str, int] = {}
    prsgd.load(local, model, optimizer, tmp_path, counts=counts)
    assert counts == {"batches": 3}
    with (
        local,
        pytest.raises(ValueError, match=r"loader must have state_dict\(\) and load_state_dict\(\), or"),
    ):
        prsgd.save(local, model, optimizer, tmp_path, loader=7)
    with pytest.raises(ValueError, match="cannot be called 'every', which has another meaning"):
        prsgd.load(local, model, optimizer, tmp_path, every={"batches": 3})


# States of other kinds of workers


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one process: a worker's model is cut into one shard, and is a DTensor all the same."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    finally:
        dist.destroy_process_group()


def tied(mesh: DeviceMesh | None) -> Run:
    """The last layer has the weights of the first."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    return new(model=model, comm=prsgd.InProcess())


def weights(model: nn.Module) -> list[Tensor]:
    whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return [p.detach().clone() for p in whole]


@pytest.mark.parametrize("again", ["sharded", "whole"])
@pytest.mark.parametrize("before", ["sharded", "whole"])
def test_one_shard_is_saved_and_loaded_as_several_are(
    before: str, again: str, mesh: DeviceMesh, tmp_path: Path
) -> None:
    kinds = {"sharded": mesh, "whole": None}
    model, optimizer, local = tied(kinds[before])
    with local:
        for t in range(6):
            step(model, optimizer)
            if t == 2:
                prsgd.save(local, model, optimizer, tmp_path, counts={"batches": t})
                was = weights(model)
    plain = load_file(tmp_path / "model.safetensors")
    assert sorted(plain) == ["0.weight", "2.weight"]
    assert torch.equal(plain["2.weight"], was[0])
    other, optimizer, local = tied(kinds[again])
    counts: dict[str, int] = {}
    if (before, again) == ("whole", "sharded"):
        said = "are of workers that were one process with a whole model each, and these are not: load its model.safet"
        with pytest.raises(prsgd.CheckpointError, match=said):
            prsgd.load(local, other, optimizer, tmp_path, counts=counts)
        return
    prsgd.load(local, other, optimizer, tmp_path, counts=counts)
    with local:
        for _ in range(3):
            step(other, optimizer)
    assert all(map(torch.equal, weights(other), weights(model)))
    assert counts == {"batches": 2}


@pytest.mark.parametrize("before", ["sharded", "whole"])
def test_other_parameter_groups_are_told_in_a_line(before: str, mesh: DeviceMesh, tmp_path: Path) -> None:
    run = tied({"sharded": mesh, "whole": None}[before])
    saved(tmp_path, run)
    model = run[0]
    optimizer = OPTIMIZERS["AdamW"]([{"params": model.parameters()}, {"params": [], "lr": 0.2}])
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), comm=prsgd.InProcess())
    with pytest.raises(prsgd.CheckpointError) as caught:
        prsgd.load(local, model, optimizer, tmp_path)
    assert str(caught.value) == (
        f"the state of 'optimizer' in {tmp_path} does not fit: loaded state dict has a different number of parameter "
        "groups; go on with the same one, or begin anew in another folder"
    )


def test_the_newest_state_counts_whatever_wrote_it(mesh: DeviceMesh, tmp_path: Path) -> None:
    """A run that goes on with whole models does not fall back to its older state of shards, and parts of newer states
    count for nothing."""
    saved(tmp_path, tied(mesh))
    model, optimizer, local = tied(None)
    with pytest.raises(prsgd.CheckpointError, match="are of workers that were several processes each: go on from them"):
        prsgd.resumable(tmp_path, local, model=model, optimizer=optimizer).__enter__()
    model, optimizer, local = tied(None)
    prsgd.load(local, model, optimizer, tmp_path)
    saved(tmp_path, (model, optimizer, local))
    model, optimizer, local = tied(None)
    prsgd.load(local, model, optimizer, tmp_path)
    assert local.step == 6
    for part in ("worker-0/round-00000030/process-0.json", "round-00000040/worker-0.json"):
        (tmp_path / part).parent.mkdir(parents=True)
        (tmp_path / part).touch()
    model, optimizer, local = tied(None)
    prsgd.load(local, model, optimizer, tmp_path)
    assert local.step == 6


def test_fragments_are_of_the_model_within_its_wrapper(mesh: DeviceMesh) -> None:
    """DistributedDataParallel within a worker puts a prefix before all names: patterns and states go by the model's
    own, so that it goes on with whole models, too."""

    def run(*, wraps: bool) -> prsgd.LocalSGD:
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        model[2].weight = model[0].weight
        whole = DistributedDataParallel(model, process_group=mesh.get_group()) if wraps else model
        return new(model=whole, comm=prsgd.InProcess(), fragments=["0.*", "1.*"])[2]

    with run(wraps=True) as local:
        state = local.state_dict()
    run(wraps=False).load_state_dict(state)
    with pytest.raises(ValueError, match=r"'2\.\*' matches '2\.weight', which is tied to '0\.weight'"):
        prsgd.LocalSGD(
            local.model, local.optimizers, schedule=prsgd.every(2), comm=prsgd.InProcess(), fragments=["1.*", "2.*"]
        )


def test_folders_in_a_folder_are_left_alone(tmp_path: Path) -> None:
    """What lies in them may look like what prsgd.save writes there for workers of several processes."""
    saved(tmp_path / "worker-0", new(), steps=5)
    (tmp_path / "worker-1").mkdir()
    (tmp_path / "worker-1" / "notes.txt").touch()
    model, optimizer, local = new()
    with pytest.raises(prsgd.CheckpointError, match="holds no state"):
        prsgd.load(local, model, optimizer, tmp_path)
    saved(tmp_path, new())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model.safetensors", "round-00000001", "worker-0", "worker-1",
    ]  # fmt: skip
    model, optimizer, local = new()
    prsgd.load(local, model, optimizer, tmp_path / "worker-0")
    assert local.step == 5


def test_fleets_and_others(mesh: DeviceMesh, tmp_path: Path) -> None:
    fleet = prsgd.Fleet(nn.Linear(3, 2), 2, mode="loop")
    optimizer = OPTIMIZERS["AdamW"](fleet.parameters())
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
        prsgd.save(local, fleet, optimizer, tmp_path / "fleet")
    model, own, local = new()
    with pytest.raises(prsgd.CheckpointError, match=r"are of Fleets, and this model is none: go on with a Fleet of"):
        prsgd.load(local, model, own, tmp_path / "fleet")
    saved(tmp_path / "shards", tied(mesh))
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2))
    with pytest.raises(prsgd.CheckpointError, match=r"a Fleet cannot go on from them: .* or load model.safetensors"):
        prsgd.load(local, fleet, optimizer, tmp_path / "shards")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (
            prsgd.Fleet(nn.Linear(3, 2), 1),
            nn.Linear(3, 2),
            "it has no 'weight' and 1 more, and this one has no 'mode' and 5 more",
        ),
        (nn.Linear(3, 2), prsgd.Fleet(nn.Linear(3, 2), 1), "it has no 'workers'"),
        (nn.Linear(3, 2), nn.Linear(3, 5), "'weight' is [2, 3], in this run it is [5, 3]"),
        (nn.Linear(3, 2, bias=False), nn.Linear(3, 2), "it has no 'bias'"),
        (nn.Linear(3, 2), nn.Linear(3, 2, bias=False), "this one has no 'bias'"),
    ],
)
def test_the_state_of_another_model_is_told_in_a_line(before: Any, now: Any, said: str, tmp_path: Path) -> None:
    """Of one that is large torch lists hundreds of tensors."""
    saved(tmp_path, new(model=before), steps=0)
    model, optimizer, local = new(model=now)
    with pytest.raises(prsgd.CheckpointError) as caught:
        prsgd.load(local, model, optimizer, tmp_path)
    assert str(caught.value) == (
        f"the state of 'model' in {tmp_path} does not fit: {said}; go on with the same one, or begin anew in another "
        "folder"
    )


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    nothing = r"holds no state that prsgd\.save has written"
    for place, said in ((".", nothing), ("none", nothing), ("file", "states are kept in a folder, and .* is a file")):
        model, optimizer, local = new()
        with pytest.raises(prsgd.CheckpointError, match=said):
            prsgd.load(local, model, optimizer, tmp_path / place)
    assert not (tmp_path / "none").exists()
