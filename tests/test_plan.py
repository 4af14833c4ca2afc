"""Plans: costs by hand, the choice against an exhaustive search, the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prsgd import units
from prsgd.cli import main
from prsgd.comm.links import Link
from prsgd.theory.bounds import Problem, gradient_bound
from prsgd.theory.plan import best_lr, make_plan
from prsgd.theory.seen import LOST

LAN = Link(bytes_per_second=125e6)
PROBLEM = Problem(smoothness=10.0, noise=1.0, grad_second_moment=4.0, gap=2.3)
sizes = st.floats(1e-2, 1e2)


LENGTHS = Path(__file__).parent.parent / "docs" / "results" / "length.json"


def test_costs_by_hand() -> None:
    """100 MB among 4 at 125 MB/s: 2 * 3/4 * 0.8 s = 1.2 s an average, 150 MB sent; a step takes 0.5 s."""
    plan = make_plan(workers=4, steps=1000, model_bytes=10**8, step_seconds=0.5, link=LAN, overlaps=(0, 1, 2, 4))
    blocking = plan.option(period=8)
    assert blocking.seconds == pytest.approx(1000 * 0.5 + 125 * 1.2)
    assert (blocking.rounds, blocking.bytes_sent) == (125, 125 * 150_000_000)
    assert plan.option(8, 1).seconds == pytest.approx(1000 * 0.5 + 125 * 0.7)
    assert plan.option(8, 2).seconds == pytest.approx(1000 * 0.5 + 125 * 0.2)
    assert plan.option(8, 4).seconds == pytest.approx(1000 * 0.5)  # wholly hidden
    assert plan.option(512).rounds == 2
    assert plan.option(512).seconds == pytest.approx(500 + 2 * 1.2)  # whole averages
    assert (2, 4) not in {(o.period, o.overlap) for o in plan.options}  # no more overlap than the period
    server = Link(bytes_per_second=125e6, latency_seconds=0.1, shape="parameter-server")
    assert server.average_seconds(10**8, workers=4) == pytest.approx(6 * 0.8 + 0.2)
    assert server.bytes_sent(10**8, workers=4) == 10**8
    tree = Link(bytes_per_second=125e6, latency_seconds=0.1, shape="tree")
    assert tree.average_seconds(10**8, workers=4) == pytest.approx(4 * 0.9)  # two turns up, two down
    assert tree.average_seconds(10**8, workers=5) == pytest.approx(6 * 0.9)
    slow = Link(bytes_per_second=125e6, latency_seconds=0.1)
    assert slow.average_seconds(10**8, workers=4) == pytest.approx(1.2 + 0.6)
    assert slow.average_seconds(10**8, workers=1) == 0


def test_the_guarantee_of_the_papers_set_up() -> None:
    ten = make_plan(workers=8, steps=1950, model_bytes=1_080_000, step_seconds=0.15, link=LAN)
    assert (ten.guaranteed_period, ten.is_vacuous) == (1, True)
    assert (ten.next_period, ten.next_period_steps) == (2, 8192)
    assert ten.reasons[-1] == "At overlap 1 Corollary 1 covers period 1 only; period 2 would need 8,192 steps."
    full = make_plan(workers=8, steps=58_500, model_bytes=1_080_000, step_seconds=0.15, link=LAN)
    assert (full.guaranteed_period, full.is_vacuous) == (3, False)
    assert full.chosen.guaranteed
    assert not full.option(4, 1).guaranteed
    assert full.option(4, 0).guaranteed  # I + d - 1 = 3
    none = make_plan(workers=8, steps=4, model_bytes=1_080_000, step_seconds=0.15, link=LAN)
    assert none.guaranteed_period == 0
    assert {option.period for option in none.options} == {1, 2, 4}  # longer ones would never average


def test_the_fastest_guaranteed_is_among_the_options() -> None:
    """I + d - 1 <= (288,000 / 512)^(1/4) = 4.87: period 5 with overlap 0, though it is no power of two."""
    plan = make_plan(workers=8, steps=288_000, model_bytes=10**8, step_seconds=0.1, link=LAN)
    assert (plan.chosen.period, plan.chosen.overlap) == (5, 0)


@given(st.builds(Problem, smoothness=sizes, noise=sizes, grad_second_moment=sizes, gap=sizes), st.integers(1, 64),
       st.integers(1, 10**5), st.integers(1, 100), st.integers(0, 1))  # fmt: skip
def test_no_other_lr_is_better(problem: Problem, workers: int, steps: int, period: int, overlap: int) -> None:
    def total(lr: float) -> float:
        return gradient_bound(problem, workers=workers, steps=steps, lr=lr, period=period, overlap=overlap).total

    lr = best_lr(problem, workers=workers, steps=steps, period=period, overlap=overlap)
    assert 0 < lr <= 1 / problem.smoothness
    for other in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        if lr * other <= 1 / problem.smoothness:
            assert total(lr) <= total(lr * other) * (1 + 1e-9)


@pytest.mark.parametrize("hours", [0.1, 1.0, 30.0])
def test_the_choice_minimises_the_bound_within_the_budget(hours: float) -> None:
    budget = 3600 * hours
    link = Link(bytes_per_second=12.5e6)
    plan = make_plan(workers=8, model_bytes=10**8, step_seconds=0.1, link=link, problem=PROBLEM, budget_seconds=budget)
    wait = {d: max(0.0, link.average_seconds(10**8, workers=8) - d * 0.1) for d in (0, 1, 4)}
    best = math.inf
    for option in plan.options:

        def seconds(steps: int, period: int = option.period, overlap: int = option.overlap) -> float:
            return steps * 0.1 + math.ceil(steps / period) * wait[overlap]

        steps = option.steps
        assert seconds(steps) <= budget * (1 + 1e-9) < seconds(steps + 1) * (1 + 1e-9)  # no other number fits better
        assert option.seconds == pytest.approx(seconds(steps))
        for lr in (0.1 * 0.9**k for k in range(120)):
            bound = gradient_bound(PROBLEM, workers=8, steps=steps, lr=lr, period=option.period, overlap=option.overlap)
            best = min(best, bound.total)
    assert plan.chosen.bound is not None
    assert plan.chosen.bound.total <= best * 1.001
    assert plan.chosen.bound.total >= best * 0.99


def test_on_a_slow_link_fewer_averages_win() -> None:
    """Theorem 1 itself prefers longer rounds when averages are dear and the noise is large."""
    noisy = Problem(smoothness=1.0, noise=100.0, grad_second_moment=100.0, gap=10.0)
    chosen = []
    for rate in (1e12, 1e6):
        plan = make_plan(
            workers=4, model_bytes=10**8, step_seconds=0.1, link=Link(rate), problem=noisy,
            budget_seconds=1e6, overlaps=(0,),
        )  # fmt: skip
        chosen.append(plan.chosen.period)
    assert chosen[0] == 1
    assert chosen[1] > 1


def test_a_budget_changes_the_plan_also_without_constants(capsys: pytest.CaptureFixture[str]) -> None:
    """25M at 1 Gbit/s: 1.4 s an average among 8; in 8 h of 0.1 s steps, period 4 takes 28,800 / 0.45 steps."""
    how = {"workers": 8, "model_bytes": 10**8, "step_seconds": 0.1, "link": LAN}
    free = make_plan(**how, steps=100_000)  # type: ignore[arg-type]
    tight = make_plan(**how, budget_seconds=8 * 3600.0)  # type: ignore[arg-type]
    assert (free.option(4).steps, tight.option(4).steps) == (100_000, 64_000)
    assert all(option.steps == 100_000 for option in free.options)
    assert tight.option(8, 4).steps == 128_000  # 1.0 s waited for in 8 steps
    assert main(["plan", "--workers", "8", "--budget", "8h"]) == 0
    shown = capsys.readouterr().out
    assert "8 workers, each row a run of 8 h 00 min" in shown
    assert "64,000*<" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_what_make_plan_refuses() -> None:
    how = {"workers": 8, "steps": 1000, "model_bytes": 10**8, "step_seconds": 0.1, "link": LAN}
    for change, message in (
        ({"periods": (0,)}, "periods must be a whole number >= 1, got 0"),
        ({"periods": (2,), "overlaps": (5,)}, r"overlaps must have one that is at most a period \(2\), got \[5\]"),
        ({"steps": None, "budget_seconds": 0.01}, "the budget must hold a step and an average, got 0.01 seconds"),
        ({"budget_seconds": 100.0}, "steps and budget_seconds are two ways to say how long: give one of them"),
    ):
        with pytest.raises(ValueError, match=message):
            make_plan(**{**how, **change})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no option with period 5 and overlap 0"):
        make_plan(**how).option(5)  # type: ignore[arg-type]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", "--workers", "8", "--steps", "100000", "--bandwidth", "1Gbit"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "assumed: parameters 25M" in shown
    assert "Period 4 with overlap 0 is the fastest that Corollary 1 covers; waiting" in shown
    paper = ["plan", "--workers", "8", "--epochs", "10", "--samples", "50000", "--parameters", "270k"]
    assert main([*paper, "--json", "--plot", str(tmp_path / "p.png")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], found["guaranteed_period"], found["is_vacuous"]) == (1950, 1, True)
    assert (tmp_path / "p.png").stat().st_size > 5000
    assert main(paper) == 0
    empirical = " ".join(capsys.readouterr().out.split("\n\n")[-1].split())
    assert empirical.startswith("From our own runs, not from the theorems (ResNet-8 on CIFAR-10 at 16x16, 8 workers")
    assert "1,950 steps are nearest to yours): period 4 lost 2.5 points" in empirical
    assert "`--method pr-sgd-auto`, finds the period" in empirical
    assert found["empirical"]["points_lost"]["32"] == LOST[1950][32]
    huge = [
        "--workers",
        "64",
        "--steps",
        "100k",
        "--parameters",
        "7000M",
        "--step-time",
        "1s",
        "--bandwidth",
        "100Mbit",
    ]
    assert main(["plan", *huge]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: --workers"),
        (["--workers", "8"], "how long? give --steps, or --epochs with --samples, or --budget"),
        (["--workers", "0", "--steps", "9"], "workers must be a whole number >= 1, got 0"),
        (["--workers", "8", "--steps", "0"], "steps must be a whole number >= 1 such as 270000 or 25M, got '0'"),
        (["--workers", "8", "--steps", "9", "--epochs", "3"], "ways to say how long: give one"),
        (["--workers", "8", "--steps", "9", "--budget", "8h"], "ways to say how long: give one of them"),
        (
            [
                "--workers",
                "8",
                "--steps",
                "9",
                "--smoothness",
                "2",
                "--noise",
                "1",
                "--second-moment",
                "0.5",
                "--gap",
                "1",
            ],
            "second_moment must be at least the noise, which is a part of it: got 0.5 and 1",
        ),
        (["--workers", "8", "--epochs", "3", "--samples", "9"], "samples must be at least workers x batch_size, got 9"),
        (["--workers", "8", "--steps", "9", "--bandwidth", "fast"], "bandwidth must be a number with a unit such as"),
        (["--workers", "8", "--steps", "9", "--bandwidth", "0Gbit"], "bandwidth must be above 0, got '0Gbit'"),
        (["--workers", "8", "--steps", "9", "--latency", "3"], "latency must be a time with a unit such as"),
        (["--workers", "8", "--steps", "9", "--parameters", "1.5"], "parameters must be a whole number >= 1 such as"),
        (["--workers", "8", "--steps", "9", "--gap", "1"], "constants; missing: --smoothness, --noise, --second"),
        (
            ["--workers", "8", "--steps", "9", "--shape", "rng"],
            "shape must be one of 'ring', 'tree', 'param",
        ),
        (["--workers", "8", "--budget", "1ms"], "the budget must hold a step and an average"),
        (["--workers", "8", "--steps", "9", "--probe", "/nowhere.json"], "/nowhere.json: No such file or directory"),
        (["--workers", "8", "--steps", "9", "--probe", __file__], "not what `prsgd probe --json` prints"),
        (["--workers", "8", "--steps", "9", "--plot", "/nowhere/p.png"], "plot cannot be written: /nowhere/p.png"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["plan", *args])
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_cluster_gives_step_time_and_link(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = []
    for more in (["--cluster", "wan"], ["--step-time", "20ms", "--bandwidth", "100Mbit", "--latency", "50ms"]):
        assert main(["plan", "--workers", "8", "--steps", "9000", "--parameters", "1M", "--json", *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    (tmp_path / "c.toml").write_text('step_time = "20ms"\nbandwidth = "1Gbit"\nspeeds = [1, 2]\n')
    with pytest.raises(SystemExit):
        main(["plan", "--workers", "8", "--steps", "9000", "--cluster", str(tmp_path / "c.toml")])
    assert "speeds must have one entry per worker: 8 workers, got 2" in capsys.readouterr().err


def test_units() -> None:
    assert units.bytes_per_second("b", "1GB/s") == 1e9
    assert units.bytes_per_second("b", "2.5 Gbit/s") == 312.5e6
    assert units.seconds("t", "1.5h") == 5400
    assert units.count("n", "0.27M") == 270_000
    assert units.count("n", "2.01M") == 2_010_000
    for bad in ("1", "1 parsec", "-5ms", "nanms", ""):
        with pytest.raises(ValueError, match="t must be"):
            units.seconds("t", bad)
    for bad in ("1Gb", "1", "Gbit", "-1Gbit", "infGbit"):
        with pytest.raises(ValueError, match="b must be"):
            units.bytes_per_second("b", bad)


@pytest.mark.parametrize("how", [["--steps", "1000T"], ["--budget", "1e12s"], ["--steps", "1"]], ids=" ".join)
@pytest.mark.parametrize("constants", [(), ("1e30",) * 4, ("1e-30", "0", "0", "0"), ("1e-30", "1e30", "1e30", "1e30")])
def test_plans_at_the_limits_are_made_and_fit_a_terminal(
    how: list[str], constants: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ("--smoothness", "--noise", "--second-moment", "--gap")
    given = [word for pair in zip(names, constants) for word in pair]
    for cost in (
        ["--parameters", "1000T", "--bandwidth", "1Gbit", "--latency", "1s", "--step-time", "1e-12ms"],
        ["--parameters", "1", "--bandwidth", "1e18B/s", "--step-time", "1e10s"],
    ):
        assert main(["plan", "--workers", "1000000", *how, *cost, *given, "--plot", str(tmp_path / "p.svg")]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        assert "< chosen" in shown.out
        assert all(len(line) <= 80 for line in shown.out.splitlines())


def test_what_our_own_runs_lost_is_what_the_page_has() -> None:
    rows = [row for row in json.loads(LENGTHS.read_text()) if row["model"] == "resnet8" and row["method"] == "pr-sgd"]
    baseline = {(row["epochs"], row["seed"]): row["test_accuracy"] for row in rows if row["period"] == 1}
    lost: dict[int, dict[int, list[float]]] = {}
    for row in rows:
        if row["period"] > 1:
            points = 100 * (baseline[row["epochs"], row["seed"]] - row["test_accuracy"])
            lost.setdefault(row["steps"], {}).setdefault(row["period"], []).append(points)
    found = {steps: {period: fmean(seeds) for period, seeds in by.items()} for steps, by in lost.items()}
    assert found.keys() == LOST.keys()
    for steps, by in LOST.items():
        assert by == {period: pytest.approx(points, abs=0.051) for period, points in found[steps].items()}
