"""Extreme and nonsensical invocations of every command: one line, exit code 2, and nothing is left behind."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest

from prsgd.cli import main
from prsgd.lab.config import Config
from prsgd.lab.folder import prepare
from prsgd.records import Summary
from prsgd.theory.bounds import Problem
from tests.test_report import average_line, evaluation_line, make_run

PLAN = ["plan", "--workers", "8", "--steps", "9000"]
EPOCHS = ["plan", "--workers", "8", "--epochs", "10", "--samples", "50k"]
CONSTANTS = {"--smoothness": "2", "--noise": "1", "--second-moment": "4", "--gap": "1"}
HUGE = "99999999999999999999"
LONG = "1" + "0" * 400


def named(value: object) -> str:
    """A parameter in a test's name."""
    return (" ".join(map(str, value)) if isinstance(value, list) else str(value))[:60]


def constants(**changed: str) -> list[str]:
    """A plan with all four of them."""
    given = CONSTANTS | {f"--{name.replace('_', '-')}": value for name, value in changed.items()}
    return [*PLAN, *(word for pair in given.items() for word in pair)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with files that are not what a command wants."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("years of work")
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0" + bytes(range(256)))
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "deep.toml").write_text("workers = " + "[" * 100_000)
    (tmp_path / "long.toml").write_text("workers = " + "9" * 5000)
    (tmp_path / "deep.json").write_text("[" * 100_000)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything_in(folder: Path) -> list[tuple[Path, bytes]]:
    return [(path, b"" if path.is_dir() else path.read_bytes()) for path in sorted(folder.rglob("*"))]


def refused(args: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that a command says before it exits with 2, having changed nothing."""
    before = everything_in(place)
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    out, said = capsys.readouterr()
    assert out == ""
    [line] = [line for line in said.splitlines() if not line.startswith(("reading", "fetching"))]
    assert len(line) < 400
    assert everything_in(place) == before
    return line


BAD = [
    # plan: how long and how many
    (["plan", "--workers", HUGE, "--steps", "9"], f"workers must be at most 1,000,000, got {HUGE}"),
    (["plan", "--workers", LONG, "--steps", "9"], "workers must be at most 1,000,000, got 1000"),
    (["plan", "--workers", "-1", "--steps", "9"], "workers must be a whole number >= 1, got -1"),
    (["plan", "--workers", "1.5", "--steps", "9"], "argument --workers: must be a whole number, got '1.5'"),
    (["plan", "--workers", "nan", "--steps", "9"], "argument --workers: must be a whole number, got 'nan'"),
    (["plan", "--workers", "", "--steps", "9"], "argument --workers: must be a whole number, got ''"),
    (["plan", "--workers", HUGE, "--steps", "9", "--cluster", "wan"], "workers must be at most 1,000,000, got"),
    (["plan", "--workers", "8", "--steps", "1e308"], "steps must be at most 1,000T, got '1e308'"),
    (["plan", "--workers", "8", "--steps", "1e20T"], "steps must be at most 1,000T, got '1e20T'"),
    (["plan", "--workers", "8", "--steps", "1e309"], "steps must be a whole number >= 1 such as 270000 or 25M"),
    (["plan", "--workers", "8", "--steps", ""], "steps must be a whole number >= 1 such as 270000 or 25M, got ''"),
    (["plan", "--workers", "8", "--steps", "-5"], "steps must be a whole number >= 1 such as 270000 or 25M, got '-5'"),
    (["plan", "--workers", "8", "--steps", "-inf"], "steps must be a whole number >= 1 such as 270000 or 25M"),
    (["plan", "--workers", "8", "--epochs", HUGE, "--samples", "50k"], "epochs must be at most"),
    (["plan", "--workers", "8", "--epochs", LONG, "--samples", "50k"], "epochs must be at most"),
    (["plan", "--workers", "8", "--epochs", "1000000000", "--samples", "1000T"], "epochs x samples must make at most"),
    (["plan", "--workers", "8", "--epochs", "10", "--samples", "1e308"], "samples must be at most 1,000T"),
    ([*EPOCHS, "--batch-size", "0"], "batch_size must be a whole number >= 1, got 0"),
    ([*EPOCHS, "--batch-size", "-3"], "batch_size must be a whole number >= 1, got -3"),
    ([*EPOCHS, "--batch-size", HUGE], "samples must be at least workers x batch_size, got 50k"),
    ([*PLAN, "--batch-size", "0"], "batch_size must be a whole number >= 1, got 0"),
    ([*PLAN, "--samples", "50k"], "ways to say how long: give one of them"),
    (["plan", "--workers", "8", "--budget", "1e300d"], "budget must be at most 1e+12 seconds, got '1e300d'"),
    (["plan", "--workers", "8", "--budget", "-8h"], "budget must be above 0, got '-8h'"),
    (["plan", "--workers", "8", "--budget", "0s"], "budget must be above 0, got '0s'"),
    (["plan", "--workers", "8", "--budget", ""], "budget must be a time with a unit such as 50ms, 20s or 8h, got ''"),
    # plan: what it costs
    ([*PLAN, "--parameters", "1e308T"], "parameters must be at most 1,000T, got '1e308T'"),
    ([*PLAN, "--parameters", "1e308"], "parameters must be at most 1,000T, got '1e308'"),
    ([*PLAN, "--parameters", LONG], "parameters must be a whole number >= 1 such as 270000 or 25M, got '1000"),
    ([*PLAN, "--parameters", ""], "parameters must be a whole number >= 1 such as 270000 or 25M, got ''"),
    ([*PLAN, "--parameters", "0"], "parameters must be a whole number >= 1 such as 270000 or 25M, got '0'"),
    ([*PLAN, "--bandwidth", "1e-320bit"], "bandwidth must be from 1bit to 1e18B/s, got '1e-320bit'"),
    ([*PLAN, "--bandwidth", "1e308Tbit"], "bandwidth must be from 1bit to 1e18B/s, got '1e308Tbit'"),
    ([*PLAN, "--bandwidth", "-1Gbit"], "bandwidth must be above 0, got '-1Gbit'"),
    ([*PLAN, "--bandwidth", ""], "bandwidth must be a number with a unit such as 1Gbit or 125MB/s, got ''"),
    ([*PLAN, "--bandwidth", "1parsec"], "bandwidth must be a number with a unit such as 1Gbit or 125MB/s"),
    ([*PLAN, "--latency", "1e300d"], "latency must be at most 1e+12 seconds, got '1e300d'"),
    ([*PLAN, "--latency", "-1ms"], "latency must be at least 0, got '-1ms'"),
    ([*PLAN, "--latency", "nanms"], "latency must be a time with a unit such as 50ms, 20s or 8h, got 'nanms'"),
    ([*PLAN, "--step-time", "0ms"], "step_time must be above 0, got '0ms'"),
    ([*PLAN, "--step-time", "1e-320ms"], "step_time must be at least 1e-15 seconds, got '1e-320ms'"),
    ([*PLAN, "--step-time", "1e308s"], "step_time must be at most 1e+12 seconds, got '1e308s'"),
    ([*PLAN, "--shape", ""], "shape must be one of 'ring', 'tree', 'parameter-server', got ''"),
    ([*PLAN, "--cluster", ""], "cluster must be a file or one of lan-1g"),
    ([*PLAN, "--cluster", "folder"], "cluster must be a file or one of lan-1g"),
    ([*PLAN, "--cluster", "binary"], "binary: 'utf-8' codec can't decode"),
    ([*PLAN, "--cluster", "deep.toml"], "deep.toml: nested too deeply"),
    # plan: the constants
    (constants(smoothness="1e308"), "smoothness must be a number from 1e-30 to 1e+30, got 1e+308"),
    (constants(smoothness="1e-320"), "smoothness must be a number from 1e-30 to 1e+30, got 1e-320"),
    (constants(smoothness="0"), "smoothness must be a number from 1e-30 to 1e+30, got 0.0"),
    (constants(smoothness="inf"), "smoothness must be a number from 1e-30 to 1e+30, got inf"),
    (constants(noise="nan"), "noise must be a number from 0 to 1e+30, got nan"),
    (constants(noise="-inf"), "noise must be a number from 0 to 1e+30, got -inf"),
    (constants(second_moment="1e308"), "second_moment must be a number from 0 to 1e+30, got 1e+308"),
    (constants(gap="1e308"), "gap must be a number from 0 to 1e+30, got 1e+308"),
    (constants(gap=""), "argument --gap: must be a number, got ''"),
    # plan: files
    ([*PLAN, "--probe", "folder"], "folder: Is a directory"),
    ([*PLAN, "--probe", "binary"], "binary: not what `prsgd probe --json` prints"),
    ([*PLAN, "--probe", "deep.json"], "deep.json: not what `prsgd probe --json` prints"),
    ([*PLAN, "--probe", ""], "argument --probe: must be a path, got ''"),
    ([*PLAN, "--plot", "folder"], "plot must be a file that ends in .png, .svg or .pdf, got 'folder'"),
    ([*PLAN, "--plot", "plan"], "plot must be a file that ends in .png, .svg or .pdf, got 'plan'"),
    ([*PLAN, "--plot", "plan.docx"], "plot must be a file that ends in .png, .svg or .pdf, got 'plan.docx'"),
    ([*PLAN, "--plot", ""], "argument --plot: must be a path, got ''"),
    ([*PLAN, "--plot", "text.txt/plan.png"], "plot cannot be written: text.txt/plan.png: Not a directory"),
    # train and compare
    (["train", "--epochs", "1000000000000000000"], "epochs must be at most 1,000,000,000,000, got 1000000000000000000"),
    (["train", "--epochs", "1000000000000"], "epochs must be at most 45,454,545,454 for 22 steps each, got 10000"),
    (["train", "--steps", HUGE], f"steps must be at most 1,000,000,000,000, got {HUGE}"),
    (["train", "--period", LONG], "period must be at most 1,000,000,000,000, got 1000"),
    (["train", "--period", HUGE, "--cluster", "wan"], "period must be at most 1,000,000,000,000, got"),
    (["train", "--overlap", HUGE], "overlap must be at most 1,000,000,000,000, got"),
    (["train", "--workers", HUGE], f"workers must be at most 10,000, got {HUGE}"),
    (["train", "--workers", HUGE, "--cluster", "mixed"], "workers must be at most 10,000, got"),
    (["train", "--workers", "1000000", "--method", "d-psgd"], "workers must be at most 10,000, got 1000000"),
    (["train", "--batch-size", "0"], "batch_size must be a whole number >= 1, got 0"),
    (["train", "--batch-size", HUGE], "batch_size must be at most"),
    (["train", "--processes", "0"], "processes must be a whole number >= 1, got 0"),
    (["train", "--workers", "1400", "--batch-size", "1", "--processes", "1300"], "processes must be at most 1,024"),
    (["train", "--seed", HUGE], f"seed must be below 2^63, got {HUGE}"),
    (["train", "--seed", "-1"], "seed must be a whole number >= 0, got -1"),
    (["train", "--lr", "1e308"], "lr must be at most 1e+30, got 1e+308"),
    (["train", "--lr", "-inf"], "lr must be a finite number > 0, got -inf"),
    (["train", "--lr", "x"], "argument --lr: must be a number, got 'x'"),
    (["train", "--weight-decay", "1e308"], "weight_decay must be in [0, 1e+30), got 1e+308"),
    (["train", "--method", "pr-sgd-timed", "--seconds", "nan"], "seconds must be a finite number > 0, got nan"),
    (["train", "--split", ""], "split must be pool, iid, era or dirichlet:ALPHA, got ''"),
    (["train", "--split", "dirichlet:1e309"], "split must have a finite number > 0 after dirichlet:"),
    (["train", "--task", ""], "task must be one of 'digits'"),
    (["train", "--cluster", ""], "cluster must be a file or one of lan-1g"),
    (["train", "--config", "folder"], "folder: Is a directory"),
    (["train", "--config", "binary"], "binary: 'utf-8' codec can't decode"),
    (["train", "--config", "deep.toml"], "deep.toml: nested too deeply"),
    (["train", "--config", "long.toml"], "long.toml: Exceeds the limit"),
    (["train", "--config", ""], "argument --config: must be a path, got ''"),
    (["train", "--out", ""], "argument --out: must be a path, got ''"),
    (["train", "--out", "text.txt"], "out must be a folder, text.txt is a file"),
    (["train", "--out", "text.txt/a"], "out cannot be written: text.txt/a: Not a directory"),
    (["train", "--out", "full", "--overwrite"], "full holds 'thesis.txt' and is no run of ours"),
    (["train", "--resume", "text.txt"], "text.txt"),
    (["train", "--resume", "full"], "full holds no run: it has no config.json"),
    (["compare", "--seeds", HUGE], f"seeds must be how many, from 1 to 1,000, or a list of seeds, got {HUGE}"),
    (["compare", "--seeds", LONG], "seeds must be how many, from 1 to 1,000, or a list of seeds, got 1000"),
    (["compare", "--seeds", "-3"], "seeds must be how many, from 1 to 1,000, or a list of seeds, got -3"),
    (["compare", "--seeds", "1", HUGE], f"seed must be below 2^63, got {HUGE}"),
    (["compare", "--seeds", "1", "-1"], "seed must be a whole number >= 0, got -1"),
    (["compare", "--jobs", "-1"], "jobs must be a whole number >= 1, got -1"),
    (["compare", "--period", "1", "0"], "period must be a whole number >= 1, got 0"),
    (["compare", "--epochs", "1000000000000"], "epochs must be at most 45,454,545,454 for 22 steps each"),
    # the others
    (["probe", "--looks", HUGE], f"looks must be at most 1,000, got {HUGE}"),
    (["probe", "--looks", "1"], "looks must be a whole number >= 2, got 1"),
    (["probe", "--steps", HUGE], "steps must be at most 1,000,000,000,000"),
    (["probe", "--steps", LONG], "steps must be at most 1,000,000,000,000"),
    (["probe", "--batch-size", "0"], "batch_size must be a whole number >= 1, got 0"),
    (["calibrate", "--steps", HUGE], "steps must be at most 1,000,000,000, got"),
    (["calibrate", "--processes", HUGE], f"processes must be at most 1,024, got {HUGE}"),
    (["calibrate", "--processes", "-2"], "processes must be a whole number >= 1, got -2"),
    (["calibrate", "--batch-size", "0"], "batch_size must be a whole number >= 1, got 0"),
    (["calibrate", "--out", "folder"], "out must be a file in a folder that is there, got folder"),
    (["calibrate", "--out", "nowhere/c.toml"], "out must be a file in a folder that is there, got nowhere/c.toml"),
    (["methods", "--workers", "0"], "workers must be a whole number >= 1, got 0"),
    (["methods", "--workers", HUGE], f"workers must be at most 1,000, got {HUGE}"),
    (["methods", ""], "method must be one of 'minibatch-sgd'"),
    (["verify", "--out", "text.txt"], "text.txt: File exists"),
    (["verify", "--out", ""], "argument --out: must be a path, got ''"),
    (["report", ""], "argument DIR: must be a path, got ''"),
    (["report", "text.txt"], "there is no folder text.txt"),
    (["report", "folder"], "folder must hold a config.json, itself or one level down, got folder"),
    (["timeline", "binary"], "there is no folder binary"),
    (["timeline", "folder", "--rounds", "0"], "rounds must be a whole number >= 1, got 0"),
    (["data", "get", "cifar10", "--from", "folder"], "folder cannot be read"),
    (["data", "get", "cifar10", "--from", "binary"], "binary cannot be read"),
    (["data", "get", "cifar10", "--from", "empty"], "empty cannot be read"),
    (["data", "get", "fashion-mnist", "--from", "text.txt"], "text.txt"),
    (["data", "get", "fashion-mnist", "--from", "folder"], "folder has no train-images-idx3-ubyte"),
    (["data", "get", "cifar10", "--from", ""], "argument --from: must be a path, got ''"),
    (["data", "path", ""], "data set must be one of 'cifar10', 'fashion-mnist', 'text', got ''"),
    (["data", "fetch"], "argument list|get|path: invalid choice: 'fetch'"),
    ([""], "unknown command ''"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=named)
def test_one_line_that_names_argument_value_and_what_is_allowed(
    args: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(args, place, capsys)


WHOLE = ["workers", "period", "overlap", "epochs", "steps", "batch-size", "processes"]
NUMBERS = ["lr", "momentum", "weight-decay", "seconds"]
TEXTS = ["task", "model", "split", "cluster", "weights"]


@pytest.mark.parametrize("value", ["true", '"8"', "1.5", "[[1]]", "{a = 1}", "1979-05-27"])
@pytest.mark.parametrize(
    ("command", "key", "named"),
    [(command, key, key) for key in WHOLE for command in ("train", "compare")]
    + [
        ("train", "seed", "seed"),
        ("train", "seeds", "seed"),
        ("compare", "seeds", "seed"),
        ("compare", "jobs", "jobs"),
    ],
)
def test_whole_numbers_in_a_file(
    command: str, key: str, named: str, value: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run.toml").write_text(f"{key} = {value}\n")
    assert f"{named.replace('-', '_')}" in refused([command, "--config", "run.toml"], place, capsys)


@pytest.mark.parametrize("value", ["true", '"8"', "[]", "nan", "inf", LONG, "1979-05-27"], ids=named)
@pytest.mark.parametrize("key", NUMBERS)
def test_numbers_in_a_file(key: str, value: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run.toml").write_text(f'{key} = {value}\nmethod = "pr-sgd-timed"\n')
    assert key.replace("-", "_") in refused(["train", "--config", "run.toml"], place, capsys)


def test_a_whole_number_may_stand_for_a_number() -> None:
    """A large one overflows where torch takes it for 64 bits."""
    config = Config.from_dict({"lr": 10**20, "momentum": 0, "weight_decay": 1}).resolve()
    assert (config.lr, config.momentum, config.weight_decay) == (1e20, 0.0, 1.0)
    assert {type(value) for value in (config.lr, config.momentum, config.weight_decay)} == {float}


@pytest.mark.parametrize(
    ("command", "content", "message"),
    [
        *(("train", f"{key} = true", f"{key} must be a text, got True") for key in TEXTS),
        ("train", "method = true", "method must be a text, got True"),
        ("compare", "method = true", "method must be one of 'minibatch-sgd'"),
        ("compare", 'method = ["all", 1]', "method all stands alone, got 'all', 1"),
        ("compare", "method = [[]]", "method must be one of 'minibatch-sgd'"),
        ("compare", "seeds = true", "seeds must be how many, from 1 to 1,000, or a list of seeds, got True"),
        ("compare", "seeds = [1, true]", "seed must be a whole number >= 0, got True"),
        ("compare", 'seeds = [1, "2"]', "seed must be a whole number >= 0, got '2'"),
        ("compare", "seeds = []", "seeds must have at least one value, got none"),
        ("compare", "workers = [2, 3]", "workers takes one value, got [2, 3]"),
        ("train", "out = 3", "out must be a text, got 3"),
        ("train", 'out = ""', "out must be a path, got ''"),
        ("train", r'out = "a\u0000b"', r"out must be a path, got 'a\x00b'"),
        ("train", "overwrite = 1", "overwrite must be true or false, got 1"),
        ("train", "[run]\nworkers = 3", "run.toml: unknown key 'run'"),
    ],
)  # fmt: skip
def test_other_things_in_a_file(
    command: str, content: str, message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run.toml").write_text(f"{content}\n")
    assert message in refused([command, "--config", "run.toml"], place, capsys)


CLUSTER = {"step_time": '"20ms"', "bandwidth": '"1Gbit"', "speeds": "[1, 1]"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step_time": '"1e-320ms"'}, "step_time must be"),
        ({"step_time": '"1e300d"'}, "step_time must be at most 1e+12 seconds, got '1e300d'"),
        ({"step_time": "20"}, "step_time must be a text with a unit, got 20"),
        ({"bandwidth": '"1e-320bit"'}, "bandwidth must be from 1bit to 1e18B/s"),
        ({"bandwidth": "true"}, "bandwidth must be a text with a unit, got True"),
        ({"speeds": f"[1, {LONG}]"}, "speeds[1] must be a finite number > 0, got 1000"),
        ({"speeds": "[true, 1]"}, "speeds[0] must be a finite number > 0, got True"),
        ({"speeds": "[1e-300, 1]"}, "step_seconds must be a number from 1e-15 to 1e+12, got"),
        ({"jitter": LONG}, "jitter must be a number from 0 to 5, got 1000"),
    ],
)
def test_a_cluster_file(changed: dict[str, str], message: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "c.toml").write_text("".join(f"{key} = {value}\n" for key, value in (CLUSTER | changed).items()))
    assert message in refused(["plan", "--workers", "2", "--steps", "9", "--cluster", "c.toml"], place, capsys)


PROBED = {
    **{name: {"value": 1.0} for name in Problem.__dataclass_fields__},
    "step_seconds": 0.01, "parameters": 1000, "batch_size": 8, "average_seconds": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("smoothness", {"value": value}) for value in (10**400, "inf", "x", None, True)),
        *(("parameters", value) for value in (float("inf"), 10**400, 0, -1, True, "x", [0])),
        *(("step_seconds", value) for value in (0, float("nan"), 1e-320, "x")),
        *(("average_seconds", value) for value in ("x", -1, float("inf"), [0])),
        *(("batch_size", value) for value in (0, "x", 1.5, True)),
        ("noise", None),
    ],
    ids=named,
)
def test_a_probes_file(key: str, value: object, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "p.json").write_text(json.dumps(PROBED))
    args = ["plan", "--workers", "8", "--epochs", "3", "--samples", "50k", "--probe", "p.json"]
    assert main([*args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 3 * (50_000 // 64)
    (place / "p.json").write_text(json.dumps({**PROBED, key: value}))
    assert "p.json: not what `prsgd probe --json` prints" in refused(args, place, capsys)


AVERAGE = average_line(samples=3, drift=0.1)
EVALUATION = evaluation_line()


@pytest.mark.parametrize(
    "value", [float("inf"), float("-inf"), float("nan"), 10**400, 1e308, "x", [], {}, True, 1.5], ids=named
)
@pytest.mark.parametrize(
    ("record", "key"),
    [
        *((AVERAGE, key) for key in ("round", "step", "bytes_sent", "samples", "hops", "overlap", "server_bytes_sent")),
        *((AVERAGE, key) for key in ("period", "workers", "bad_workers")),
        (EVALUATION, "step"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["kind"],
)
def test_a_record_whose_whole_number_is_none(
    record: dict[str, object], key: str, value: object, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(place / "a")
    (place / "a" / "records.jsonl").write_text(json.dumps({**record, key: value}) + "\n")
    line = refused(["report", "a"], place, capsys)
    assert f"a/records.jsonl, line 1: {key} must be " in line


@pytest.mark.parametrize("value", [10**400, 1e308, "x", [], {}, True], ids=named)
@pytest.mark.parametrize(
    ("record", "key"),
    [
        (AVERAGE, "lr"), (AVERAGE, "drift"), (AVERAGE, "loss"), (AVERAGE, "wait_seconds"),
        (EVALUATION, "epoch"), (EVALUATION, "train_loss"), (EVALUATION, "test_loss"),
        (EVALUATION, "test_score"), (EVALUATION, "seconds"), (EVALUATION, "modelled_seconds"),
    ],
)  # fmt: skip
def test_a_record_whose_number_is_none(
    record: dict[str, object], key: str, value: object, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(place / "a")
    (place / "a" / "records.jsonl").write_text(json.dumps({**record, key: value}) + "\n")
    assert f"a/records.jsonl, line 1: {key} must be a number" in refused(["report", "a"], place, capsys)


DEEP = ["[" * 100_000, '{"a":' * 100_000]
FILES = ["records.jsonl", "config.json", "environment.json", "summary.json", "split.json", "trace-0.json"]


@pytest.mark.parametrize("content", [*DEEP, "9" * 5000, "\0" * 99, "3", "null", '"x"'], ids=lambda text: text[:5])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", ["report", "timeline"])
def test_a_file_of_a_run_that_is_something_else(
    command: str, name: str, content: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(place / "a")
    (place / "a" / name).write_text(content + "\n")
    assert f"a/{name}" in refused([command, "a"], place, capsys)


@pytest.mark.parametrize("content", DEEP, ids=lambda text: text[:5])
@pytest.mark.parametrize(("command", "name"), [("train", "config.json"), ("train", "summary.json"),
                                               ("compare", "compare.json")])  # fmt: skip
def test_what_is_nested_too_deeply_is_not_resumed(
    command: str, name: str, content: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "a").mkdir()
    assert main(["train", "--workers", "2", "--epochs", "1", "--out", "b"]) == 0
    for path in ("config.json", "summary.json"):
        (place / "a" / path).write_bytes((place / "b" / path).read_bytes())
    capsys.readouterr()
    (place / "a" / name).write_text(content)
    assert f"a/{name} cannot be read: nested too deeply" in refused([command, "--resume", "a"], place, capsys)


ENDED = Summary(
    label="pr-sgd period 8", train_loss=0.1, test_loss=0.2, test_score=0.9, best_test_score=0.9, epochs=1.0,
    steps=22, rounds=3, bytes_sent=4096, mean_drift=None, seconds=1.5, samples=1408, weights_sha256="ab",
)  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("seconds", value) for value in (math.inf, math.nan, -1, 10**400, "x", None, True)),
        *(("modelled_seconds", value) for value in (math.inf, "x", False)),
        *(("rounds", value) for value in (1.5, -1, None, 10**400)),
        ("train_loss", "x"),
        ("train_loss", 10**400),
        ("test_score", "90%"),
        ("weights_sha256", 5),
        ("nonsense", 5),
    ],
    ids=named,
)
def test_a_summary_that_cannot_be_is_not_told(
    key: str, value: object, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run that was finished, and is asked to go on."""
    prepare(Config(workers=2, epochs=1).resolve(), place / "a")
    (place / "a" / "summary.json").write_text(json.dumps({**dataclasses.asdict(ENDED), key: value}))
    line = refused(["train", "--resume", "a"], place, capsys)
    assert "a/summary.json cannot be read: " in line
    assert key in line


def test_a_summary_of_losses_that_are_no_numbers_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(Config(workers=2, epochs=1).resolve(), place / "a")
    ended = dataclasses.replace(ENDED, test_loss=math.nan, mean_drift=math.inf)
    (place / "a" / "summary.json").write_text(json.dumps(dataclasses.asdict(ended)))
    assert main(["train", "--resume", "a"]) == 0
    assert "a was finished already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 10**400) for key in ("workers", "seed", "period", "overlap", "epochs", "steps", "batch_size")),
        *((key, value) for key in ("lr", "momentum", "seconds", "switch") for value in (10**400, "x", True)),
        *((key, 0) for key in ("workers", "period", "epochs", "batch_size")),
        ("workers", -4),
    ],
    ids=named,
)
def test_a_report_of_a_config_that_cannot_be(
    key: str, value: object, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(place / "a", losses=[2.0, 0.5], accuracies=[0.1, 0.8])
    path = place / "a" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert f"a/config.json: {key} cannot be" in refused(["report", "a"], place, capsys)


def test_a_report_does_not_go_into_a_file(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(place / "a")
    assert "out must be a folder, text.txt is a file" in refused(["report", "a", "--out", "text.txt"], place, capsys)


def test_a_name_that_is_no_text_can_be_printed(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A byte that is not UTF-8 in a folder's name: the shell hands it over, and it is printed as \\udcff."""
    make_run(Path(os.fsdecode(b"a\xff")))
    assert main(["report", os.fsdecode(b"a\xff")]) == 0
    assert capfd.readouterr().out == "a\\udcff/report.html\n"
