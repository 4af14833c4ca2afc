"""Limits that must be equal, and the one loop in one process, in several, and in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from tests.problems import CHANGING, batch, model, train_fleet, train_model
from tests.ranks import run_ranks

cross_entropy = nn.functional.cross_entropy


def flat_grad(weights: Tensor, worker: int, step: int) -> Tensor:
    """The gradient of worker's loss at ``weights``, without any of this library."""
    net = model()
    nn.utils.vector_to_parameters(weights, net.parameters())
    x, y = batch(worker, step)
    loss = cross_entropy(net(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


def start() -> Tensor:
    return torch.cat([p.detach().flatten() for p in model().parameters()])


def run_plain(n: int, steps: int, schedule: prsgd.Schedule, overlap: int = 0) -> list[Tensor]:
    """All workers' models after each step of plain SGD with lr 0.2."""
    fleet = prsgd.Fleet(model(), n)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2)
    path = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=schedule, overlap=overlap):
        for t in range(steps):
            pairs = [batch(w, t) for w in range(n)]
            optimizer.zero_grad()
            fleet.backward(cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
            path.append(fleet.rows.clone())
    return path


@pytest.mark.parametrize("period", [1, 4, 7])
def test_overlap_1_is_algorithm_1_to_the_last_bit(period: int) -> None:
    n, gamma = 4, 0.2
    path = run_plain(n, 50, prsgd.every(period), overlap=1)
    x = [start() for _ in range(n)]  # Algorithm 1, line 1
    for t in range(1, 51):
        g = [flat_grad(x[i], i, t - 1) for i in range(n)]  # line 3
        if t % period == 0:  # line 4
            y = torch.stack(x).sum(dim=0) / n  # line 5
            x = [y.add(g[i], alpha=-gamma) for i in range(n)]  # line 6
        else:
            x = [x[i].add(g[i], alpha=-gamma) for i in range(n)]  # line 8
        assert torch.equal(path[t - 1], torch.stack(x)), t


def test_every_1_blocking_is_mean_gradient_sgd() -> None:
    path = run_plain(4, 30, prsgd.every(1))
    x = start()
    for t in range(30):
        x = x - 0.2 * torch.stack([flat_grad(x, i, t) for i in range(4)]).mean(dim=0)
        torch.testing.assert_close(path[t], x.expand(4, -1), rtol=1e-13, atol=1e-15)


def test_algorithm_2_as_printed() -> None:
    n = 2
    fleet_path = run_plain(n, 40, prsgd.growing(lr_scale=0.05))
    x, t, s = [start()] * n, 0, 0
    while t < 40:
        s += 1
        length = -(-(s ** (1 / 3)) // n) if s not in (8, 64) else s ** (1 / 3) // n  # exact cubes
        x = [torch.stack(x).mean(dim=0)] * n  # line 4
        for _ in range(round(length)):
            x = [x[i] - 0.05 * n / s ** (2 / 3) * flat_grad(x[i], i, t) for i in range(n)]  # line 6
            t += 1
            if t == 40:
                break
        torch.testing.assert_close(
            fleet_path[t - 1], torch.stack([torch.stack(x).mean(dim=0)] * n), rtol=1e-12, atol=1e-14
        )


def test_one_worker_is_torch_sgd() -> None:
    for schedule in (prsgd.every(3), prsgd.once(), prsgd.per_worker([2]), prsgd.auto()):
        for overlap in (0, 1) if not isinstance(schedule, prsgd.once) else (0,):
            averaged, _, _ = train_model(0, 20, schedule=schedule, overlap=overlap)
            net = model()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
            for t in range(20):
                x, y = batch(0, t)
                optimizer.zero_grad()
                cross_entropy(net(x), y).backward()
                optimizer.step()
            assert torch.equal(averaged, torch.cat([p.detach().flatten() for p in net.parameters()]))


def test_identical_data_has_no_drift() -> None:
    fleet = prsgd.Fleet(model(), 4)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9)
    x, y = batch(0, 0)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(5))

    def train() -> None:
        with local:
            for _ in range(20):
                optimizer.zero_grad()
                fleet.backward(cross_entropy, [x] * 4, [y] * 4)
                optimizer.step()

    with pytest.warns(RuntimeWarning, match="rounds 1 and 2: all workers' models were alike"):
        train()
    assert [r.drift for r in local.records] == [0.0] * 4


CASES: dict[str, dict[str, Any]] = {
    "every 4": {"schedule": prsgd.every(4)},
    "every 4, overlap 1": {"schedule": prsgd.every(4), "overlap": 1},
    "every 4, overlap 3": {"schedule": prsgd.every(4), "overlap": 3},
    "every 3, overlap 3": {"schedule": prsgd.every(3), "overlap": 3},
    **{name: {"schedule": schedule} for name, schedule in CHANGING.items()},
    **{f"{name}, overlap 2": {"schedule": schedule, "overlap": 2} for name, schedule in CHANGING.items()},
    "momentum averaged": {"schedule": prsgd.every(4), "optimizer_state": "average"},
    "momentum reset, by steps": {
        "schedule": prsgd.every(4),
        "optimizer_state": "reset",
        "averaging": prsgd.mean("steps"),
    },
    "batchnorm": {"schedule": prsgd.every(4), "kind": "batchnorm"},
    "batchnorm, overlap 2": {"schedule": prsgd.every(4), "overlap": 2, "kind": "batchnorm"},
    "dropout": {"schedule": prsgd.every(4), "kind": "dropout"},
    "once": {"schedule": prsgd.once()},
}


def numbers(local: prsgd.LocalSGD) -> list[tuple[Any, ...]]:
    """What a record says of all workers."""
    unknown = -1.0
    return [
        (
            r.round,
            r.workers,
            r.bytes_sent,
            r.drift,
            *(unknown if x is None else x for x in (r.loss, r.noise)),
            r.samples,
        )
        for r in local.records
    ]


def rank_fleet(rank: int, num_steps: list[int], cases: list[dict[str, Any]]) -> list[tuple[Tensor, Any, Any]]:
    """Each case in this process of a job: its hosted workers' rows, buffers and numbers."""
    found = []
    for case in cases:
        rows, local, fleet = train_fleet(num_steps, **case)
        buffers = [{k: v.clone() for k, v in m.named_buffers()} for m in fleet.modules]
        found.append((rows, buffers, numbers(local)))
    return found


def cases_for(n: int) -> dict[str, dict[str, Any]]:
    periods = [6, 3, 2, 2][:n]
    return {
        **CASES,
        "per worker": {"schedule": prsgd.per_worker(periods)},
        "per worker, overlap 2": {"schedule": prsgd.per_worker(periods), "overlap": 2},
    }


@pytest.mark.parametrize("num_steps", [[13, 13], [5, 13]])
def test_two_processes_equal_the_simulation_to_the_last_bit(num_steps: list[int]) -> None:
    cases = cases_for(2)
    by_rank = run_ranks(rank_fleet, 2, num_steps, list(cases.values()))
    for place, (name, case) in enumerate(cases.items()):
        rows, local, fleet = train_fleet(num_steps, **case)
        for worker in range(2):
            got, buffers, said = by_rank[worker][place]
            assert torch.equal(got[0], rows[worker]), name
            assert torch.equal(rows[worker], rows[0]), name
            for key, value in fleet.modules[worker].named_buffers():
                assert torch.equal(buffers[0][key], value), (name, key)
            assert said == numbers(local), name


@pytest.mark.parametrize("processes", [4, 2])
def test_four_workers_in_processes_equal_the_simulation_to_rounding(processes: int) -> None:
    num_steps = [13, 13, 7, 13]
    cases = cases_for(4)
    by_rank = run_ranks(rank_fleet, processes, num_steps, list(cases.values()))
    for place, (name, case) in enumerate(cases.items()):
        rows, local, fleet = train_fleet(num_steps, **case)
        got = torch.cat([found[place][0] for found in by_rank])
        torch.testing.assert_close(got, rows, rtol=1e-12, atol=1e-14, msg=name)
        assert torch.equal(got, got[0].expand_as(got)), name
        for (key, value), mine in zip(
            fleet.modules[0].named_buffers(), by_rank[-1][place][1][-1].values(), strict=True
        ):
            torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-14, msg=f"{name} {key}")
        for found in by_rank:
            for mine, theirs in zip(found[place][2], numbers(local), strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-15), name


def rank_model(rank: int, num_steps: list[int], cases: list[dict[str, Any]]) -> list[tuple[Tensor, Any]]:
    found = []
    for case in cases:
        weights, local, _ = train_model(rank, num_steps[rank], **case)
        found.append((weights, numbers(local)))
    return found


def test_plain_models_under_gloo_equal_the_fleet() -> None:
    cases = {name: case for name, case in cases_for(2).items() if case.get("kind") != "dropout"}
    num_steps = [13, 9]
    by_rank = run_ranks(rank_model, 2, num_steps, list(cases.values()))
    for place, (name, case) in enumerate(cases.items()):
        rows, local, _ = train_fleet(num_steps, **case)
        for worker in range(2):
            weights, said = by_rank[worker][place]
            assert torch.equal(weights, rows[worker]), name
            for mine, theirs in zip(said, numbers(local), strict=True):
                assert mine == pytest.approx(theirs, rel=1e-12), name  # drift: tensor by tensor, or the row at once


def rank_shape(rank: int, shape: str, overlap: int) -> tuple[Tensor, list[tuple[int, int]]]:
    comm = prsgd.TorchDistributed(shape=shape)
    weights, local, _ = train_model(rank, 11, schedule=prsgd.every(3), overlap=overlap, comm=comm)
    return weights, [(r.bytes_sent, r.server_bytes_sent) for r in local.records]


@pytest.mark.parametrize("overlap", [0, 2])
def test_the_parameter_server_gives_the_same_model(overlap: int) -> None:
    rings = run_ranks(rank_shape, 2, "all-reduce", overlap)
    stars = run_ranks(rank_shape, 2, "parameter-server", overlap)
    for (ring, ring_bytes), (star, star_bytes) in zip(rings, stars):
        assert torch.equal(ring, star)
        row_bytes = star_bytes[0][0]
        assert set(star_bytes) == {(row_bytes, row_bytes)}
        assert set(ring_bytes) == {(row_bytes, 0)}  # two workers in a ring send a row each
    three = [run_ranks(rank_shape, 3, shape, overlap) for shape in ("all-reduce", "parameter-server")]
    for (ring, _), (star, star_bytes) in zip(*three):
        torch.testing.assert_close(ring, star, rtol=1e-13, atol=1e-15)
        assert torch.equal(star, three[1][0][0])
        assert star_bytes[0][1] == 2 * star_bytes[0][0]
