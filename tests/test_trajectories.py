"""Trajectories worked by hand: worker 0 pulls x towards 0, worker 1 towards 4, and lr 1/2 halves the distance."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import prsgd
from tests.problems import Point, itself, walk


def test_every_2_blocking() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.every(2), steps=5)
    # 0 -> 0, 0;  0 -> 2, 3;  mean 3/2.  3/2 -> 3/4, 3/8;  3/2 -> 11/4, 27/8;  mean 15/8.  One more step, mean 31/16.
    assert path == [[0, 2], [1.5, 1.5], [0.75, 2.75], [1.875, 1.875], [0.9375, 2.9375], [1.9375, 1.9375]]
    assert [r.step for r in local.records] == [2, 4, 5]
    assert [r.period for r in local.records] == [2, 2, 1]
    # Drift of the snapshots: (0, 3) about 3/2, (3/8, 27/8) about 15/8, (15/16, 47/16) about 31/16.
    assert [r.drift for r in local.records] == [2.25, 2.25, 1.0]


def test_every_2_overlap_1_is_algorithm_1() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.every(2), overlap=1, steps=4)
    # t=1: (0, 2).  t=2: y = 1, gradients at (0, 2) are (0, -2): (1 - 0, 1 + 1).
    # t=3: gradients (1, -2): (1/2, 3).  t=4: y = 7/4, gradients (1/2, -1): (3/2, 9/4).  End: the mean 15/8.
    assert path == [[0, 2], [1, 2], [0.5, 3], [1.5, 2.25], [1.875, 1.875]]
    assert [(r.step, r.overlap) for r in local.records] == [(2, 1), (4, 1), (4, 0)]


def test_every_2_overlap_2_lands_by_the_delta_rule() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.every(2), overlap=2, steps=4)
    # Closed before step 1: snapshot (0, 0), mean 0.  t=1: (0, 2).  t=2 lands 0 - 0, gradients (0, -2): (0, 3).
    # Closed: snapshot (0, 3), mean 3/2.  t=3: gradients (0, -1): (0, 7/2).
    # t=4: gradients at (0, 7/2) are (0, -1/2); x + 3/2 - snap = (3/2, 2); then (3/2, 9/4).
    # Closed again at 4 with (3/2, 9/4): lands when the run ends, nothing new after it: 15/8.
    assert path == [[0, 2], [0, 3], [0, 3.5], [1.5, 2.25], [1.875, 1.875]]
    assert [r.step for r in local.records] == [2, 4, 4]


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_fleet_of_bfloat16_models_is_summed_in_float32(overlap: int) -> None:
    """1 and 1 + 2^-7 are neighbours in bfloat16: their mean is between them, and lands at the even one, 1."""
    fleet = prsgd.Fleet(nn.Linear(1, 1, bias=False).bfloat16(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=1.0)
    goals = torch.tensor([[[1.0]], [[1 + 2.0**-7]]], dtype=torch.bfloat16)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), overlap=overlap) as local:
        for _ in range(4):
            optimizer.zero_grad()
            fleet.backward(lambda w, goal: (w - goal).square().sum() / 2, torch.ones_like(goals), goals)
            optimizer.step()
    assert [module.weight.tolist() for module in fleet.modules] == [[[1.0]], [[1.0]]]
    assert local.records[0].drift == 2.0**-16  # (2^-8)^2: about a mean in bfloat16, which is 1, it would be 2^-15


def test_growing_sets_length_and_lr() -> None:
    # N = 1: K^s = ceil(s^(1/3)) = 1, 2, 2, ... and lr 1/2 s^(-2/3); towards 4 from 0.
    path, local = walk([4.0], schedule=prsgd.growing(lr_scale=0.5), steps=5, lr=123.0)
    x, expected = 0.0, []
    for lr in (0.5, 0.5 / 2 ** (2 / 3), 0.5 / 2 ** (2 / 3), 0.5 / 3 ** (2 / 3), 0.5 / 3 ** (2 / 3)):
        x -= lr * (x - 4)
        expected.append(x)
    assert [row[0] for row in path[:5]] == pytest.approx(expected, rel=1e-15)
    assert [r.step for r in local.records] == [1, 3, 5]
    assert [r.lr for r in local.records] == pytest.approx([0.5, 0.5 / 2 ** (2 / 3), 0.5 / 3 ** (2 / 3)])


def test_growing_with_two_workers_and_a_cap() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.growing(lr_cap=0.5), steps=10)
    # K^s = 1 up to s = 8, so 8 rounds of one step at min(2 / s^(2/3), 1/2) = 1/2 (s = 8: 2/4), each mean-gradient SGD
    # towards 2; then a round of 2 steps at 2 / 9^(2/3).
    x = 2 - 2 * 0.5**8
    assert path[7] == pytest.approx([x, x], rel=1e-14)
    a, b = x, x
    for _ in range(2):
        lr = 2 / 9 ** (2 / 3)
        a, b = a - lr * a, b - lr * (b - 4)
    assert path[9] == pytest.approx([(a + b) / 2] * 2, rel=1e-14)
    assert [r.period for r in local.records] == [1] * 8 + [2]


def test_growing_clamps_the_overlap() -> None:
    _, local = walk([0.0, 4.0], schedule=prsgd.growing(lr_cap=0.1), steps=10, overlap=2)
    assert [(r.period, r.overlap) for r in local.records] == [(1, 1)] * 8 + [(2, 2), (0, 0)]


def test_per_worker_periods() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.per_worker([2, 1]), steps=4)
    # Worker 0: 2 steps a round, worker 1: 1 and then it waits. 0 -> 0, 0;  0 -> 2;  mean 1.
    # 1 -> 1/2, 1/4;  1 -> 5/2;  mean 11/8.
    assert path == [[0, 2], [1, 1], [0.5, 2.5], [1.375, 1.375], [1.375, 1.375]]
    assert local.steps == (4, 2)
    assert [r.step for r in local.records] == [2, 4]


def test_per_worker_periods_with_overlap() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.per_worker([3, 1]), overlap=1, steps=6, start=8.0)
    # Worker 1 closes at its step 0 with 8 and then waits for worker 0, which closes at its step 2 with 2: mean 5.
    # Worker 0's third step: gradient at 2 is 2: 5 - 1 = 4.  Worker 1's first: gradient at 8 is 4: 5 - 2 = 3.
    # Round 2: worker 1 closes with 3; worker 0 goes 4, 2, 1 and closes: mean 2. Third steps: 2 - 1/2, 2 + 1/2.
    assert path == [[4, 8], [2, 8], [4, 3], [2, 3], [1, 3], [1.5, 2.5], [2, 2]]
    assert local.steps == (6, 2)


def test_once() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.once(), steps=3)
    assert path == [[0, 2], [0, 3], [0, 3.5], [1.75, 1.75]]
    assert [(r.step, r.period) for r in local.records] == [(3, 3)]


def test_weights_by_steps() -> None:
    path, _ = walk([0.0, 4.0], schedule=prsgd.per_worker([3, 1]), steps=3, averaging=prsgd.mean("steps"))
    assert path[-1] == [0.5, 0.5]  # (3 x 0 + 1 x 2) / 4


def test_weights_by_samples() -> None:
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    averaging = prsgd.mean(weights="samples")
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=averaging) as local:
        for samples in ([1, 3], [3, 1]):
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 4.0], [None, None])
            local.log(samples=samples)
            optimizer.step()
        # 0 -> (0, 2): (1 x 0 + 3 x 2) / 4 = 3/2.  3/2 -> (3/4, 11/4): (3 x 3/4 + 11/4) / 4 = 5/4.
        assert fleet.rows[:, 0].tolist() == [1.25, 1.25]
    assert [r.samples for r in local.records] == [4, 4]


@pytest.mark.parametrize(
    ("optimizer_state", "third"),
    [
        # lr and momentum 1/2, from 0 towards (0, 4): after t=1 the buffers are (0, -4) and x is (0, 2); after t=2
        # (0, -4) and (0, 4), whose mean is 2. In t=3 the gradients are (2, -2):
        ("keep", [1.0, 4.0]),  # buffers (2, -4)
        ("average", [1.5, 3.5]),  # buffers -1 + (2, -2) = (1, -3)
        ("reset", [1.0, 3.0]),  # buffers (2, -2)
    ],
)
def test_momentum_at_an_average(optimizer_state: str, third: list[float]) -> None:
    path, _ = walk([0.0, 4.0], schedule=prsgd.every(2), steps=3, momentum=0.5, optimizer_state=optimizer_state)
    assert path[:3] == [[0, 2], [2, 2], third]


def test_momentum_averaged_in_flight() -> None:
    # Overlap 1: closed after t=1 with x (0, 2), buffers (0, -4): means 1 and -2 land in t=2, between gradient (0, -2)
    # and update: buffers -1 + (0, -2) = (-1, -3), x 1 + (1/2, 3/2).
    path, _ = walk([0.0, 4.0], schedule=prsgd.every(2), overlap=1, steps=2, momentum=0.5, optimizer_state="average")
    assert path[1] == [1.5, 2.5]


def test_user_lr_scheduler_is_left_alone() -> None:
    net = Point(8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)) as local:
        for _ in range(3):
            optimizer.zero_grad()
            net(0.0).backward()
            optimizer.step()
            scheduler.step()
    assert net.x.item() == 8 * 0.5 * 0.75 * 0.875
    assert [r.lr for r in local.records] == [0.25, 0.0625]


def test_frozen_parameters_do_not_travel() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    records: list[prsgd.Record] = []
    fleet = prsgd.Fleet(net, 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), on_record=records.append):
        for _ in range(2):
            optimizer.zero_grad()
            fleet.backward(nn.functional.mse_loss, torch.randn(2, 5, 3), torch.randn(2, 5, 1))
            optimizer.step()
    assert fleet.rows.shape == (2, 3)
    header = prsgd.averaging.base.SUMS_WIDTH
    assert records[0].bytes_sent == (3 + header) * 4
    assert torch.equal(fleet.modules[1][0].weight, before)
