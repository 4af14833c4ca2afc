"""Workers that are several processes: by FSDP2 each has a shard of the model, by DDP each has all of it. Two workers of
two processes against two whole models in a fleet, whose batches they share."""

from __future__ import annotations

import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import prsgd
from tests.problems import batch
from tests.ranks import run_ranks, try_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*")
STEPS = 7


def uneven(kind: str = "mlp") -> nn.Module:
    """Of its dimensions 5 and 3 are halved into unequal shards, and of 1 the second one is empty."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers: list[nn.Module] = [
            nn.Linear(6, 5),
            nn.Tanh(),
            nn.Linear(5, 3),
            nn.Tanh(),
            nn.Linear(3, 1),
            nn.Flatten(),
        ]
        if kind == "batchnorm":
            layers.insert(1, nn.BatchNorm1d(5))
        return nn.Sequential(*layers).double()


def optimizer_of(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(params, lr=0.02)
    return torch.optim.SGD(params, lr=0.2, momentum=0.9 if name == "momentum" else 0.0)


def squared(output: Tensor, y: Tensor) -> Tensor:
    return (output.view(-1) - y).square().mean()


def mesh_of(shards: int = 2) -> DeviceMesh:
    return init_device_mesh(
        "cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("dp_replicate", "dp_shard")
    )


def sharded(mesh: DeviceMesh, kind: str = "mlp") -> nn.Module:
    net = uneven(kind)
    for module in (net[2], net):
        fully_shard(module, mesh=mesh["dp_shard"])
    return net


def shared(mesh: DeviceMesh, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(uneven(), process_group=mesh["dp_shard"].get_group())
    return sharded(mesh)


def flat(net: nn.Module) -> Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def half(worker: int, place: int, step: int) -> tuple[Tensor, Tensor]:
    """A process's part of its worker's batch."""
    x, y = batch(worker, step)
    return x[2 * place : 2 * place + 2], y[2 * place : 2 * place + 2]


def told(local: prsgd.LocalSGD) -> list[list[float]]:
    """Of each record, what is one number of all workers."""
    return [[r.step, r.period, r.drift or 0.0, r.loss or 0.0, r.samples, r.noise or 0.0] for r in local.records]


def several(rank: int, wrapper: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two workers, each of them two processes."""
    mesh = mesh_of()
    worker, place = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    net = shared(mesh, wrapper)
    optimizer = optimizer_of(name, net.parameters())
    comm = prsgd.TorchDistributed(mesh["dp_replicate"].get_group())
    with prsgd.LocalSGD(net, optimizer, comm=comm, timeout_seconds=60, **options) as local:
        for t in range(STEPS):
            x, y = half(worker, place, t)
            optimizer.zero_grad()
            loss = squared(net(x), y)
            loss.backward()
            local.log(loss=loss, samples=len(x))
            optimizer.step()
            if t == 3:
                with torch.no_grad():
                    net(x)  # after this FSDP keeps whole parameters
                with local.consensus() as averaged, torch.no_grad():
                    seen = averaged(batch(9, 9)[0]).flatten()
    found = {"model": flat(net), "seen": seen, "told": told(local)}
    dist.barrier()
    return found


def whole(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same with whole models."""
    fleet = prsgd.Fleet(uneven(), 2)
    optimizer = optimizer_of(name, fleet.parameters())
    with prsgd.LocalSGD(fleet, optimizer, **options) as local:
        for t in range(STEPS):
            pairs = [batch(w, t) for w in range(2)]
            optimizer.zero_grad()
            losses = fleet.backward(squared, [x for x, _ in pairs], [y for _, y in pairs])
            local.log(loss=losses, samples=[4, 4])
            optimizer.step()
            if t == 3:
                with local.consensus() as averaged, torch.no_grad():
                    seen = averaged(batch(9, 9)[0]).flatten()
    return {"model": fleet.rows[0].clone(), "seen": seen, "told": told(local)}


def halves(brought: prsgd.Brought) -> float:
    """A weight that goes by a loss."""
    return 1 / (1 + (brought.loss or 0.0))


def all_of(rank: int, wrapper: str, cases: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [several(rank, wrapper, name, options) for name, options in cases]


CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"schedule": prsgd.every(3)}),
    ("adamw", {"schedule": prsgd.every(3)}),
    ("sgd", {"schedule": prsgd.every(3), "overlap": 1}),
    ("adamw", {"schedule": prsgd.every(3), "overlap": 1}),
    ("adamw", {"schedule": prsgd.every(2), "overlap": 1, "optimizer_state": "average"}),
    ("adamw", {"schedule": prsgd.every(3), "optimizer_state": "reset", "overlap": 2}),
    ("momentum", {"schedule": prsgd.growing(lr_scale=0.05), "optimizer_state": "average"}),
    ("momentum", {"schedule": prsgd.auto(tolerance=40.0)}),
    ("adamw", {"schedule": prsgd.auto(tolerance=40.0)}),
    ("adamw", {"schedule": prsgd.every(3), "averaging": prsgd.outer()}),
    ("adamw", {"schedule": prsgd.every(2), "averaging": prsgd.outer(), "overlap": 1}),
    ("sgd", {"schedule": prsgd.every(2), "averaging": prsgd.outer(1.0, 0.7, False, True)}),
    ("sgd", {"schedule": prsgd.every(2), "averaging": prsgd.mean(clip=0.05)}),
    ("sgd", {"schedule": prsgd.every(2), "averaging": prsgd.mean("samples")}),
    ("sgd", {"schedule": prsgd.every(2), "averaging": prsgd.mean(halves)}),
    ("sgd", {"schedule": prsgd.every(2), "averaging": prsgd.mean(prsgd.steady(penalty=1.0))}),
    ("sgd", {"schedule": prsgd.every(2), "averaging": prsgd.easgd()}),
    ("adamw", {"schedule": prsgd.every(4), "fragments": 2}),
    ("adamw", {"schedule": prsgd.every(3), "fragments": 3, "averaging": prsgd.outer(), "overlap": 1}),
    ("momentum", {"schedule": prsgd.every(2), "fragments": 2, "optimizer_state": "average"}),
]


@pytest.mark.parametrize("wrapper", ["fsdp2", "ddp"])
def test_two_by_two_processes_are_two_whole_workers(wrapper: str) -> None:
    by_rank = run_ranks(all_of, 4, wrapper, CASES, timeout_seconds=240)
    for (name, options), found in zip(CASES, zip(*by_rank)):
        wanted = whole(name, options)
        for one in found:
            torch.testing.assert_close(one, wanted, rtol=1e-9, atol=1e-11, msg=f"{name} {options}")
        assert all(one["told"] == found[0]["told"] for one in found)  # to the last bit: decisions are made by them


WIRES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"schedule": prsgd.every(2), "averaging": wire})
    for wire in (prsgd.half(), prsgd.quantized(4), prsgd.quantized("sign"), prsgd.sparse(0.3, bits=2))
]


def test_wires_carry_shards() -> None:
    """What is rounded off differs, since buckets are cut from shards; the model does not fall apart."""
    by_rank = run_ranks(all_of, 4, "fsdp2", WIRES, timeout_seconds=240)
    exact = whole("sgd", {"schedule": prsgd.every(2)})
    for case, found in zip(WIRES, zip(*by_rank)):
        assert all(torch.equal(one["model"], found[0]["model"]) for one in found), case
        assert float((found[0]["model"] - exact["model"]).norm()) < 0.5 * float(exact["model"].norm()), case


def timed(rank: int) -> tuple[list[Any], Tensor]:
    """By clocks of which each process has another: the processes of a worker close their rounds together."""
    mesh = mesh_of()
    worker, place = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    net, seconds = sharded(mesh), [0.0]
    optimizer = optimizer_of("sgd", net.parameters())
    comm = prsgd.TorchDistributed(mesh["dp_replicate"].get_group())
    taken = []
    with prsgd.LocalSGD(
        net, optimizer, schedule=prsgd.timed(1.0), comm=comm, clock=lambda _: seconds[0], timeout_seconds=60
    ) as local:
        for t in range(12):
            x, y = half(worker, place, t)
            optimizer.zero_grad()
            squared(net(x), y).backward()
            seconds[0] += (0.3 if worker else 0.4) / (1 + place)
            optimizer.step()
            taken.append(local.round)
    model = flat(net)
    dist.barrier()
    return taken, model


def test_rounds_by_the_clock_end_together() -> None:
    found = run_ranks(timed, 4)
    assert found[0][0] == found[1][0] == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]
    assert found[2][0] == found[3][0] == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert all(torch.equal(model, found[0][1]) for _, model in found)


def broken(rank: int, place: int) -> tuple[Tensor, list[int]]:
    """One shard of worker 1 turns NaN: all of worker 1 is replaced."""
    mesh = mesh_of()
    worker, mine = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    net = sharded(mesh)
    optimizer = optimizer_of("adamw", net.parameters())
    comm = prsgd.TorchDistributed(mesh["dp_replicate"].get_group())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(3), comm=comm, timeout_seconds=60) as local:
            for t in range(6):
                x, y = half(worker, mine, t)
                optimizer.zero_grad()
                squared(net(x), y).backward()
                if t == 2 and (worker, mine) == (1, place):
                    next(p for p in net.parameters()).to_local().data.fill_(float("nan"))  # type: ignore[attr-defined]
                optimizer.step()
    model = flat(net)
    dist.barrier()
    return model, [r.bad_workers for r in local.records]


@pytest.mark.parametrize("place", [0, 1])
def test_a_worker_is_bad_if_one_of_its_shards_is(place: int) -> None:
    for model, bad in run_ranks(broken, 4, place):
        assert bool(model.isfinite().all())
        assert bad == [1, 0]


def statistics(rank: int) -> dict[str, Tensor]:
    mesh = mesh_of()
    worker, place = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
    net = sharded(mesh, "batchnorm")
    optimizer = optimizer_of("sgd", net.parameters())
    comm = prsgd.TorchDistributed(mesh["dp_replicate"].get_group())
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), comm=comm, timeout_seconds=60):
        for t in range(4):
            x, y = half(worker, place, t)
            optimizer.zero_grad()
            squared(net(x), y).backward()
            if t == 3:
                own = {name: b.clone() for name, b in net.named_buffers()}
            optimizer.step()
    pooled = {f"pooled {name}": b.clone() for name, b in net.named_buffers()}
    dist.barrier()
    return own | pooled


def test_statistics_are_pooled_over_all_processes() -> None:
    found = run_ranks(statistics, 4)
    means = torch.stack([one["1.running_mean"] for one in found])
    variances = torch.stack([one["1.running_var"] for one in found])
    mean = means.mean(dim=0)
    for one in found:
        torch.testing.assert_close(one["pooled 1.running_mean"], mean, rtol=1e-12, atol=1e-14)
        variance = (variances + (means - mean).square()).mean(dim=0)
        torch.testing.assert_close(one["pooled 1.running_var"], variance, rtol=1e-12, atol=1e-14)
        assert int(one["pooled 1.num_batches_tracked"]) == 4


def dies(rank: int) -> None:
    mesh = mesh_of()
    net = sharded(mesh)
    optimizer = optimizer_of("sgd", net.parameters())
    comm = prsgd.TorchDistributed(mesh["dp_replicate"].get_group())
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), comm=comm, timeout_seconds=100):
        for t in range(6):
            x, y = half(rank // 2, rank % 2, t)
            optimizer.zero_grad()
            squared(net(x), y).backward()
            if t == 3 and rank == 3:
                os._exit(7)
            optimizer.step()


def test_all_end_when_one_process_dies() -> None:
    began = time.monotonic()
    outcomes = try_ranks(dies, 4, timeout_seconds=60)
    assert outcomes[3] == ("died", 7)
    assert [kind for kind, _ in outcomes[:3]] == ["error"] * 3, outcomes
    assert time.monotonic() - began < 60


def refused(rank: int) -> dict[str, str]:
    mesh = mesh_of()
    net = sharded(mesh)
    column = mesh["dp_replicate"].get_group()

    class own(prsgd.Averaging):
        def launch(self, memory: Any, comm: Any, snap: Tensor, header: prsgd.Header) -> prsgd.Work[prsgd.Landing]:
            raise NotImplementedError

    def said(model: nn.Module = net, optimizer: Any = None, **options: Any) -> str:
        given = {"schedule": prsgd.every(2), "comm": prsgd.TorchDistributed(column), **options}
        try:
            prsgd.LocalSGD(model, optimizer or optimizer_of("sgd", model.parameters()), **given)
        except ValueError as error:
            return str(error)
        return "accepted"

    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    crossed = prsgd.TorchDistributed(pairs[rank in (1, 2)])
    found = {
        "mean": said(),
        "gossip": said(averaging=prsgd.gossip()),
        "own": said(averaging=own()),
        "all": said(comm=None),
    }
    optimizer = optimizer_of("sgd", (before := uneven()).parameters())
    fully_shard(before, mesh=mesh["dp_shard"])
    found["before"] = said(before, optimizer)
    fully_shard((crosswise := uneven())[2], mesh=mesh["dp_replicate"])
    fully_shard(crosswise, mesh=mesh["dp_shard"])
    found["crosswise"] = said(crosswise)
    optimizer = optimizer_of("sgd", net.parameters())
    try:
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), comm=crossed, timeout_seconds=30).start()
    except prsgd.MismatchError as error:
        found["crossed"] = str(error)
    dist.barrier()
    return found


def test_what_cannot_be_is_told_in_a_line() -> None:
    for rank, said in enumerate(run_ranks(refused, 4)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert said["mean"] == "accepted"
        assert said["gossip"] == (
            "with gossip(graph='ring') a worker must be one process, since which steps it skipped is seen in its own "
            "gradients, and this one is 2: use mean(), outer() or easgd()"
        )
        assert said["own"].startswith(
            "own() looks at whole models, and each process has a shard of one: use mean(), outer() or easgd() (an "
        )
        assert said["all"].startswith(
            f"comm must be over one process of each worker, its ranks [0, 1, 2, 3] are more, since {pair} are one"
        )
        assert "model.parameters() (fleet.parameters()), after fully_shard(model) if it is called, or" in said["before"]
        assert said["crosswise"] == (
            "parameters must be sharded over one mesh, '0.weight' and '2.weight' are over two: use fully_shard(model, "
            "mesh=mesh['dp_shard']) of a mesh with the dimensions ('dp_replicate', 'dp_shard') for both"
        )
        one, other = (1, 0) if rank in (0, 3) else (0, 1)
        assert said["crossed"] == (
            f"the workers' models must be alike: worker 1 has process {one} of 2 of each worker, "
            f"worker 0 has process {other} of 2 of each worker"
        )


# Checkpoints


SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "outer": ("adamw", {"schedule": prsgd.every(3), "averaging": prsgd.outer()}),
    "auto": ("momentum", {"schedule": prsgd.auto(tolerance=40.0)}),
    "in flight": ("adamw", {"schedule": prsgd.every(2), "overlap": 2}),
    "fragments": ("adamw", {"schedule": prsgd.every(4), "averaging": prsgd.outer(), "fragments": 2}),
}


def saved_and_resumed(
    rank: int, folder: str, case: str, shards: int, resume: bool, width: int = 5
) -> tuple[Tensor, list[list[float]], list[str]]:
    """Steps 1 to 5, a checkpoint, and steps 6 to 9; or those alone, from it. Without shards models are whole."""
    name, options = SAVED[case]
    mesh, worker, place, options = None, rank, 0, dict(options)
    net = uneven()
    if width != 5:
        net[0], net[2] = nn.Linear(6, width).double(), nn.Linear(width, 3).double()
    if shards:
        mesh = mesh_of(shards)
        worker, place = mesh.get_local_rank("dp_replicate"), mesh.get_local_rank("dp_shard")
        fully_shard(net, mesh=mesh["dp_shard"])
        options["comm"] = prsgd.TorchDistributed(mesh["dp_replicate"].get_group())
    optimizer = optimizer_of(name, net.parameters())
    local = prsgd.LocalSGD(net, optimizer, timeout_seconds=60, **options)
    said: list[str] = []
    if resume:
        try:
            prsgd.load(local, net, optimizer, folder)
        except prsgd.CheckpointError as error:
            dist.barrier()
            return torch.zeros(0), [], [str(error)]
    with local:
        for t in range(local.step, 9):
            x, y = batch(worker, t)
            part = slice(place * 4 // max(1, shards), (place + 1) * 4 // max(1, shards))
            optimizer.zero_grad()
            loss = squared(net(x[part]), y[part])
            loss.backward()
            local.log(loss=loss, samples=len(x[part]))
            optimizer.step()
            if t == 4 and not resume:
                prsgd.save(local, net, optimizer, folder)
                with local.consensus() as averaged:
                    plain = load_file(Path(folder) / "model.safetensors")
                    assert torch.equal(
                        torch.cat([plain[n].flatten() for n, _ in net.named_parameters()]), flat(averaged)
                    )
    found = flat(net), told(local), said
    dist.barrier()
    return found


@pytest.mark.parametrize("case", SAVED)
def test_a_run_goes_on_from_its_checkpoint(case: str, tmp_path: Path) -> None:
    unbroken = run_ranks(saved_and_resumed, 4, str(tmp_path), case, 2, False)
    again = run_ranks(saved_and_resumed, 4, str(tmp_path), case, 2, True)
    for (model, records, _), (resumed, later, _) in zip(unbroken, again):
        assert torch.equal(model, resumed)
        assert records[-len(later) :] == later
    for shards in (0, 1):
        for resumed, later, said in run_ranks(saved_and_resumed, 2, str(tmp_path), case, shards, True):
            if case == "in flight":
                assert said == [
                    f"the state in {tmp_path} was saved while an average was under way, from which only as many "
                    "processes can go on: save where local.launched == local.round"
                ]
            else:
                torch.testing.assert_close(resumed, unbroken[0][0], rtol=1e-9, atol=1e-11)
                torch.testing.assert_close(later, unbroken[0][1][-len(later) :], rtol=1e-9, atol=1e-11)


def test_checkpoints_that_do_not_fit(tmp_path: Path) -> None:
    run_ranks(saved_and_resumed, 4, str(tmp_path), "outer", 2, False)
    for _, _, said in run_ranks(saved_and_resumed, 4, str(tmp_path), "outer", 2, True, 7):
        assert said == [
            f"the states in {tmp_path} are of another model: parameter '0.weight' is [5, 6] float64, in this run it is "
            "[7, 6] float64"
        ]
    for _, _, [line] in run_ranks(saved_and_resumed, 4, str(tmp_path), "auto", 2, True):
        assert line.startswith(f"the states in {tmp_path} are of another") or "the state is of a run with" in line
    for _, _, [line] in run_ranks(saved_and_resumed, 2, str(tmp_path), "outer", 2, True):
        assert line == (
            f"the states in {tmp_path} are of 2 workers that were several processes, and as many must go on: this run "
            "has 1"
        )
    (tmp_path / "worker-1" / "round-00000001" / "manifest-1.json").unlink()
    for _, _, [line] in run_ranks(saved_and_resumed, 4, str(tmp_path), "outer", 2, True):
        assert line == f"{tmp_path} holds no whole state of all 2 workers"


def test_checkpoints_of_whole_models(tmp_path: Path) -> None:
    unbroken = run_ranks(saved_and_resumed, 2, str(tmp_path), "outer", 0, False)
    for (model, records, _), (resumed, later, _) in zip(
        unbroken, run_ranks(saved_and_resumed, 2, str(tmp_path), "outer", 0, True)
    ):
        assert torch.equal(model, resumed)
        assert records[-len(later) :] == later
    for _, _, [line] in run_ranks(saved_and_resumed, 4, str(tmp_path), "outer", 2, True):
        assert line == (
            f"the states in {tmp_path} are of workers that were one process with a whole model each, and these are "
            "not: load its model.safetensors into the model before it is sharded or wrapped, and begin anew in another "
            "folder, or go on with whole models"
        )
