"""The outer optimizer: trajectories by hand, the mean as its special case, equal in process and over gloo."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prsgd
from prsgd.lab import methods
from tests.problems import Point, itself, walk
from tests.ranks import run_ranks


def test_heavy_ball_by_hand() -> None:
    """lr 1/2, momentum 1/2, from 0; worker 0 pulls to 0 and worker 1 to 4, each of two steps halves the distance."""
    averaging = prsgd.outer(lr=0.5, momentum=0.5, nesterov=False)
    path, _ = walk([0.0, 4.0], schedule=prsgd.every(2), steps=4, averaging=averaging)
    # Round 1: (0, 3), mean 3/2: change -3/2, u = -3/2, x = 3/4.
    # Round 2: (3/16, 51/16), mean 27/16: change -15/16, u = -3/4 - 15/16 = -27/16, x = 3/4 + 27/32 = 51/32.
    assert path[1] == [0.75, 0.75]
    assert path[3] == [51 / 32, 51 / 32]


def test_nesterov_by_hand() -> None:
    averaging = prsgd.outer(lr=0.5, momentum=0.5)
    path, _ = walk([0.0, 4.0], schedule=prsgd.every(2), steps=4, averaging=averaging)
    # Round 1: change -3/2, u = -3/2, direction -3/2 - 3/4 = -9/4, x = 9/8.
    # Round 2: (9/32, 105/32), mean 57/32: change -21/32, u = -3/4 - 21/32 = -45/32, direction -87/64, x = 231/128.
    assert path[1] == [9 / 8, 9 / 8]
    assert path[3] == [231 / 128, 231 / 128]


def test_slowmo_keeps_its_momentum_in_units_of_the_lr() -> None:
    """x <- x - lr u with u <- m u + (x - mean) / lr: with one lr it is the heavy ball; when the lr falls u stays."""
    same, _ = walk(
        [0.0, 4.0], schedule=prsgd.every(2), steps=4,
        averaging=prsgd.outer(lr=1.0, momentum=0.5, nesterov=False, by_inner_lr=True),
    )  # fmt: skip
    plain, _ = walk(
        [0.0, 4.0], schedule=prsgd.every(2), steps=4, averaging=prsgd.outer(lr=1.0, momentum=0.5, nesterov=False)
    )
    assert same == plain
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    averaging = prsgd.outer(lr=1.0, momentum=0.5, nesterov=False, by_inner_lr=True)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=averaging):
        for lr in (0.5, 0.25):
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
            optimizer.step()
    # lr 1/2: (0, 2), mean 1, change / lr = -2, u = -2, x = 1.
    # lr 1/4: gradients 1 and -3: (3/4, 7/4), mean 5/4, change / lr = -1, u = -1 - 1 = -2, x = 1 + 1/4 * 2 = 3/2.
    assert fleet.rows[:, 0].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_lr_1_without_momentum_is_the_mean(overlap: int) -> None:
    how: dict[str, Any] = {"schedule": prsgd.every(3), "steps": 8, "overlap": overlap, "lr": 0.3, "momentum": 0.5}
    path, _ = walk([0.1, 3.7, -2.0], averaging=prsgd.outer(lr=1.0, momentum=0.0), **how)
    same, _ = walk([0.1, 3.7, -2.0], averaging=prsgd.mean(), **how)
    assert path == same


def test_overlap_lands_by_the_delta_rule() -> None:
    """Closed after step 1 with (0, 2), mean 1: x = 1/2. Step 2's gradients at (0, 2) are (0, -2): (1/2, 3/2)."""
    averaging = prsgd.outer(lr=0.5, momentum=0.0, nesterov=False)
    path, _ = walk([0.0, 4.0], schedule=prsgd.every(2), steps=2, overlap=1, averaging=averaging)
    assert path[1] == [0.5, 1.5]


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_drift_is_measured_from_the_mean(overlap: int) -> None:
    """Not from the outer point: the same snapshots have the same drift whatever is made of their mean."""
    how: dict[str, Any] = {"schedule": prsgd.every(2), "steps": 2, "overlap": overlap}
    _, outer = walk([0.0, 4.0], averaging=prsgd.outer(lr=0.5), **how)
    _, plain = walk([0.0, 4.0], averaging=prsgd.mean(), **how)
    assert outer.records[0].drift == plain.records[0].drift


def one_rank(rank: int) -> list[float]:
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), averaging=prsgd.outer(lr=0.5, momentum=0.5)):
        for _ in range(6):
            optimizer.zero_grad()
            model(4.0 * rank).backward()
            optimizer.step()
            found.append(model.x.item())
    return found


def test_over_gloo_it_is_the_same() -> None:
    ranks = run_ranks(one_rank, 2)
    path, _ = walk([0.0, 4.0], schedule=prsgd.every(2), steps=6, averaging=prsgd.outer(lr=0.5, momentum=0.5))
    assert [list(step) for step in zip(*ranks)] == path[:6]


def test_an_epoch_ends_at_the_mean_and_the_next_outer_step_starts_there() -> None:
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    outer = prsgd.outer(0.5, 0.0)
    path = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=outer) as local:
        for steps in (3, 2):
            with local.epoch():
                for _ in range(steps):
                    optimizer.zero_grad()
                    fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
                    optimizer.step()
                    path.append(fleet.rows[:, 0].tolist())
            path.append(fleet.rows[:, 0].tolist())
    # (0, 2), (0, 3): mean 3/2, half way from 0: 3/4.  One more step, (3/8, 19/8); the epoch ends at the mean 11/8.
    assert path[:4] == [[0, 2], [0.75, 0.75], [0.375, 2.375], [1.375, 1.375]]
    # From there (11/16, 43/16), (11/32, 107/32): mean 59/32, and half way from 11/8, not from 3/4: 103/64.
    assert path[4:] == [[0.6875, 2.6875], [1.609375, 1.609375], [1.609375, 1.609375]]


def test_a_state_goes_on() -> None:
    def fresh(state: dict[str, Any] | None = None) -> tuple[prsgd.Fleet, torch.optim.Optimizer, prsgd.LocalSGD]:
        fleet = prsgd.Fleet(Point(), 2)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
        local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=prsgd.outer())
        if state is not None:
            fleet.load_state_dict(state["fleet"])
            local.load_state_dict(state["local"])
        return fleet, optimizer, local.start()

    def go(fleet: prsgd.Fleet, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
            optimizer.step()

    fleet, optimizer, local = fresh()
    go(fleet, optimizer, 5)
    other, its_optimizer, its_local = fresh({"fleet": fleet.state_dict(), "local": local.state_dict()})
    for one, steps, run in ((fleet, optimizer, local), (other, its_optimizer, its_local)):
        go(one, steps, 6)
        run.finish()
    assert torch.equal(fleet.rows, other.rows)


def test_bad_input() -> None:
    for bad, message in (
        ({"lr": 0}, "lr must be a finite number > 0, got 0"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"of": prsgd.outer()}, r"of must be a mean\(\), got outer"),
    ):
        with pytest.raises(ValueError, match=message):
            prsgd.outer(**bad)


def test_the_named_methods_have_their_published_numbers() -> None:
    given = methods.Settings(period=8, lr=0.1, seconds=1.0, weights="uniform")
    assert methods.find("diloco").build(given).averaging == prsgd.outer(0.7, 0.9, True)
    assert methods.find("slowmo").build(given).averaging == prsgd.outer(1.0, 0.7, False, True)
