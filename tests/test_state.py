"""BatchNorm, counters, optimizer state: what is averaged beside the parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import prsgd
from prsgd.replicas.buffers import Buffers
from prsgd.replicas.optimizer_state import state_keys
from prsgd.replicas.rows import Rows, subtract_from, trainable


def normed_fleet(n: int, momentum: float | None = 1.0) -> prsgd.Fleet:
    net = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 1)).double()
    return prsgd.Fleet(net, n)


def one_step(fleet: prsgd.Fleet, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    fleet.backward(nn.functional.mse_loss, x, torch.zeros(len(x), x.shape[1], 1, dtype=x.dtype))
    optimizer.step()


@pytest.mark.parametrize("shift", [0.0, 1e6])
def test_pooled_batchnorm_is_that_of_the_pooled_data(shift: float) -> None:
    fleet = normed_fleet(4)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    torch.manual_seed(0)
    x = torch.randn(4, 50, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 3.0]) + shift
    x += torch.arange(4.0).view(4, 1, 1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)):
        for _ in range(2):  # the second time the centre is the pooled mean
            one_step(fleet, optimizer, x)
            one_step(fleet, optimizer, x)
    pooled = x.reshape(200, 3)
    # Each worker's running variance is the unbiased one of its batch, n/(n-1) times the variance of its data.
    within, about = x.var(dim=1, unbiased=True).mean(0), x.mean(1).var(dim=0, unbiased=False)
    for module in fleet.modules:
        norm = module[0]
        torch.testing.assert_close(norm.running_mean, pooled.mean(0), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(norm.running_var, within + about, rtol=1e-9, atol=0)
        torch.testing.assert_close(within * 49 / 50 + about, pooled.var(dim=0, unbiased=False))  # the law it rests on


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0, 100)), min_size=1, max_size=6), st.floats(-100, 100))
def test_pooling_does_not_depend_on_the_centre(stats: list[tuple[float, float]], centre: float) -> None:
    nets = [nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double() for _ in stats]
    buffers = Buffers(nets, range(len(nets)), len(nets))
    nets[0][0].running_mean.fill_(centre)
    buffers.settle(torch.float64, torch.device("cpu"))
    for net, (mean, variance) in zip(nets, stats):
        net[0].running_mean.fill_(mean)
        net[0].running_var.fill_(variance)
    rows = torch.zeros(len(nets), buffers.width, dtype=torch.float64)
    for i in range(len(nets)):
        buffers.pack(i, rows[i])
    buffers.write(0, buffers.pooled(buffers.sums(rows, [True] * len(nets))))
    means = torch.tensor([m for m, _ in stats], dtype=torch.float64)
    variances = torch.tensor([v for _, v in stats], dtype=torch.float64)
    expected = (variances + (means - means.mean()) ** 2).mean()
    torch.testing.assert_close(nets[0][0].running_var[0], expected, rtol=1e-9, atol=1e-9)


def test_counters_take_the_maximum() -> None:
    fleet = normed_fleet(2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.per_worker([5, 2])) as local:
        for _ in range(5):
            one_step(fleet, optimizer, torch.randn(2, 4, 3, dtype=torch.float64))
        assert [int(m[0].num_batches_tracked) for m in fleet.modules] == [5, 5]
        for _ in range(4):
            one_step(fleet, optimizer, torch.randn(2, 4, 3, dtype=torch.float64))
        assert [int(m[0].num_batches_tracked) for m in fleet.modules] == [9, 7]
    assert [int(m[0].num_batches_tracked) for m in fleet.modules] == [9, 9]
    assert local.steps == (9, 4)


@pytest.mark.filterwarnings("ignore:rounds 1 and 2. all workers' models were alike")  # normed, both batches are zeros
def test_statistics_do_not_ride_in_flight() -> None:
    fleet = normed_fleet(2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    x = torch.stack([torch.zeros(4, 3), torch.ones(4, 3)]).double()
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), overlap=1) as local:
        for _ in range(4):
            one_step(fleet, optimizer, x)
        means = [m[0].running_mean[0].item() for m in fleet.modules]
        assert means == [0.0, 1.0]
        with local.consensus() as averaged:
            assert averaged[0].running_mean.tolist() == [0.5] * 3
            assert averaged[0].running_var.tolist() == [0.25] * 3
        assert fleet.modules[0][0].running_mean[0].item() == 0.0
    assert [m[0].running_mean[0].item() for m in fleet.modules] == [0.5, 0.5]


def test_consensus_gives_everything_back() -> None:
    fleet = normed_fleet(3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4)) as local:
        for _ in range(3):
            one_step(fleet, optimizer, torch.randn(3, 4, 3, dtype=torch.float64))
        rows = fleet.rows.clone()
        with local.consensus() as averaged:
            weights = torch.cat([p.flatten() for p in averaged.parameters()])
            torch.testing.assert_close(weights, rows.mean(0), rtol=1e-14, atol=1e-16)
            averaged.eval()
        assert torch.equal(fleet.rows, rows)
        assert all(m.training for m in averaged.modules())
        with pytest.raises(KeyError, match="mine"), local.consensus():
            raise KeyError("mine")
        assert torch.equal(fleet.rows, rows)


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), []),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), ["momentum_buffer"]),
        (lambda p: torch.optim.AdamW(p, lr=0.1), ["exp_avg", "exp_avg_sq"]),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), ["square_avg"]),
    ],
)
def test_optimizer_state_is_found_without_a_step(make: object, keys: list[str]) -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = make([parameter])
    assert state_keys(optimizer) == [keys]
    assert not optimizer.state
    assert parameter.grad is None


def test_adam_state_averages() -> None:
    fleet = prsgd.Fleet(nn.Linear(3, 1).double(), 2)
    optimizer = torch.optim.Adam(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3), optimizer_state="average"):
        before = []
        for _ in range(3):
            optimizer.zero_grad()
            fleet.backward(nn.functional.mse_loss, torch.randn(2, 4, 3).double(), torch.randn(2, 4, 1).double())
            gradients = [m.weight.grad.clone() for m in fleet.modules]
            optimizer.step()
            before.append([optimizer.state[m.weight]["exp_avg"].clone() for m in fleet.modules])
    # exp_avg <- 0.9 exp_avg + 0.1 gradient, then the mean of the two workers'.
    expected = sum(0.9 * old + 0.1 * g for old, g in zip(before[1], gradients)) / 2
    torch.testing.assert_close(before[2][0], expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(before[2][0], before[2][1])


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        self.register_buffer("third", torch.full((50,), 1 / 3))
        self.register_buffer("moving", torch.zeros(1))
        self.register_buffer("wide", torch.arange(4.0).expand(2, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.moving += x.mean().detach()
        out: torch.Tensor = self.linear(x)
        return out


def test_constant_buffers_stay_and_others_are_averaged() -> None:
    fleet = prsgd.Fleet(Masked(), 3)
    before = [b.clone() for b in fleet.modules[0].buffers()]
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    x = torch.stack([torch.full((4, 3), float(w)) for w in range(3)])
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)):
        for _ in range(4):
            optimizer.zero_grad()
            fleet.backward(nn.functional.mse_loss, x, torch.zeros(3, 4, 1))
            optimizer.step()
    for module in fleet.modules:
        for mine, theirs in zip(module.buffers(), before):
            if mine.numel() > 1:
                assert torch.equal(mine, theirs)
        assert module.moving.item() == 4.0


def test_a_worker_that_stopped_long_ago_does_not_pull_the_statistics() -> None:
    """Its parameters do not count in the last average, and neither does what it saw at the start."""
    found = []
    for overlap in (0, 1):
        fleet = normed_fleet(2, momentum=0.5)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        x = torch.stack([torch.full((4, 3), -100.0), torch.zeros(4, 3)]).double()
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), overlap=overlap):
            for t in range(43):
                if t == 2:
                    fleet.stop(0)
                one_step(fleet, optimizer, x)
        found.append(fleet.modules[0][0].running_mean[0].item())
        assert torch.equal(fleet.modules[0][0].running_mean, fleet.modules[1][0].running_mean)
    assert all(abs(mean) < 0.01 for mean in found), found


def test_rows_of_mixed_dtypes_and_layouts() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(3, 2).bfloat16())
    net[0].weight.data = net[0].weight.data.contiguous(memory_format=torch.channels_last)
    rows = Rows([trainable(net)], None)
    assert rows.dtype == torch.float32
    row = torch.zeros(rows.width)
    rows.pack(0, row)
    assert torch.equal(row, torch.cat([p.detach().flatten().float() for p in net.parameters()]))
    moved = rows.replace(0, row + 1)
    assert moved == pytest.approx(rows.width, rel=1e-2)
    rows.add(0, -torch.ones_like(row))
    assert torch.allclose(torch.cat([p.detach().flatten().float() for p in net.parameters()]), row, atol=1e-2)


def test_large_tensors_are_handled_in_pieces() -> None:
    net = nn.Linear(700, 700)  # more than one group
    rows = Rows([trainable(net)], None)
    row = torch.empty(rows.width)
    rows.pack(0, row)
    assert torch.equal(row[:-700].view(700, 700), net.weight)
    target = torch.randn(rows.width)
    distance = (row - target).double().square().sum().item()
    assert subtract_from(target, row.clone()) == pytest.approx(distance, rel=1e-5)
    assert rows.replace(0, target) == pytest.approx(distance, rel=1e-5)
    assert torch.equal(torch.cat([net.weight.detach().flatten(), net.bias.detach()]), target)


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([1.0, 2.0], True),
        ([1.0, float("nan")], False),
        ([float("inf"), 1.0], False),
        ([float("inf"), -float("inf")], False),
        ([3e38, 3e38], True),  # the sum overflows, the numbers do not
    ],
)
def test_models_that_are_not_finite_are_found(values: list[float], finite: bool) -> None:
    net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1)).start()
    net.weight.data = torch.tensor([values])
    if finite:
        optimizer.step()
        assert net.weight.tolist() == [torch.tensor(values).tolist()]
    else:
        with pytest.raises(prsgd.DivergedError, match="no worker has a finite model left"):
            optimizer.step()
    assert local.round == finite


def test_a_model_that_changes_its_dtype_is_not() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1)).start()
    net.double()
    with pytest.raises(ValueError, match=r"'weight' was \[1, 2\] torch.float32 on cpu .* torch.float64"):
        optimizer.step()
    assert local.round == 0


def test_a_model_whose_tensors_are_replaced_is_followed() -> None:
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1)) as local:
        net.weight.data = torch.full((1, 2), 7.0)
        optimizer.step()
        with local.consensus() as averaged:
            assert averaged.weight.tolist() == [[7.0, 7.0]]


@pytest.mark.filterwarnings("ignore:rounds 1 and 2. all workers' models were alike")  # normed, both batches are zeros
@pytest.mark.parametrize("steps", [3, 7, 8])
def test_the_last_average_pools_statistics_also_when_one_was_in_flight(steps: int) -> None:
    fleet = normed_fleet(2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    x = torch.stack([torch.zeros(4, 3), torch.ones(4, 3)]).double()
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), overlap=1):
        for _ in range(steps):
            one_step(fleet, optimizer, x)
    for module in fleet.modules:
        assert module[0].running_mean.tolist() == [0.5] * 3
        assert module[0].running_var.tolist() == [0.25] * 3
        assert module[0].num_batches_tracked == steps
