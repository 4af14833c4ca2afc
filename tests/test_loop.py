"""What happens around steps: skipped ones, several optimizers, rounds by the clock, logging, records."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

import prsgd
from tests.problems import Point, batch, itself, model, walk


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_step_that_gradscaler_skips_is_no_step(fused: bool, overlap: int) -> None:
    net = Point(8.0).float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    seen = []
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), overlap=overlap) as local:
        for overflow in (False, True, False, True, False, False):
            optimizer.zero_grad()
            scaler.scale(net(0.0)).backward()
            if overflow:
                net.x.grad.fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            seen.append((local.step, net.x.item()))
    assert seen == [(1, 4.0), (1, 4.0), (2, 2.0), (2, 2.0), (3, 1.0), (4, 0.5)]
    assert [r.step for r in local.records] == ([2, 4] if overlap == 0 else [2, 4, 4])


def test_a_fleet_can_be_trained_again() -> None:
    fleet = prsgd.Fleet(Point(8.0), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    for _ in range(2):
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
            while fleet.active:
                optimizer.zero_grad()
                fleet.backward(itself, [0.0, 1.0], [0.0, 1.0])
                optimizer.step()
                if local.step == 3:
                    fleet.stop(0)
                    fleet.stop(1)
        assert (local.steps, local.round) == ((3, 3), 2)
    assert fleet.rows.flatten().tolist() == [0.6171875, 0.6171875]


def test_losses_that_are_not_finite_are_left_out() -> None:
    nan = float("nan")
    net = Point(8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4)) as local:
        for loss in (1.0, nan, torch.tensor(3.0), torch.tensor(float("inf"))):
            optimizer.zero_grad()
            net(0.0).backward()
            local.log(loss=loss, samples=5)
            optimizer.step()
    assert [(r.loss, r.samples) for r in local.records] == [(2.0, 20)]


def test_a_scalar_of_samples_counts_for_workers_that_take_part() -> None:
    fleet = prsgd.Fleet(Point(8.0), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    for before in (True, False):
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.per_worker([3, 1])) as local:
            for _ in range(3):
                optimizer.zero_grad()
                losses = fleet.backward(itself, [0.0, 0.0], [0.0, 0.0])
                if before:
                    local.log(loss=losses, samples=10)
                optimizer.step()
                if not before:
                    local.log(loss=losses, samples=10)
        assert [r.samples for r in local.records] == [40]


def test_a_fleet_worker_without_gradient_takes_no_step() -> None:
    fleet = prsgd.Fleet(Point(8.0), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5, momentum=0.9)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
        for skip in (False, True, False):
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 0.0], [0.0, 0.0])
            if skip:
                fleet.modules[1].x.grad = None
            optimizer.step()
            assert local.round == (1 if local.steps == (2, 2) else 0)
        # Worker 0 closed its round at its second step and waited for worker 1's.
        assert local.steps == (2, 2)


def test_idle_workers_stand_still_whatever_their_gradient() -> None:
    """zero_grad(set_to_none=False) leaves zeros, with which weight decay and momentum would act."""
    fleet = prsgd.Fleet(Point(8.0), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.per_worker([3, 1])) as local:
        for tick in range(3):
            optimizer.zero_grad(set_to_none=False)
            losses = fleet.backward(itself, [0.0, 0.0], [0.0, 0.0])
            assert fleet.active == ((0, 1) if tick == 0 else (0,))
            assert torch.isnan(losses).tolist() == [False, tick > 0]
            before = fleet.rows[1].item()
            optimizer.step()
            if tick == 1:
                assert fleet.rows[1].item() == before
        assert local.steps == (3, 1)


def test_several_optimizers_step_once_each() -> None:
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1), torch.optim.Adam(net[1].parameters())]
    with prsgd.LocalSGD(net, optimizers, schedule=prsgd.every(2), overlap=1) as local:
        for t in range(4):
            x, y = batch(0, t)
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizers[0].step()
            assert local.step == t
            optimizers[1].step()
            assert local.step == t + 1
    assert [r.step for r in local.records] == [2, 4, 4]


def test_several_optimizers_of_which_one_is_skipped() -> None:
    """The step is over with the last optimizer, whatever the first one skips; nothing of the first one's is lost."""
    for skipped in (0, 1):
        fleet = prsgd.Fleet(nn.Sequential(Point(8.0), Point(8.0)), 2)
        optimizers = [torch.optim.SGD([m[k].x for m in fleet.modules], lr=0.5) for k in (0, 1)]
        with prsgd.LocalSGD(fleet, optimizers, schedule=prsgd.every(1)) as local:
            for iteration in range(3):
                for m, target in zip(fleet.modules, (0.0, 4.0)):
                    for point in m.children():
                        point.x.grad = point.x.detach() - target
                for k, optimizer in enumerate(optimizers):
                    if not (iteration == 1 and k == skipped):
                        optimizer.step()
                if iteration == 1 and skipped == 1:  # the last one skipped: no step yet, and no average
                    assert not torch.equal(fleet.rows[0], fleet.rows[1])
                else:
                    assert torch.equal(fleet.rows[0], fleet.rows[1])
        assert local.step == (3 if skipped == 0 else 2)
        # The optimizer that was not skipped took 3 steps towards the mean target 2, the other 2 of them.
        assert fleet.rows[0].tolist()[1 - skipped] == pytest.approx(2 + 6 / 8, abs=0.3)


def test_an_optimizer_per_hosted_worker() -> None:
    """A fleet with an optimizer for each worker is the fleet with one for all."""

    def run(separate: bool) -> torch.Tensor:
        fleet = prsgd.Fleet(model(), 3)
        groups: list[Any] = [m.parameters() for m in fleet.modules] if separate else [fleet.parameters()]
        optimizers = [torch.optim.SGD(g, lr=0.2, momentum=0.9) for g in groups]
        with prsgd.LocalSGD(fleet, optimizers, schedule=prsgd.every(3), overlap=2):
            for t in range(10):
                pairs = [batch(w, t) for w in range(3)]
                for optimizer in optimizers:
                    optimizer.zero_grad()
                fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
                for optimizer in optimizers:
                    optimizer.step()
        return fleet.rows

    assert torch.equal(run(True), run(False))


@dataclasses.dataclass(frozen=True)
class by_the_clock:
    """A user's own schedule."""

    seconds: float

    def open(self, now: prsgd.Now) -> prsgd.Round:
        return prsgd.Round(seconds=self.seconds)

    def check(self, num_workers: int, overlap: int) -> None:
        pass


class Clock:
    """Worker i's step takes ``per_step[i]`` seconds."""

    def __init__(self, per_step: list[float]) -> None:
        self.per_step = per_step
        self.local: prsgd.LocalSGD | None = None

    def __call__(self, worker: int) -> float:
        return 0.0 if self.local is None else self.local.steps[worker] * self.per_step[worker]


@pytest.mark.parametrize(
    ("overlap", "steps", "expected"),
    [
        # Rounds of 1 second: worker 0 takes 4 steps of 1/4 s, worker 1 two of 1/2 s.
        (0, (12, 6), [(4, 4, 0), (8, 4, 0), (12, 4, 0)]),
        # They close at 4, 8, 12 and land a step, or two, into the next round; worker 1 has begun that one.
        (1, (12, 6), [(5, 4, 1), (9, 4, 1), (12, 4, 0)]),
        (2, (12, 7), [(6, 4, 2), (10, 4, 2), (12, 4, 1)]),
    ],
)
def test_rounds_by_the_clock(overlap: int, steps: tuple[int, int], expected: list[tuple[int, int, int]]) -> None:
    clock = Clock([0.25, 0.5])
    fleet = prsgd.Fleet(Point(8.0), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=by_the_clock(1.0), overlap=overlap, clock=clock)
    clock.local = local
    with local:
        while local.steps[0] < 12:
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
            optimizer.step()
        assert local.steps == steps
    assert [(r.step, r.period, r.overlap) for r in local.records[:3]] == expected
    assert torch.equal(fleet.rows[0], fleet.rows[1])


def test_a_round_by_the_clock_has_at_least_one_step() -> None:
    _, local = walk([0.0, 4.0], schedule=by_the_clock(1e-9), steps=3)
    assert [r.step for r in local.records] == [1, 2, 3]


def test_rounds_by_the_clock_shorter_than_the_overlap() -> None:
    path, local = walk([0.0, 4.0], schedule=by_the_clock(1e-9), overlap=3, steps=4)
    # Every step closes a round; what is in flight lands before the next launch, one step after its own.
    # (0, 2): launched, mean 1. Next step (0, 3), lands: (0, 3) + 1 - (0, 2) = (1, 2); launched, mean 3/2.
    # Step: (1/2, 3), lands: (1/2 + 1/2, 3 - 1/2) = (1, 5/2). Step (1/2, 13/4); lands 7/4 - (1, 5/2): (5/4, 5/2).
    assert path[:4] == [[0, 2], [1, 2], [1, 2.5], [1.25, 2.5]]
    assert [r.overlap for r in local.records] == [1, 1, 1, 0]


def test_whichever_comes_first_closes_the_round() -> None:
    class both:
        def open(self, now: prsgd.Now) -> prsgd.Round:
            return prsgd.Round(steps=3, seconds=1.0)

        def check(self, num_workers: int, overlap: int) -> None:
            pass

    for per_step, steps in ((0.1, [3, 6, 9]), (0.5, [2, 4, 6])):
        clock = Clock([per_step])
        net = Point(8.0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        local = prsgd.LocalSGD(net, optimizer, schedule=both(), clock=clock)
        clock.local = local
        with local:
            for _ in range(9):
                optimizer.zero_grad()
                net(0.0).backward()
                optimizer.step()
        assert [r.step for r in local.records][:3] == steps


def test_a_schedule_sees_where_it_is() -> None:
    seen: list[prsgd.Now] = []

    class watching:
        def open(self, now: prsgd.Now) -> prsgd.Round:
            seen.append(now)
            return prsgd.Round(steps=2)

        def check(self, num_workers: int, overlap: int) -> None:
            assert (num_workers, overlap) == (2, 0)

    _, local = walk([0.0, 4.0], schedule=watching(), steps=6)
    assert [(n.worker, n.round, n.step, n.num_workers, n.lr) for n in seen[:4]] == [
        (0, 1, 0, 2, 0.5), (1, 1, 0, 2, 0.5), (0, 2, 2, 2, 0.5), (1, 2, 2, 2, 0.5),
    ]  # fmt: skip
    assert [n.last for n in seen[::2]] == [None, None, local.records[0], local.records[1]]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("overlap", [0, 1])
def test_logged_losses_belong_to_their_round(before: bool, overlap: int) -> None:
    net = Point(8.0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), overlap=overlap) as local:
        for step in range(1, 6):
            optimizer.zero_grad()
            net(0.0).backward()
            if before:
                local.log(loss=torch.tensor(float(step), requires_grad=True), samples=10 * step)
            optimizer.step()
            if not before:
                local.log(loss=step, samples=10 * step)
    assert [r.loss for r in local.records] == [1.5, 3.5, 5.0]
    assert [r.samples for r in local.records] == [30, 70, 50]


def test_records_are_json_and_arrive_once() -> None:
    seen: list[prsgd.Record] = []
    _, local = walk([0.0, 4.0], schedule=prsgd.every(2), steps=5, on_record=seen.append)
    assert seen == local.records
    for record in seen:
        assert prsgd.Record(**json.loads(json.dumps(dataclasses.asdict(record)))) == record
        assert min(record.wait_seconds, record.copy_seconds, record.flight_seconds) >= 0


def test_a_user_averaging() -> None:
    """The seam carries a method of the user's own: everybody moves half-way to the mean."""

    class half_way(prsgd.Averaging):
        def launch(
            self, memory: Mapping[str, Any], comm: prsgd.Communicator, snap: torch.Tensor, header: prsgd.Header
        ) -> prsgd.Work[prsgd.Landing]:
            target = (snap + snap.mean(dim=0)) / 2
            header = dataclasses.replace(header, extras=header.extras.mean(dim=0))
            return prsgd.Done(prsgd.Landing(target, header, 0))

    path, _ = walk([0.0, 4.0], schedule=prsgd.every(1), steps=2, averaging=half_way())
    # 0 -> (0, 2): mean 1: (1/2, 3/2).  -> (1/4, 11/4): mean 3/2: (7/8, 17/8).  The run ends with one exact mean.
    assert path == [[0.5, 1.5], [0.875, 2.125], [1.5, 1.5]]
