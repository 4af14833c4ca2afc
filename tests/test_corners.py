"""Where two features meet: what a review of the mended core found."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import prsgd
from tests.problems import CHANGING, batch, model, take_step
from tests.ranks import run_ranks
from tests.test_no_wrong_model import EVERY, cross_entropy, flat, rank_all, step_of


@pytest.mark.parametrize("name", ["mean", "mean by steps", "bfloat16", "4 bits", "sparse", "ring", "outer", "easgd"])
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_alike_workers_are_told_of_by_every_averaging(workers: int, name: str) -> None:
    """Their mean differs from them by rounding, so no drift of 0 tells of it."""
    averaging = copy.deepcopy(EVERY[name])
    for same in (True, False):
        fleet = prsgd.Fleet(model().float(), workers)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        x, y = torch.randn(workers, 5, 6), torch.randint(3, (workers, 5))
        if same:
            x, y = x[:1].expand(workers, 5, 6), y[:1].expand(workers, 5)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=averaging):
                for _ in range(8):
                    optimizer.zero_grad()
                    fleet.backward(cross_entropy, x, y)
                    optimizer.step()
        assert any("alike to the last bit" in str(w.message) for w in seen) == same


@pytest.mark.filterwarnings("error")
def test_workers_whose_numbers_keep_their_sum_are_not_alike() -> None:
    """The gradients of a linear layer under a softmax sum to zero; halves and quarters do so to the last bit."""
    start = torch.nn.Linear(2, 2, bias=False).double()
    torch.nn.init.zeros_(start.weight)
    fleet = prsgd.Fleet(start, 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=1.0)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
        for _ in range(8):
            for module, change in zip(fleet.modules, (0.25, 0.5)):
                module.weight.grad = torch.tensor([[change, 0.0], [-change, 0.0]]).double()
            optimizer.step()
    # Two numbers, each 2 steps of 0.125 from the mean.
    assert [record.drift for record in local.records] == pytest.approx([0.125] * 4, rel=1e-12)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("seed", range(6))
def test_workers_that_see_rare_features_are_not_alike(seed: int) -> None:
    """Most weights stay where they are, and under a softmax the others keep their sum to within rounding."""
    torch.manual_seed(seed)
    fleet = prsgd.Fleet(torch.nn.Linear(5000, 2, bias=False), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
        for _ in range(24):
            x = torch.zeros(2, 4, 5000).scatter_(2, torch.randint(5000, (2, 4, 10)), 1.0)
            optimizer.zero_grad()
            fleet.backward(torch.nn.functional.cross_entropy, x, torch.randint(2, (2, 4)))
            optimizer.step()
    assert all(record.drift > 0 for record in local.records)


@pytest.mark.filterwarnings("error")
def test_workers_with_one_huge_number_are_not_alike() -> None:
    """All others are lost beside it in a sum."""
    fleet = prsgd.Fleet(torch.nn.Linear(8, 1), 2)
    with torch.no_grad():
        for module in fleet.modules:
            module.weight[0, 0] = 1e30
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
        for step in range(12):
            for i, module in enumerate(fleet.modules):
                module.weight.grad, module.bias.grad = torch.zeros(1, 8), torch.ones(1)
                module.weight.grad[0, 1] = 0.1 * (step + 1) * (i + 1)
            optimizer.step()
    assert local.round == 6


@pytest.mark.parametrize("small", [1e-18, 1e-12, 1e-40])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_tiny_lr_does_not_blow_up_the_outer_momentum(small: float, nesterov: bool) -> None:
    """What a mean of three is off by rounding, divided by such an lr, was momentum of any size."""
    fleet = prsgd.Fleet(model().float(), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=small)
    averaging = prsgd.outer(1.0, 0.7, nesterov=nesterov, by_inner_lr=True)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=averaging):
        for step in range(8):
            optimizer.param_groups[0]["lr"] = small if step < 4 else 0.05
            optimizer.zero_grad()
            pairs = [batch(i, step) for i in range(3)]
            fleet.backward(cross_entropy, [x.float() for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
    assert float(fleet.rows.abs().max()) < 2.0


def epochs_of(rank: int, schedule: Any, overlap: int) -> list[float]:
    """Three epochs, of 10 batches here and 3 there, with a look after each."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    with prsgd.LocalSGD(net, optimizer, schedule=schedule, overlap=overlap, timeout_seconds=60) as local:
        with local.consensus():
            pass
        for _ in range(3):
            with local.epoch():
                for step in range((10, 3)[rank]):
                    step_of(net, optimizer, rank, step)
            with local.consensus() as averaged:
                assert torch.allclose(flat(averaged), flat(net), rtol=0, atol=1e-12)
            found.append(optimizer.param_groups[0]["lr"])
    return found


def test_epochs_leave_all_workers_at_the_same_point() -> None:
    cases = [
        *((schedule, overlap) for schedule in CHANGING.values() for overlap in (0, 1, 2)),
        (prsgd.per_worker([2, 3]), 1),
        (prsgd.per_worker([3, 7]), 2),
        (prsgd.every(1), 1),
        (prsgd.every(2), 2),
    ]
    one, other = run_ranks(rank_all, 2, epochs_of, cases)
    assert one == other


def two_runs(rank: int) -> list[Tensor]:
    nets = [model(), model()]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    runs = [
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), timeout_seconds=60)
        for net, optimizer in zip(nets, optimizers)
    ]
    with prsgd.together(*runs):
        for _ in range(2):
            with prsgd.epoch(*runs):
                for step in range((7, 3)[rank]):
                    for net, optimizer in zip(nets, optimizers):
                        step_of(net, optimizer, rank, step)
    return [flat(net) for net in nets]


def test_epochs_of_several_runs_end_together() -> None:
    one, other = run_ranks(two_runs, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def test_a_run_is_taken_once_and_only_runs_are() -> None:
    fleet = prsgd.Fleet(model(), 2)
    local = prsgd.LocalSGD(fleet, torch.optim.SGD(fleet.parameters(), lr=0.1), schedule=prsgd.every(2)).start()
    with pytest.raises(ValueError, match=r"finish\(\) takes each run once"):
        prsgd.finish(local, local)
    with pytest.raises(ValueError, match=r"epoch\(\) takes runs of LocalSGD, got int"), prsgd.epoch(3):  # type: ignore[arg-type]
        pass


def calls(frame: FrameType | None) -> Iterator[str]:
    """The functions that a thread is in."""
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def interrupt_what_waits() -> None:
    """Ctrl-C, once a thread of this process waits for a sum: not after some time, by which it may not be there."""
    while not any(name == "_come" for frame in sys._current_frames().values() for name in calls(frame)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def waits_for_the_other(rank: int, told: Path) -> bool:
    """Worker 0 is interrupted while it waits in ``prsgd.finish`` for worker 1, which waits for word of that."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), timeout_seconds=100).start()
    if rank == 1:
        until = time.monotonic() + 90
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.05)
        return told.exists()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=interrupt_what_waits).start()
    with pytest.raises(KeyboardInterrupt):
        prsgd.finish(local)
    told.touch()
    return True


def test_an_interrupt_ends_what_waits_for_others(tmp_path: Path) -> None:
    assert run_ranks(waits_for_the_other, 2, tmp_path / "told") == [True, True]


def test_a_fleet_is_not_saved_inside_a_look() -> None:
    fleet = prsgd.Fleet(model(), 2)
    local = prsgd.LocalSGD(fleet, torch.optim.SGD(fleet.parameters(), lr=0.1), schedule=prsgd.every(4)).start()
    inside = pytest.raises(prsgd.UsageError, match=r"fleet.state_dict\(\) inside consensus\(\)")
    with local.consensus(), inside:
        fleet.state_dict()
    fleet.state_dict()


@pytest.mark.parametrize("averaging", ["easgd", "outer", "sparse"])
def test_a_run_may_start_in_inference_mode(averaging: str) -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    local = prsgd.LocalSGD(
        fleet, optimizer, schedule=prsgd.every(2), overlap=2, averaging=copy.deepcopy(EVERY[averaging])
    )
    with torch.inference_mode():
        local.start()
    taken = dict.fromkeys(fleet.workers, 0)
    for _ in range(6):
        take_step(fleet, optimizer, local, taken)
    local.finish()
    assert local.round >= 3


class Holder(torch.optim.Optimizer):
    """Steps another one, as Lookahead does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("mode", ["average", "reset"])
def test_state_that_another_optimizer_keeps_is_not_left_out_in_silence(mode: str) -> None:
    net = model()
    holder = Holder(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match=f'"{mode}" sees what Holder keeps itself, and not the state of'):
        prsgd.LocalSGD(net, holder, schedule=prsgd.every(2), optimizer_state=mode)


def weighed_by_a_function(rank: int) -> Tensor:
    """A function has another address in each process, which is no difference between the workers."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaging = prsgd.mean(lambda brought: 1.0 + brought.worker)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), averaging=averaging, timeout_seconds=60):
        for step in range(4):
            step_of(net, optimizer, rank, step)
    return flat(net)


def test_parts_with_functions_are_alike_in_all_processes() -> None:
    one, other = run_ranks(weighed_by_a_function, 2)
    assert torch.equal(one, other)
