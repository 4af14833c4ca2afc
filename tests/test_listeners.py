"""Whoever hears of a record may look at the run and save it: that changes nothing, and what is saved goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd.records import Record

STEPS = 17
PERIODS = {"exp_avg": 3, "exp_avg_sq": 6}
CASES = [
    (state, overlap, workers, fragments)
    for state in ("keep", "average", "reset", PERIODS)
    for overlap in ((0, 1, 2) if state in ("keep", "reset") else (0, 1))
    for workers, fragments in ((1, 1), (3, 1), (2, 2))
    if fragments * overlap <= 2
]


def made(workers: int) -> tuple[prsgd.Fleet, torch.optim.Adam]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    fleet = prsgd.Fleet(model, workers)
    return fleet, torch.optim.Adam(fleet.parameters(), lr=0.05)


def batches(steps: int, workers: int) -> Tensor:
    return torch.randn(steps, workers, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def train(fleet: prsgd.Fleet, optimizer: torch.optim.Optimizer, inputs: Tensor, first: int) -> None:
    for x in inputs[first:]:
        optimizer.zero_grad()
        fleet.backward(lambda output, y: (output - y).square().mean(), x, x.sum(-1, keepdim=True))
        optimizer.step()


def flat(fleet: prsgd.Fleet) -> Tensor:
    return torch.cat([p.detach().flatten() for p in fleet.parameters()])


@pytest.mark.parametrize(("state", "overlap", "workers", "fragments"), CASES)
def test_a_listener_may_look_and_save(state: Any, overlap: int, workers: int, fragments: int) -> None:
    parts: dict[str, Any] = {
        "schedule": prsgd.every(2), "overlap": overlap, "optimizer_state": state, "fragments": fragments,
    }  # fmt: skip
    inputs = batches(STEPS, workers)

    def ended(listen: Callable[[prsgd.LocalSGD, prsgd.Fleet, torch.optim.Optimizer], None] | None) -> Tensor:
        fleet, optimizer = made(workers)
        local = prsgd.LocalSGD(fleet, optimizer, **parts)
        if listen is not None:
            local.add_listener(lambda _: listen(local, fleet, optimizer))
        with local:
            train(fleet, optimizer, inputs, 0)
        return flat(fleet)

    seen, saved = [], []

    def look(local: prsgd.LocalSGD, *_: object) -> None:
        with local.consensus() as averaged, torch.no_grad():
            seen.append(float(averaged(torch.ones(1, 4, dtype=torch.float64)).sum()))

    def save(local: prsgd.LocalSGD, fleet: prsgd.Fleet, optimizer: torch.optim.Optimizer) -> None:
        states = fleet.state_dict(), optimizer.state_dict(), local.state_dict()
        saved.append((local.step, copy.deepcopy(states)))

    usual = ended(None)
    assert torch.equal(ended(look), usual)
    assert torch.equal(ended(save), usual)
    assert len(seen) == len(saved) >= STEPS // 2
    for step, (models, optimizers, run) in [each for each in saved if each[0] < STEPS][::3]:
        fleet, optimizer = made(workers)
        local = prsgd.LocalSGD(fleet, optimizer, **parts)
        fleet.load_state_dict(models)
        optimizer.load_state_dict(optimizers)
        local.load_state_dict(run)
        with local:
            train(fleet, optimizer, inputs, step)
        assert torch.equal(flat(fleet), usual), step


def test_records_come_one_by_one_and_once() -> None:
    """Also those that become complete while a listener looks."""
    heard: list[tuple[int, int]] = []
    fleet, optimizer = made(2)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2))

    def listen(record: Record) -> None:
        with local.consensus():
            heard.append((record.round, local.totals.rounds))

    local.add_listener(listen)
    with local:
        train(fleet, optimizer, batches(7, 2), 0)
    assert heard == [(n, n) for n in range(1, 5)]
    assert [record.round for record in local.records] == [1, 2, 3, 4]


def test_a_record_is_not_lost_where_the_run_fails_before_it_is_told() -> None:
    heard: list[int] = []
    fleet, optimizer = made(2)
    inputs = batches(4, 2)
    inputs[3] = torch.nan
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), on_record=lambda r: heard.append(r.round))
    with pytest.raises(prsgd.DivergedError), local:
        train(fleet, optimizer, inputs, 0)
    assert heard == [record.round for record in local.records]


def test_the_seconds_of_a_listener_are_none_of_a_round() -> None:
    """A round by the clock holds as many steps, however long somebody listens."""
    now = [0.0]

    def rounds(listen: float) -> list[int]:
        now[0] = 0.0
        fleet, optimizer = made(1)

        def pass_time(_: Record) -> None:
            now[0] += listen

        def tick(*_: object) -> None:
            now[0] += 1.0

        optimizer.register_step_pre_hook(tick)
        run = prsgd.LocalSGD(
            fleet, optimizer, schedule=prsgd.timed(seconds=3.0), clock=lambda _: now[0], on_record=pass_time
        )
        with run:
            train(fleet, optimizer, batches(12, 1), 0)
        return [record.period for record in run.records]

    assert rounds(0.0) == rounds(2.5)
