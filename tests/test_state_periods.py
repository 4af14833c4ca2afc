"""Optimizer state that is averaged more rarely than the models (DES-LOC): by hand, against its limits, over gloo."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import prsgd
from prsgd.averaging.base import SUMS_WIDTH
from tests.problems import Point, batch, model
from tests.ranks import run_ranks

DES_LOC = {"exp_avg": 3, "exp_avg_sq": 6}


def moments(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> Tensor:
    """(2, P): a worker's first and second moments."""
    states = [optimizer.state[p] for p in module.parameters()]
    return torch.stack([torch.cat([s[key].flatten() for s in states]) for key in ("exp_avg", "exp_avg_sq")])


def walked(
    rank: int | None, lengths: tuple[int, int] = (13, 13), looks: int = 0, **options: Any
) -> tuple[list[Tensor], list[int]]:
    """(the hosted workers' models and moments after each step, bytes by average); worker i takes ``lengths[i]`` steps,
    and looks after some from step ``looks`` on."""
    net = model()
    hosted: Any = prsgd.Fleet(net, 2, mode="loop") if rank is None else net
    modules = list(hosted.modules) if rank is None else [net]
    workers = [0, 1] if rank is None else [rank]
    optimizer = torch.optim.AdamW(hosted.parameters(), lr=0.02)
    path = []
    with prsgd.LocalSGD(hosted, optimizer, **{"schedule": prsgd.every(2), "timeout_seconds": 30, **options}) as local:
        for step in range(max(lengths[worker] for worker in workers)):
            if rank is None:
                for worker in workers:
                    if step == lengths[worker]:
                        hosted.stop(worker)
            optimizer.zero_grad()
            for worker, module in zip(workers, modules):
                if step < lengths[worker]:
                    x, y = batch(worker, step)
                    cross_entropy(module(x), y).backward()
            optimizer.step()
            if 0 < looks <= step and step % 4 == 2:
                with local.consensus():
                    pass
            flat = [torch.cat([p.detach().flatten() for p in module.parameters()]) for module in modules]
            states = [moments(optimizer, module) for module in modules]
            path.append(torch.stack([torch.cat([x[None], m]) for x, m in zip(flat, states)]))
    path.append(torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in modules]))
    return path, [record.bytes_sent for record in local.records]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("overlap", [0, 1])
def test_its_limits(overlap: int) -> None:
    """In every average it is "average", in none "keep", to the last bit."""
    always, averaged = (
        walked(None, overlap=overlap, optimizer_state=state) for state in ({"exp_avg_sq": 1, "exp_avg": 1}, "average")
    )
    assert same(always[0], averaged[0])
    assert always[1] == averaged[1]
    never, kept = (
        walked(None, overlap=overlap, optimizer_state=state) for state in ({"exp_avg": 10**9, "exp_avg_sq": 99}, "keep")
    )
    assert same(never[0], kept[0])
    assert never[1] == kept[1]
    assert not same(always[0], never[0])


def test_each_is_averaged_in_its_turn() -> None:
    """Averages land at 2, 4, ...: first moments are alike after the third and sixth, second ones after the sixth."""
    path, _ = walked(None, optimizer_state=DES_LOC)
    alike = [[bool(torch.equal(*after[:, row])) for row in range(3)] for after in path[:-1]]
    assert [step + 1 for step, (x, _, _) in enumerate(alike) if x] == [2, 4, 6, 8, 10, 12]
    assert [step + 1 for step, (_, first, _) in enumerate(alike) if first] == [6, 12]
    assert [step + 1 for step, (_, _, second) in enumerate(alike) if second] == [12]


@pytest.mark.parametrize("overlap", [0, 1])
def test_by_hand(overlap: int) -> None:
    """SGD with momentum 1/2, lr 1/4, towards 0 and 8; models are averaged every two steps, momentum every four."""
    fleet = prsgd.Fleet(Point(0.0), 2, mode="loop")
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.25, momentum=0.5)
    found = []
    options: Any = {"schedule": prsgd.every(2), "overlap": overlap, "optimizer_state": {"momentum_buffer": 2}}
    with prsgd.LocalSGD(fleet, optimizer, **options):
        for _ in range(9):
            optimizer.zero_grad()
            for module, target in zip(fleet.modules, (0.0, 8.0)):
                module(target).backward()
            optimizer.step()
            found.append(fleet.rows[:, 0].tolist())
    x, u, snap = [0.0, 0.0], [0.0, 0.0], ([0.0, 0.0], [0.0, 0.0])
    for step in range(1, 10):
        gradients = [x[0] - 0.0, x[1] - 8.0]
        if overlap and step % 2 == 0:
            x = [sum(snap[0]) / 2] * 2
            u = [sum(snap[1]) / 2] * 2 if step % 4 == 0 else u
        u = [u[i] / 2 + gradients[i] for i in range(2)]
        x = [x[i] - u[i] / 4 for i in range(2)]
        snap = x, u
        if not overlap and step % 2 == 0:
            x = [sum(x) / 2] * 2
            u = [sum(u) / 2] * 2 if step % 4 == 0 else u
        assert found[step - 1] == pytest.approx(x, abs=1e-14), step


def test_what_travels_when() -> None:
    """Of two workers each sends what there is: models, in the third average first moments too, in the sixth both."""
    size, header = 6 * 5 + 5 + 5 * 3 + 3, SUMS_WIDTH
    _, sent = walked(None, optimizer_state=DES_LOC)
    assert sent[:6] == [8 * (rows * size + header) for rows in (1, 1, 2, 1, 1, 3)]
    _, sent = walked(None, optimizer_state={"exp_avg_sq": 2})  # the first moments are each worker's own
    assert sent[:4] == [8 * (rows * size + header) for rows in (1, 2, 1, 2)]


RUNS: list[dict[str, Any]] = [
    {"optimizer_state": DES_LOC},
    {"optimizer_state": DES_LOC, "overlap": 1, "looks": 1},
    {"optimizer_state": {"exp_avg": 2, "exp_avg_sq": 3}, "averaging": prsgd.outer(), "overlap": 1},
    {"optimizer_state": {"exp_avg": 2, "exp_avg_sq": 3}, "fragments": 2, "schedule": prsgd.every(4)},
    {"optimizer_state": {"exp_avg": 2, "exp_avg_sq": 3}, "averaging": prsgd.half(), "overlap": 1},
]


def a_rank(rank: int) -> list[Any]:
    return [walked(rank, **options) for options in RUNS]


def test_a_simulation_is_what_processes_do() -> None:
    for options, one, other in zip(RUNS, *run_ranks(a_rank, 2), strict=True):
        path, sent = walked(None, **options)
        assert one[1] == other[1] == sent, options
        assert same([torch.cat(both) for both in zip(one[0], other[0])], path), options


def uneven(rank: int) -> list[Any]:
    return [walked(rank, (4, 13), **options) for options in RUNS if "looks" not in options]


def test_a_worker_that_is_done_answers_what_is_due() -> None:
    for one, other in zip(*run_ranks(uneven, 2), strict=True):
        assert torch.equal(one[0][-1], other[0][-1])


def looking(rank: int) -> Tensor:
    """Worker 0 is done early, and answers the other's looks, which are no averages."""
    path, _ = walked(rank, (4, 13), looks=5 * rank, optimizer_state=DES_LOC)
    return path[-1]


def test_looks_are_not_counted() -> None:
    looked = run_ranks(looking, 2)
    one, _ = run_ranks(uneven, 2)
    assert torch.equal(looked[0], looked[1])
    assert torch.equal(looked[0], one[0][0][-1])


def test_fragments_that_differ_in_what_is_kept_of_them() -> None:
    """Two optimizers: of one fragment there is no momentum, and of the other no second moment."""
    fleet = prsgd.Fleet(model(), 2, mode="loop")
    halves = [[p for m in fleet.modules for n, p in m.named_parameters() if n.startswith(name)] for name in "02"]
    optimizers = [torch.optim.SGD(halves[0], lr=0.1, momentum=0.9), torch.optim.AdamW(halves[1], lr=0.02)]
    state = {"momentum_buffer": 2, "exp_avg_sq": 2}
    options: Any = {"schedule": prsgd.every(2), "fragments": ["0.*", "2.*"], "optimizer_state": state}
    with prsgd.LocalSGD(fleet, optimizers, **options) as local:
        for step in range(4):
            for worker, module in enumerate(fleet.modules):
                x, y = batch(worker, step)
                cross_entropy(module(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    expected = [8 * (rows * size + SUMS_WIDTH) for rows, size in ((1, 35), (1, 18), (2, 35), (2, 18))]
    assert [record.bytes_sent for record in local.records[:4]] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer_state": {}}, 'optimizer_state={} averages nothing: use optimizer_state="keep"'),
        ({"optimizer_state": {"exp_avg": 0}}, "optimizer_state['exp_avg'] must be a whole number >= 1, got 0"),
        ({"optimizer_state": {"momentum": 2}}, "names 'momentum', and the optimizer keeps exp_avg, exp_avg_sq"),
        ({"optimizer_state": DES_LOC, "overlap": 2}, "overlap must be 0 or 1 with optimizer_state={'exp_avg': 3,"),
        ({"optimizer_state": DES_LOC, "schedule": prsgd.auto()}, "goes by momentum that is each worker's own or"),
        ({"optimizer_state": DES_LOC, "averaging": prsgd.sparse(0.1)}, "sparse() cannot carry the optimizer's state"),
        ({"optimizer_state": DES_LOC, "averaging": prsgd.gossip()}, "gossip() cannot average the optimizer state"),
        ({"optimizer_state": "sometimes"}, "optimizer_state must be one of"),
    ],
)  # fmt: skip
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        walked(None, **options)


def test_a_state_of_other_periods_is_refused() -> None:
    def made(state: Any) -> prsgd.LocalSGD:
        fleet = prsgd.Fleet(model(), 2)
        optimizer = torch.optim.AdamW(fleet.parameters(), lr=0.02)
        return prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), optimizer_state=state)

    one = made(DES_LOC).start()
    with pytest.raises(prsgd.CheckpointError, match=re.escape("with optimizer state {'exp_avg': 3, 'exp_avg_sq': 6},")):
        made("average").load_state_dict(one.state_dict())


def test_a_worker_that_rests_brings_no_empty_state() -> None:
    """Worker 1 is not finite at step 3, so its fragments are replaced one after the other, and it rests meanwhile
    without optimizer state: what others have must not be averaged with nothing."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).double()
    fleet = prsgd.Fleet(net, 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.01, momentum=0.5)
    local = prsgd.LocalSGD(
        fleet, optimizer, schedule=prsgd.every(2), overlap=1, fragments=2, optimizer_state={"momentum_buffer": 1}
    )
    buffers = []
    with warnings.catch_warnings(record=True) as told, local:
        warnings.simplefilter("always")
        for step in range(1, 9):
            for worker, module in enumerate(fleet.modules):
                for p in module.parameters():
                    p.grad = torch.full_like(p, 1.0 if p.dim() == 2 else worker)  # biases tell the workers apart
                if step == 3 and worker == 1:
                    for p in module.parameters():
                        p.data.fill_(float("nan"))
            optimizer.step()
            buffers.append(float(optimizer.state[fleet.modules[0][1].weight]["momentum_buffer"][0, 0]))
    assert {str(warning.message).split(":")[0] for warning in told} == {"worker 1"}
    alone = [2 - 0.5**step for step in range(7)]  # all gradients of this weight are 1
    with_the_mended_one = 1 + 0.5 * (alone[-1] + 1.5) / 2  # which has taken two steps by then
    assert buffers == pytest.approx([*alone, with_the_mended_one], rel=1e-12)
