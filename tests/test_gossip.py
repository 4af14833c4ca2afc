"""Gossip: D-PSGD as printed, graphs, the mean that stays, what only neighbours hear."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd.averaging.base import SUMS_WIDTH
from tests.problems import batch, model, train_fleet, walk
from tests.ranks import run_ranks, try_ranks

GRAPHS = ["ring", "torus", "exponential", "complete"]


def test_four_workers_in_a_ring_by_hand() -> None:
    """lr 1/2 from 0 towards 0, 6, 12, -6, blocking."""
    path, local = walk([0.0, 6.0, 12.0, -6.0], schedule=prsgd.every(1), steps=2, averaging=prsgd.gossip("ring"))
    # (0, 3, 6, -3): each the mean of itself and two neighbours: (0, 3, 2, 1).
    # (0, 9/2, 7, -5/2): (2/3, 23/6, 3, 3/2).
    assert path[0] == pytest.approx([0.0, 3.0, 2.0, 1.0], abs=1e-15)
    assert path[1] == pytest.approx([2 / 3, 23 / 6, 3.0, 1.5], abs=1e-15)
    assert path[2] == pytest.approx([2.25] * 4, abs=1e-15)  # the exact mean ends the run
    assert len(set(path[2])) == 1
    assert [r.drift for r in local.records[:2]] == pytest.approx([11.25, 13.8125])  # in one process the mean is known
    # To two neighbours each: a number of 8 bytes, and two that say what is about to happen. Then all meet: of the model
    # and the header each sends three quarters twice.
    assert [(r.bytes_sent, r.hops, r.workers) for r in local.records] == [
        *[(2 * 4 * 8, 1, 4)] * 2,
        (2 * 3 * 8 + 2 * 3 * (1 + SUMS_WIDTH) * 8 // 4, 0, 4),
    ]


@pytest.mark.parametrize("graph", GRAPHS)
def test_every_1_with_overlap_1_is_d_psgd_to_the_last_bit(graph: str) -> None:
    """Algorithm 1 of Lian et al.: x_i <- sum_j W_ij x_j - lr G_i(x_i), all with what was before."""
    n, lr = 6, 0.2
    weights = prsgd.gossip(graph).matrix(n)
    fleet = prsgd.Fleet(model(), n)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=lr)
    x = [fleet.rows[0].clone() for _ in range(n)]
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), overlap=1, averaging=prsgd.gossip(graph)):
        for t in range(20):
            pairs = [batch(i, t) for i in range(n)]
            gradients = [gradient(x[i], *pairs[i]) for i in range(n)]
            x = [mixed(weights[i], x).add(gradients[i], alpha=-lr) for i in range(n)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [a for a, _ in pairs], [b for _, b in pairs])
            optimizer.step()
            assert torch.equal(fleet.rows, torch.stack(x)), t


def mixed(weights: Any, x: list[Tensor]) -> Tensor:
    total = torch.zeros_like(x[0])
    for weight, row in zip(weights.tolist(), x):
        if weight:
            total = total.add(row, alpha=weight)
    return total


def gradient(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    net = model()
    nn.utils.vector_to_parameters(weights, net.parameters())
    loss = nn.functional.cross_entropy(net(x), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(net.parameters()))])


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_mean_stays_where_it_is(graph: str, overlap: int) -> None:
    """Workers that do not step themselves come together at the mean they began with."""
    fleet = prsgd.Fleet(nn.Linear(7, 3).double(), 6)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.0)
    with prsgd.LocalSGD(
        fleet, optimizer, schedule=prsgd.every(3), overlap=overlap, averaging=prsgd.gossip(graph)
    ) as local:
        fleet.rows.copy_(torch.randn(fleet.rows.shape, generator=torch.Generator().manual_seed(0)))
        mean, apart = fleet.rows.mean(dim=0), float(fleet.rows.var(dim=0).sum())
        gap = prsgd.gossip(graph).spectral_gap(6)
        for average in range(1, 6):
            for _ in range(3):
                optimizer.zero_grad()
                fleet.backward(lambda output, _: output.sum(), torch.ones(6, 2, 7).double(), torch.ones(6, 2))
                optimizer.step()
            torch.testing.assert_close(fleet.rows.mean(dim=0), mean, rtol=0, atol=1e-14)
            mixed_times = average - (overlap == 3)  # the first was launched before they were set apart
            bound = apart * (1 - gap) ** (2 * mixed_times)
            assert float(fleet.rows.var(dim=0).sum()) <= bound + 1e-12
        assert local.round == 5


def test_graphs() -> None:
    for graph in GRAPHS:
        for n in (4, 6, 8, 9, 12):
            weights = prsgd.gossip(graph).matrix(n)
            assert np.abs(weights.sum(axis=0) - 1).max() < 1e-15 * n
            assert np.abs(weights.sum(axis=1) - 1).max() < 1e-15 * n
    n = 8
    assert prsgd.gossip("ring").spectral_gap(n) == pytest.approx(1 - (1 + 2 * np.cos(2 * np.pi / n)) / 3)
    assert prsgd.gossip("complete").spectral_gap(n) == pytest.approx(1.0)
    # 3 x 3: eigenvalues (1 + 2 cos a + 2 cos b) / 5, the second largest in magnitude with a = 2 pi / 3, b = 0.
    assert prsgd.gossip("torus").spectral_gap(9) == pytest.approx(1 - 2 / 5)
    # Each hears three others: 1 / 4 each. The eigenvalues are (1 + w + w^2 + w^4) / 4, w an 8th root of 1.
    roots = np.exp(2j * np.pi * np.arange(1, 8) / 8)
    assert prsgd.gossip("exponential").spectral_gap(8) == pytest.approx(
        1 - np.abs((1 + roots + roots**2 + roots**4) / 4).max()
    )
    assert prsgd.gossip("exponential").matrix(8)[0].nonzero()[0].tolist() == [0, 4, 6, 7]


def test_complete_is_the_mean() -> None:
    how: dict[str, Any] = {"schedule": prsgd.every(2), "kind": "mlp"}
    rows, _, _ = train_fleet([6] * 4, averaging=prsgd.gossip("complete"), **how)
    means, _, _ = train_fleet([6] * 4, averaging=prsgd.mean(), **how)
    torch.testing.assert_close(rows, means, rtol=0, atol=1e-13)


def test_a_matrix() -> None:
    third = [[0.5, 0.5, 0.0], [0.25, 0.25, 0.5], [0.25, 0.25, 0.5]]
    for given in (third, np.array(third), torch.tensor(third), tuple(map(tuple, third))):
        assert prsgd.gossip(given).matrix(3).tolist() == third  # type: ignore[arg-type]
    thirds = prsgd.gossip(torch.full((3, 3), 1 / 3)).matrix(3)  # type: ignore[arg-type]
    assert np.abs(thirds - 1 / 3).max() < 1e-15  # float32's rounding is taken out
    assert prsgd.gossip(third) == prsgd.gossip(np.array(third))  # type: ignore[arg-type]
    path, local = walk([0.0, 4.0, 8.0], schedule=prsgd.every(1), steps=1, averaging=prsgd.gossip(third))  # type: ignore[arg-type]
    assert path[0] == [1.0, 2.5, 2.5]  # of (0, 2, 4): what worker 0 takes is half of itself, half of worker 1
    assert local.records[0].bytes_sent == round(5 / 3 * 4 * 8)  # five messages by three workers


def test_bad_input() -> None:
    bad: list[tuple[Any, str]] = [
        ("rin", "did you mean 'ring'"),
        ([[1.0, 0.0]], "square matrix"),
        ("", "graph must be one of"),
        (3, "square matrix"),
        ([["a"]], "square matrix"),
        ([], "square matrix"),
        ([[0.5, 0.5], [0.6, 0.4]], r"doubly stochastic matrix: column 0 adds up to 1.1, not to 1"),
        ([[0.5, 0.4], [0.5, 0.5]], r"doubly stochastic matrix: row 0 adds up to 0.9"),
        ([[1.5, -0.5], [-0.5, 1.5]], "not negative"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "finite"),
        (np.eye(3), "connected: nothing leads from worker 0 to worker 1"),
        ([[0.0, 1.0], [1.0, 0.0]], "spectral gap is 0"),
    ]
    for graph, message in bad:
        with pytest.raises(ValueError, match=message):
            prsgd.gossip(graph)
    with pytest.raises(ValueError, match=r'gossip\("torus"\) needs a number of workers that is a product'):
        prsgd.gossip("torus").matrix(7)
    fleet = prsgd.Fleet(model(), 1)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r'gossip\("ring"\) needs at least 2 workers, got 1'):
        prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=prsgd.gossip("ring"))
    with pytest.raises(ValueError, match="matrix for 2 workers, and there are 1"):
        prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=prsgd.gossip(((0.5, 0.5), (0.5, 0.5))))


class Counting(prsgd.TorchDistributed):
    """How often all workers meet, and what leaves this process for its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.meetings, self.sent = 0, 0

    def all_reduce(self, flat: Tensor) -> Any:
        self.meetings += 1
        return super().all_reduce(flat)

    def exchange(self, send: Any, receive: Any) -> Any:
        work = super().exchange(send, receive)
        self.sent += work.bytes_sent
        return work


def rank_counted(rank: int) -> Any:
    comm = Counting()
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(
        net, optimizer, schedule=prsgd.every(1), overlap=1, averaging=prsgd.gossip("ring"), comm=comm
    ) as local:
        before = comm.meetings
        for step in range(10):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
        during, sent = comm.meetings - before, comm.sent
        assert local.records == []  # they come when all meet
    return during, sent, [r.bytes_sent for r in local.records], [r.drift for r in local.records]


def test_only_neighbours_speak_until_the_end() -> None:
    for during, sent, told, drifts in run_ranks(rank_counted, 4):
        assert during == 0
        assert sent == sum(told[:11])  # what the records say is what left the process
        assert told[:11] == [2 * (53 + 3) * 8] * 11  # the last one left after step 10, and landed when the run ended
        assert len(told) == 12  # the exact mean
        assert drifts[:11] == [None] * 11  # from the mean, which nobody knows


def rank_uneven(rank: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), averaging=prsgd.gossip("ring"), timeout_seconds=60):
        for step in range(4 if rank == 2 else 8):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()


def test_workers_with_fewer_averages_are_an_error_on_all() -> None:
    outcomes = try_ranks(rank_uneven, 4)
    assert all(kind == "error" for kind, _ in outcomes), outcomes
    assert "this one has run out of data before while worker" in outcomes[2][1]
    assert any("worker 2 has run out of data while this one averages" in text for _, text in outcomes), outcomes
    with pytest.raises(prsgd.MismatchError, match="a worker of this process has run out of data before the others"):
        train_fleet([4, 8], schedule=prsgd.every(2), averaging=prsgd.gossip("ring"))


def test_a_worker_without_finite_neighbours_is_reached_later() -> None:
    """Workers 1, 2, 3 of a ring of 6 lose their models: 2 hears of none that is left before the second average."""
    fleet = prsgd.Fleet(model(), 6)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    finite = []
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=prsgd.gossip("ring"))

    def train() -> None:
        with local:
            for step in range(4):
                pairs = [batch(i, step) for i in range(6)]
                optimizer.zero_grad()
                fleet.backward(nn.functional.cross_entropy, [a for a, _ in pairs], [b for _, b in pairs])
                if step == 1:
                    fleet.rows[1:4] = float("nan")
                optimizer.step()
                finite.append([bool(row.isfinite().all()) for row in fleet.rows])

    with pytest.warns(RuntimeWarning, match="was not finite"):
        train()
    assert finite == [[True] * 6, [True, True, False, True, True, True], [True] * 6, [True] * 6]
    assert [r.bad_workers for r in local.records] == [0, 3, 1, 0, 0]
    assert bool(fleet.rows.isfinite().all())


def test_all_models_lost_is_an_error() -> None:
    fleet = prsgd.Fleet(model(), 4)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)

    def train() -> None:
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=prsgd.gossip("ring")):
            for step in range(20):
                pairs = [batch(i, step) for i in range(4)]
                optimizer.zero_grad()
                fleet.backward(nn.functional.cross_entropy, [a for a, _ in pairs], [b for _, b in pairs])
                if step == 1:
                    fleet.rows[:] = float("nan")
                optimizer.step()

    with pytest.warns(RuntimeWarning), pytest.raises(prsgd.DivergedError, match="no finite model has come"):
        train()


def test_on_a_modelled_cluster_workers_wait_for_their_neighbours_alone() -> None:
    """A ring of 8 of which worker 7 takes 10 seconds for a step, the others 1: in the first round only 0 and 6 wait."""
    from prsgd.cluster.clock import ClusterClock
    from prsgd.cluster.model import Cluster

    cluster = Cluster("slow", speeds=(10.0,) * 7 + (1.0,), step_seconds=10.0, bytes_per_second=1e15)
    fleet = prsgd.Fleet(model(), 8)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(
        fleet, optimizer, schedule=prsgd.every(1), averaging=prsgd.gossip("ring"), clock=ClusterClock(cluster)
    ) as local:
        for step in range(2):
            pairs = [batch(i, step) for i in range(8)]
            optimizer.zero_grad()
            fleet.backward(nn.functional.cross_entropy, [a for a, _ in pairs], [b for _, b in pairs])
            optimizer.step()
    first, second = (record.modelled for record in local.records[:2])
    assert first is not None
    assert second is not None
    assert first.waiting == pytest.approx((9, 0, 0, 0, 0, 0, 9, 0), abs=1e-6)
    # By then 0 and 6 are at 11 seconds, 7 at 20, the others at 2: 1 and 5 wait for their late neighbours.
    assert second.waiting == pytest.approx((9, 9, 0, 0, 0, 9, 9, 0), abs=1e-6)
