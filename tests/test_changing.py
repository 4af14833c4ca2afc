"""Rounds that change while a model trains: post-local SGD and the Quadratic Synchronization Rule, by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import prsgd
from prsgd.cli import main
from prsgd.cli.compare import variants
from prsgd.lab import methods
from prsgd.lab.checks import check
from prsgd.lab.config import Config, lr_at
from prsgd.lab.run import run
from prsgd.report.read import read
from prsgd.schedules.changing import LONGEST
from tests.problems import Point, itself, train_model, walk
from tests.ranks import run_ranks

HALVES = [0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.25]


def follow(lrs: Sequence[float], schedule: prsgd.Schedule, overlap: int) -> tuple[list[list[float]], prsgd.LocalSGD]:
    """Two workers, towards 0 and 4 from 0, by an lr that is set before each step."""
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=lrs[0])
    path = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=schedule, overlap=overlap) as local:
        for lr in lrs:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
            optimizer.step()
            path.append(fleet.rows[:, 0].tolist())
    return [*path, fleet.rows[:, 0].tolist()], local


# Trajectories worked by hand; all numbers are sums of powers of two, and exact.


def test_post_local_blocking() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.post_local(2, 2), steps=5)
    # 0 -> 0; 0 -> 2: mean 1.  1 -> 1/2; 1 -> 5/2: mean 3/2.  Then two steps: 3/2 -> 3/4, 3/8; 3/2 -> 11/4, 27/8: 15/8.
    assert path == [[1, 1], [1.5, 1.5], [0.75, 2.75], [1.875, 1.875], [0.9375, 2.9375], [1.9375, 1.9375]]
    assert [(r.step, r.period) for r in local.records] == [(1, 1), (2, 1), (4, 2), (5, 1)]


def test_post_local_overlap_1() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.post_local(2, 2), overlap=1, steps=4)
    # t=1 lands the start's mean 0; gradients (0, -4): (0, 2).  t=2 lands 1; gradients at (0, 2) are (0, -2): (1, 2).
    # A round of two: t=3 has gradients (1, -2): (1/2, 3).  t=4 lands 7/4; gradients (1/2, -1): (3/2, 9/4).
    assert path == [[0, 2], [1, 2], [0.5, 3], [1.5, 2.25], [1.875, 1.875]]
    assert [(r.step, r.overlap) for r in local.records] == [(1, 1), (2, 1), (4, 1), (4, 0)]


def test_quadratic_blocking() -> None:
    path, local = follow(HALVES, prsgd.quadratic(0.5, 1), 0)
    # (alpha / lr)^2 is 1, and 4 from the round on that opens after a step at lr 1/4. 0 -> (0, 2): 1.  1 -> (1/2, 5/2):
    # 3/2.  At 1/4: 3/2 -> (9/8, 17/8): 13/8.  Four steps: 13/8 (3/4)^k and 4 - 19/8 (3/4)^k.
    apart = [[1.625 * 0.75**k, 4 - 2.375 * 0.75**k] for k in (1, 2, 3)]
    mean = (1.625 * 0.75**4 + 4 - 2.375 * 0.75**4) / 2
    ends = [[0.75 * mean, 0.75 * mean + 1], [0.75 * mean + 0.5] * 2]
    assert path == [[1, 1], [1.5, 1.5], [1.625, 1.625], *apart, [mean, mean], *ends]
    assert [(r.step, r.period, r.lr) for r in local.records] == [
        (1, 1, 0.5), (2, 1, 0.5), (3, 1, 0.25), (7, 4, 0.25), (8, 1, 0.25),
    ]  # fmt: skip


def test_quadratic_overlap_1() -> None:
    path, local = follow(HALVES, prsgd.quadratic(0.5, 2), 1)
    # Rounds of base 2 at lr 1/2: t=1 (0, 2), mean 1.  t=2: gradients (0, -2): (1, 2).  That round's successor opened at
    # 1/2 too: t=3, at 1/4: (3/4, 5/2), mean 13/8.  t=4: gradients (3/4, -3/2): (23/16, 2).  Now one of 4, closed after
    # 3: (23/16 (3/4)^3, 4 - 2 (3/4)^3), whose gradients lead in t=8 from its mean.
    first, second = 1.4375 * 0.75**3, 4 - 2 * 0.75**3
    mean = (first + second) / 2
    last = [mean - first / 4, mean - (second - 4) / 4]
    assert path[:4] == [[0, 2], [1, 2], [0.75, 2.5], [1.4375, 2]]
    assert path[6:] == [[first, second], last, [sum(last) / 2] * 2]
    assert [(r.step, r.overlap) for r in local.records] == [(2, 1), (4, 1), (8, 1), (8, 0)]


# Where averages land


@pytest.mark.parametrize("overlap", [0, 1, 2, 5])
@pytest.mark.parametrize(("switch", "period"), [(1, 1), (1, 4), (3, 4), (5, 3), (40, 2)])
def test_post_local_lands_at_every_step_and_then_every_period(switch: int, period: int, overlap: int) -> None:
    _, local = walk([0.0, 4.0], schedule=prsgd.post_local(switch, period), overlap=overlap, steps=17)
    wanted = [*range(1, min(switch, 17) + 1), *range(switch + period, 18, period)]
    landed = local.records[: len(wanted)]
    assert [r.step for r in landed] == wanted
    assert [r.overlap for r in landed] == [min(overlap, 1 if step <= switch else period) for step in wanted]


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_quadratic_lands_where_its_rounds_end(overlap: int) -> None:
    """Rounds of 2 at lr 1/2, of 4 at 1/4 and of 16 at 1/8; each goes by the lr of the step before it opened."""
    lrs = [0.5] * 4 + [0.25] * 7 + [0.125] * 20
    _, local = follow(lrs, prsgd.quadratic(0.5, 2), overlap)
    assert [(r.step, r.overlap) for r in local.records[:5]] == [
        (step, min(overlap, length)) for step, length in ((2, 2), (4, 2), (6, 2), (10, 4), (14, 4))
    ]
    assert [r.step for r in local.records[5:6]] == [30]


def steps_of(schedule: prsgd.Schedule, lr: float) -> int | None:
    return schedule.open(prsgd.Now(worker=0, num_workers=2, round=9, step=100, lr=lr, last=None)).steps


@given(st.floats(1e-6, 10), st.integers(1, 1000))
def test_rounding_costs_no_step(lr: float, factor: int) -> None:
    assert steps_of(prsgd.quadratic(lr, 1), lr / factor) == factor**2
    assert steps_of(prsgd.quadratic(lr, 8), lr / factor) == max(8, factor**2)


def test_the_floor_is_a_floor() -> None:
    assert [steps_of(prsgd.quadratic(0.1, 1), lr) for lr in (1.0, 0.1, 0.06, 0.0578, 0.0577)] == [1, 1, 2, 2, 3]


@pytest.mark.parametrize("lr", [0.0, 5e-324, 1e-300, 1e-8, -1.0, math.nan])
@pytest.mark.parametrize("alpha", [0.1, 1e308])
def test_an_lr_of_nearly_0_makes_a_round_that_the_run_ends(lr: float, alpha: float) -> None:
    assert steps_of(prsgd.quadratic(alpha, 8), lr) == LONGEST
    assert steps_of(prsgd.quadratic(alpha, 2 * LONGEST), lr) == 2 * LONGEST


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_run_whose_lr_has_come_to_0(overlap: int) -> None:
    path, local = follow([0.5, 0.5, 0.0, 0.0, 0.0, 0.0], prsgd.quadratic(0.5, 1), overlap)
    assert [r.step for r in local.records if r.period > 0] == [1, 2, 3, 6]  # one long round, until the run ends
    assert path[-1][0] == path[-1][1]


def test_a_warm_up_has_the_base_period() -> None:
    """Else the round that opens at lr 0 would last to the end of the run."""
    lrs = [0.0, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25]
    _, local = follow(lrs, prsgd.quadratic(0.5, 2, warmup=4), 0)
    assert [r.step for r in local.records] == [2, 4, 6, 8, 12]  # the round after step 4 opens at lr 3/8
    _, local = follow(lrs, prsgd.quadratic(0.5, 2), 0)
    assert [r.step for r in local.records] == [12]


def other_lr(rank: int) -> tuple[torch.Tensor, list[int]]:
    end, local, _ = train_model(rank, 9, schedule=prsgd.quadratic(0.2, 1), lr=(0.2, 0.1)[rank])
    return end, [record.step for record in local.records]


def test_workers_with_other_lrs_meet_by_round() -> None:
    """Rounds of 1 step and of 4: nobody hangs, and all end with one model."""
    (one, fast), (other, slow) = run_ranks(other_lr, 2)
    assert torch.equal(one, other)
    assert (fast[:2], slow[:2]) == ([1, 2], [4, 8])


# Bad arguments


@pytest.mark.parametrize("value", [0, -3, 1.5, 0.5, "8", None, True, math.nan])
def test_whole_numbers(value: Any) -> None:
    told = re.escape(repr(value))
    for name, make in (
        ("switch", lambda: prsgd.post_local(value, 4)),
        ("period", lambda: prsgd.post_local(4, value)),
        ("base", lambda: prsgd.quadratic(0.1, value)),
    ):
        with pytest.raises(ValueError, match=rf"^{name} must be a whole number >= 1, got {told}$"):
            make()
    if value != 0:
        with pytest.raises(ValueError, match=rf"^warmup must be a whole number >= 0, got {told}$"):
            prsgd.quadratic(0.1, 4, value)


@pytest.mark.parametrize("alpha", [0, 0.0, -0.1, math.nan, math.inf, "1", None, True])
def test_alpha(alpha: Any) -> None:
    with pytest.raises(ValueError, match=rf"^alpha must be a finite number > 0, got {re.escape(repr(alpha))}$"):
        prsgd.quadratic(alpha, 8)


@pytest.mark.parametrize("switch", [0, -1, 0.0, 1.0, 1.5, -0.5, math.nan, math.inf, True, "8"])
def test_switch_of_a_config(switch: Any) -> None:
    message = "^switch must be a whole number of steps >= 1, or a fraction of the run between 0 and 1, got "
    with pytest.raises(ValueError, match=message + re.escape(repr(switch))):
        Config(method="post-local", switch=switch).resolve()


def test_switch_of_methods_without_one() -> None:
    with pytest.raises(ValueError, match=r"^method pr-sgd has no switch, got 3$"):
        Config(switch=3).resolve()
    with pytest.raises(ValueError, match=r"^method pr-sgd and qsr has no switch, got 3$"):
        variants({"method": ["pr-sgd", "qsr"], "switch": 3, "seeds": [1]})
    found = variants({"method": ["minibatch-sgd", "post-local"], "switch": 0.3, "seeds": [1]})
    assert [(c.method, c.switch) for c in found] == [("minibatch-sgd", None), ("post-local", 0.3)]


@pytest.mark.parametrize("length", [{"steps": 22}, {"epochs": 1}])
def test_a_switch_after_the_end_of_the_run(length: dict[str, int]) -> None:
    check(Config(method="post-local", switch=22, **length).resolve())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^switch must be at most the run's 22 steps, got 23$"):
        check(Config(method="post-local", switch=23, **length).resolve())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--method", "post-local", "--epochs", "1", "--switch", "23"], "at most the run's 22 steps, got 23"),
        (
            ["compare", "--method", "post-local", "--epochs", "1", "--switch", "23"],
            "at most the run's 22 steps, got 23",
        ),
        (["train", "--method", "post-local", "--switch", "0"], "switch must be a whole number of steps >= 1, or a"),
        (["train", "--method", "post-local", "--switch", "x"], "argument --switch: must be a number, got 'x'"),
        (["train", "--method", "post-local", "--period", "0"], "period must be a whole number >= 1, got 0"),
        (["train", "--method", "qsr", "--period", "0"], "period must be a whole number >= 1, got 0"),
        (["train", "--method", "qsr", "--lr", "nan"], "lr must be a finite number > 0, got nan"),
        (["train", "--method", "qsr", "--switch", "3"], "method qsr has no switch, got 3"),
    ],
)
def test_one_line_and_exit_2(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(args)
    told = capsys.readouterr().err
    assert (error.value.code, told.count("\n")) == (2, 1)
    assert message in told


# The methods


@pytest.mark.parametrize(("switch", "step"), [(None, 13), (0.5, 13), (0.9, 23), (1e-9, 1), (1, 1), (25, 25)])
def test_the_switch_of_a_run(switch: float | None, step: int) -> None:
    parts = Config(method="post-local", period=4, switch=switch).resolve().parts(25)
    assert parts.schedule == prsgd.post_local(step, 4)


def test_the_usual_switch_is_where_the_lr_first_drops() -> None:
    config = Config(method="post-local").resolve()
    for num_steps in (1, 2, 24, 25):
        schedule = config.parts(num_steps).schedule
        assert isinstance(schedule, prsgd.post_local)
        assert lr_at(config, schedule.switch - 1, num_steps) == 0.1
        assert lr_at(config, schedule.switch, num_steps) < 0.1


@pytest.mark.parametrize("period", [1, 8, 64])
@pytest.mark.parametrize("lr", [0.1, 0.3, 1e-30, 1e30])
def test_the_period_of_qsr_holds_until_the_lr_drops(lr: float, period: int) -> None:
    schedule = methods.find("qsr").build(methods.Settings(period=period, lr=lr)).schedule
    assert [steps_of(schedule, lr / drop) for drop in (1, 10, 100)] == [period, 100, 10_000]


def test_runs_of_the_lab(tmp_path: Path) -> None:
    landed = {}
    for name, more in {"post-local": {"switch": 5, "overlap": 1}, "qsr": {}}.items():
        config = Config(method=name, workers=4, steps=40, period=6, **more).resolve()  # type: ignore[arg-type]
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config.to_json())
        run(config, tmp_path / name)
        [made] = read([tmp_path / name])
        landed[name] = [average.step for average in made.averages]
    assert landed["post-local"] == [1, 2, 3, 4, 5, 11, 17, 23, 29, 35, 40]  # an evaluation, after 22, is no average
    assert landed["qsr"] == [6, 12, 18, 24, 40]  # the lr drops after 20, within the round that ends at 24
