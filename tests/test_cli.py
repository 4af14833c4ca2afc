"""The command line as a user types it: real processes, exit codes, one-line errors, folders."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from prsgd.cli import main
from prsgd.cli.compare import variants
from prsgd.cli.options import RUN
from prsgd.cli.running import interruptible
from prsgd.clocks.trace import Span, to_chrome
from prsgd.lab.config import Config
from prsgd.lab.folder import claim, write_comparison
from tests import ranks
from tests.ranks import Program, torchrun, warm_launch
from tests.ranks import run_command as prsgd
from tests.test_report import make_run

QUICK = ["--workers", "4", "--epochs", "2"]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_help_needs_no_torch() -> None:
    code = "import sys; from prsgd.cli import main\ntry: main(['-h'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.endswith("False\n")
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    for command in ("compare", "train", "report", "data"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["trian"], "prsgd: error: unknown command 'trian': did you mean 'train'?"),
        (["train", "--perod", "3"], "unknown argument '--perod': did you mean '--period'?"),
        (["train", "--workers", "x"], "argument --workers: must be a whole number, got 'x'"),
        (["train", "--workers", "0"], "workers must be a whole number >= 1, got 0"),
        (["train", "--workers", "2000"], "workers must be at most the 1437 samples, got 2000"),
        (["train", "--batch-size", "999"], "batch_size must be at most 179"),
        (["train", "--lr", "nan"], "lr must be a finite number > 0, got nan"),
        (["train", "--lr", "0"], "lr must be"),
        (["train", "--momentum", "1"], "momentum must be in [0, 1), got 1.0"),
        (["train", "--task", "digit"], "did you mean 'digits'?"),
        (["train", "--method", "pr-sdg"], "did you mean 'pr-sgd'?"),
        (["train", "--config", "none.toml"], "none.toml: No such file or directory"),
        (["train", "--resume", "none"], "none holds no run: it has no config.json"),
        (["train", "--out", "/proc/nothing"], "out cannot be written: /proc/nothing"),
        (["compare", "--resume", "none"], "none holds no comparison: it has no compare.json"),
        (["compare", "--seeds", "0"], "seeds must be how many, from 1 to 1,000, or a list of seeds, got 0"),
        (["compare", "--jobs", "0"], "jobs must be a whole number >= 1, got 0"),
        (["report", "none"], "none"),
        (["data", "get", "cifar"], "did you mean 'cifar10'?"),
        (["data", "get", "cifar10", "--from", "none.tgz"], "none.tgz does not exist"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_line_and_exit_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if not line.startswith("reading")]
    assert len(lines) == 1
    assert message in said
    assert not list(tmp_path.iterdir())


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prsgd", "methods"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (1, "prsgd: error: the output: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_toml_and_options(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('task = "digits"\nworkers = 4\nepochs = 9\nbatch-size = 16\n')
    done = prsgd("train", "--config", "run.toml", "--epochs", "1", "--out", "a", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["config"]["workers"], found["config"]["batch_size"], found["config"]["epochs"]) == (4, 16, 1)
    assert found["test_score"] == summary(tmp_path / "a")["test_score"]
    (tmp_path / "all.toml").write_text('workers = 4\nepochs = 1\nseeds = 2\nout = "b"\njson = true\n')
    done = prsgd("train", "--config", "all.toml", cwd=tmp_path)
    assert (json.loads(done.stdout)["folder"], json.loads(done.stdout)["config"]["seed"]) == ("b", 2)
    (tmp_path / "bad.toml").write_text("wrkers = 4\n")
    done = prsgd("train", "--config", "bad.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (
        2,
        "prsgd train: error: bad.toml: unknown key 'wrkers': did you mean 'workers'? (its value: 4)\n",
    )
    (tmp_path / "bad.toml").write_text("workers = [\n")
    assert prsgd("train", "--config", "bad.toml", cwd=tmp_path).returncode == 2


def test_folders_are_not_overwritten(tmp_path: Path) -> None:
    assert prsgd("train", *QUICK, "--out", "a", cwd=tmp_path).returncode == 0
    first = summary(tmp_path / "a")
    again = prsgd("train", *QUICK, "--out", "a", cwd=tmp_path)
    assert again.returncode == 2
    assert "a holds another run: continue it with --resume, or replace it with --overwrite" in again.stderr
    assert prsgd("train", *QUICK, "--out", "a", "--overwrite", "--seed", "1", cwd=tmp_path).returncode == 0
    assert summary(tmp_path / "a")["weights_sha256"] != first["weights_sha256"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused = prsgd("train", *QUICK, "--out", "mine", "--overwrite", cwd=tmp_path)
    assert refused.returncode == 2
    assert "holds 'thesis.txt' and is no run of ours" in refused.stderr
    other = prsgd("train", "--resume", "a", "--workers", "8", cwd=tmp_path)
    assert (other.returncode, "a has workers 4, got 8" in other.stderr) == (2, True)
    done = prsgd("train", "--resume", "a", cwd=tmp_path)
    assert (done.returncode, "done in" in done.stdout) == (0, True)  # it was over already


@contextmanager
def started(*args: str, cwd: Path, until: str) -> Iterator[Program]:
    """A command that runs on, once it has made a file like ``until``; ended in any case."""
    with Program(ranks.command, *args, cwd=cwd) as program:
        limit = time.monotonic() + 120
        while not list(cwd.glob(until)):
            assert program.poll() is None, program.communicate(1)[1]
            assert time.monotonic() < limit, f"no {until} in time"
            time.sleep(0.02)
        yield program


def told_to_stop(program: Program) -> str:
    """What it says when it gets Ctrl-C."""
    program.send_signal(signal.SIGINT)
    _, said = program.communicate(120)
    assert program.poll() == 130, said
    assert "Traceback" not in said
    return said


def wait_for_the_end_of(processes: list[Path]) -> None:
    limit = time.monotonic() + 120
    while any(process.exists() for process in processes):
        assert time.monotonic() < limit, "processes are left"
        time.sleep(0.1)


def children_of(program: Program) -> list[Path]:
    found = running_children(program.pid)
    assert found
    return found


def running_children(pid: int) -> list[Path]:
    return [Path("/proc") / number for number in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


LONG = ["--workers", "8", "--epochs", "30", "--overlap", "2"]


def test_killed_at_any_moment_and_resumed(tmp_path: Path) -> None:
    """The 20 times of the issue are ``bench/kills.py``; here it is a few."""
    assert prsgd("train", *LONG, "--out", "whole", cwd=tmp_path).returncode == 0
    for turn in range(3):
        folder = f"killed{turn}"
        with started("train", *LONG, "--out", folder, cwd=tmp_path, until=f"{folder}/checkpoints/step-*"):
            time.sleep(random.Random(turn).uniform(0, 0.5))
        assert not (tmp_path / folder / "summary.json").exists()
        done = prsgd("train", "--resume", folder, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert summary(tmp_path / folder)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_stops_with_a_checkpoint(tmp_path: Path, processes: str) -> None:
    more = ["--workers", "8", "--epochs", "400", "--processes", processes, "--out", "a"]
    with started("train", *more, cwd=tmp_path, until="a/checkpoints/step-*/manifest-0.json") as process:
        said = told_to_stop(process)
    assert "continue with: prsgd train --resume a" in said
    step = int(said.split("stopped after step ")[1].split(";")[0])
    assert (tmp_path / "a" / "checkpoints" / f"step-{step:08d}" / "manifest-0.json").exists()


def test_ctrl_c_that_comes_twice_is_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """``timeout`` and some shells send a signal to the whole group and once more to the child."""
    clock = [100.0]
    monkeypatch.setattr("prsgd.cli.running.time.monotonic", lambda: clock[0])
    with interruptible() as asked:
        assert not asked()
        for clock[0] in (200.0, 200.01, 200.9):
            signal.raise_signal(signal.SIGINT)
            assert asked()
        clock[0] = 201.1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == "stopping; Ctrl-C again stops at once\n"


def test_a_run_that_gets_ctrl_c_twice_at_once_stops_with_a_checkpoint(tmp_path: Path) -> None:
    more = ["--workers", "8", "--epochs", "400", "--processes", "2", "--out", "a"]
    with started("train", *more, cwd=tmp_path, until="a/.lock") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        said = told_to_stop(process)
    assert "continue with: prsgd train --resume a" in said
    assert list((tmp_path / "a").glob("checkpoints/step-*/manifest-0.json"))


def limit_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_full_disk_is_one_line_and_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    """The limit on a file's size makes a write fail in the middle of a run, as a full disk does."""
    args = ["train", "--workers", "2", "--period", "1", "--epochs", "8", "--out", "a"]
    done = prsgd(*args, cwd=tmp_path, first=limit_files)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("prsgd train: error:")
    assert "File too large" in last
    assert last.endswith("continue with --resume a")
    assert "Traceback" not in done.stderr
    assert prsgd("train", "--resume", "a", cwd=tmp_path).returncode == 0
    assert prsgd(*args[:-1], "b", cwd=tmp_path).returncode == 0
    assert summary(tmp_path / "a")["weights_sha256"] == summary(tmp_path / "b")["weights_sha256"]


def test_a_damaged_checkpoint_is_named_and_a_newer_one_refused(tmp_path: Path) -> None:
    assert prsgd("train", *QUICK[:2], "--epochs", "4", "--out", "a", cwd=tmp_path).returncode == 0
    whole = summary(tmp_path / "a")["weights_sha256"]
    (tmp_path / "a" / "summary.json").unlink()
    newest = sorted((tmp_path / "a" / "checkpoints").iterdir())[-1]
    (newest / "rank-0.safetensors").write_bytes(b"")
    done = prsgd("train", "--resume", "a", cwd=tmp_path)
    assert done.returncode == 0
    assert f"prsgd: warning: checkpoint a/checkpoints/{newest.name}: rank-0.safetensors is damaged" in done.stderr
    assert summary(tmp_path / "a")["weights_sha256"] == whole
    (tmp_path / "a" / "summary.json").unlink()
    (newest / "manifest-0.json").write_text('{"format": 99, "sha256": {}}')
    done = prsgd("train", "--resume", "a", cwd=tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "has the format 99" in done.stderr


def test_torchrun_is_processes(tmp_path: Path) -> None:
    done = torchrun("--nproc-per-node", "2", "-m", "prsgd", "train", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [folder] = (tmp_path / "runs").iterdir()
    more = ["--processes", "2", "--out", "a"]
    assert prsgd("train", *QUICK, *more, cwd=tmp_path, first=warm_launch).returncode == 0
    assert summary(folder)["weights_sha256"] == summary(tmp_path / "a")["weights_sha256"]


def test_compare_ends_with_table_verdict_and_report_and_goes_on(tmp_path: Path) -> None:
    args = ["compare", "--workers", "4", "--epochs", "3", "--period", "1", "8", "--seeds", "2"]
    done = prsgd(*args, "--out", "c", "--tensorboard", cwd=tmp_path, first=warm_launch)
    assert done.returncode == 0, done.stderr
    assert "report: c/report.html" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert (tmp_path / "c" / "report.html").stat().st_size > 10_000
    runs = sorted(p.parent.name for p in (tmp_path / "c").glob("*/summary.json"))
    assert runs == [f"pr-sgd-period-{p}-seed-{s}" for p in (1, 8) for s in (0, 1)]
    assert list((tmp_path / "c" / runs[0] / "tensorboard").glob("events.*"))
    assert prsgd(*args, "--out", "c", cwd=tmp_path).returncode == 2
    before = summary(tmp_path / "c" / runs[0])
    (tmp_path / "c" / runs[0] / "summary.json").unlink()
    again = prsgd("compare", "--resume", "c", "--json", cwd=tmp_path, first=warm_launch)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert len(found["runs"]) == 4
    assert summary(tmp_path / "c" / runs[0])["weights_sha256"] == before["weights_sha256"]
    assert found["verdict"]


MANY = ["--epochs", "400", "--period", "1", "8", "--seeds", "1", "--jobs", "2", "--out", "c"]


def test_ctrl_c_stops_a_comparison_and_no_process_is_left(tmp_path: Path) -> None:
    with started("compare", *MANY, cwd=tmp_path, until="c/*/checkpoints/step-*") as process:
        children = children_of(process)
        assert "continue with: prsgd compare --resume c" in told_to_stop(process)
    wait_for_the_end_of(children)


def test_ctrl_c_while_the_processes_start(tmp_path: Path) -> None:
    """A terminal sends it to all of them, and they are busy with importing. This one is all as a user starts it."""
    with subprocess.Popen(
        [sys.executable, "-m", "prsgd", "compare", *MANY],
        cwd=tmp_path,
        env=environment(),
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        start_new_session=True,
    ) as process:
        try:
            limit = time.monotonic() + 120
            # Two runs, and what keeps track of shared things.
            while len(children := running_children(process.pid)) < 3 or not (tmp_path / "c/compare.json").exists():
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < limit, "no processes in time"
                time.sleep(0.01)
            os.killpg(process.pid, signal.SIGINT)
            _, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert "failed" not in said
    assert "continue with: prsgd compare --resume c" in said
    wait_for_the_end_of(children)


def test_a_comparison_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with started("compare", *MANY, cwd=tmp_path, until="c/*/checkpoints/step-*") as process:
        children = children_of(process)
        process.kill()
        process.communicate(120)
    wait_for_the_end_of(children)


def test_one_run_that_fails_does_not_spoil_the_others(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    write_comparison(tmp_path / "c", variants({"workers": 2, "epochs": 1, "period": [1, 4], "seeds": [1]}))
    (tmp_path / "c" / "pr-sgd-period-4-seed-0").write_text("in the way")
    done = prsgd("compare", "--resume", "c", cwd=tmp_path, first=warm_launch)
    assert done.returncode == 1
    assert "pr-sgd period 4, seed 0: failed" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("prsgd compare: error: 1 run failed")
    assert "report: c/report.html" in done.stdout


def test_every_choice_of_a_run_is_an_option() -> None:
    """Seeds are not in the table: train takes one, compare takes how many. Files' hashes are taken, not given."""
    assert {*RUN, "seed", "task_sha256", "data_sha256"} == {field.name for field in dataclasses.fields(Config)}


FILES = [
    ("train", "config.json", "{}"),
    ("train", "config.json", '{"workers": "8"}'),
    ("train", "config.json", "[1]"),
    ("train", "config.json", '{"task": "digits", "metod": "x"}'),
    ("train", "summary.json", "{}"),
    ("train", "summary.json", "xx"),
    ("compare", "compare.json", "{}"),
    ("compare", "compare.json", '{"runs": [1]}'),
    ("compare", "compare.json", '{"runs": 5}'),
    ("compare", "compare.json", '{"runs": [{}]}'),
    ("compare", "compare.json", '{"runs": []}'),
]


@pytest.mark.parametrize(("command", "name", "content"), FILES, ids=str)
def test_files_of_a_folder_that_are_not_what_they_should_be(
    command: str, name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(Config().resolve().to_json())
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as stopped:
        main([command, "--resume", str(tmp_path)])
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert name in line


def test_overwriting_a_comparison_is_all_or_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "c" / "pr-sgd-period-8-seed-0"
    run.mkdir(parents=True)
    for path in (run.parent / "compare.json", run / "config.json", run / ".summary.json.4242"):
        path.write_text("{}")
    (run / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "empty.toml").write_text("method = []\n")
    for args in (["--out", "c", "--overwrite"], ["--config", "empty.toml", "--out", "c", "--overwrite"]):
        with pytest.raises(SystemExit) as stopped:
            main(["compare", *args])
        assert stopped.value.code == 2
    assert "notes.txt is not ours: move it away" in (said := capsys.readouterr().err)
    assert "method must have at least one value, got none" in said
    (tmp_path / "empty.toml").unlink()
    assert sorted(tmp_path.rglob("*")) == before
    (run / "notes.txt").unlink()
    claim(run.parent, marker="compare.json", resume=False, overwrite=True)
    assert not any(run.parent.iterdir())


def test_torchrun_with_more_processes_than_workers_is_refused(tmp_path: Path) -> None:
    args = ["--nproc-per-node", "2", "-m", "prsgd", "train", "--workers", "1", "--out", "a"]
    done = torchrun(*args, cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("processes must be at most the number of workers 1, got 2") == 1
    assert not (tmp_path / "a").exists()


def test_variants() -> None:
    assert [(c.period, c.seed) for c in variants({})] == [(p, s) for s in (0, 1, 2) for p in (1, 4, 8, 16, 32)]
    found = variants({"method": ["minibatch-sgd", "pr-sgd", "one-shot"], "period": [4, 8], "seeds": [7, 9]})
    assert [c.label for c in found if c.seed == 7] == [
        "minibatch-sgd",
        "pr-sgd period 4",
        "pr-sgd period 8",
        "one-shot",
    ]
    assert [c.seed for c in variants({"period": [4], "seeds": [5, 6]})] == [5, 6]
    with pytest.raises(ValueError, match="workers takes one value"):
        variants({"workers": [2, 3]})
    with pytest.raises(ValueError, match="method one-shot has no period, got 4"):
        variants({"method": ["one-shot"], "period": [4]})


@pytest.mark.usefixtures("drawn_once")
def test_a_report_of_several_folders_goes_to_a_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for period in (1, 8):
        make_run(tmp_path / f"p{period}", period=period)
        assert main(["report", f"p{period}"]) == 0
    assert capsys.readouterr().out == "p1/report.html\np8/report.html\n"
    before = [(path, path.read_bytes()) for path in tmp_path.glob("p?/*") if path.is_file()]
    places = []
    for more in ([], [], ["--out", "mine"], ["--out", "p1"]):
        assert main(["report", "p1", "p8", *more]) == 0
        places.append(capsys.readouterr().out.strip())
        assert "period 1 and 8" in Path(places[-1]).read_text()
        if more != ["--out", "p1"]:
            assert [(path, path.read_bytes()) for path, _ in before] == before
    assert places[2:] == ["mine/report.html", "p1/report.html"]
    assert len(set(places)) == 4
    assert all(Path(place).parent.match("runs/report-*") for place in places[:2])


@pytest.mark.usefixtures("drawn_once")
def test_a_reports_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for period in (1, 8):
        make_run(tmp_path / f"p{period}", period=period)
    assert main(["report", "p1", "p8", "--out", "a", "--baseline", "pr-sgd period 8"]) == 0
    assert "8x the bytes" in Path("a/report.html").read_text()
    capsys.readouterr()
    for name in ("period 3", ""):
        with pytest.raises(SystemExit) as stopped:
            main(["report", "p1", "p8", "--out", "b", "--baseline", name])
        assert stopped.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert f"baseline must be one of 'pr-sgd period 1', 'pr-sgd period 8', got {name!r}" in line
    assert not Path("b").exists()


def test_a_timeline_names_seeds_and_what_else_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    spans = [Span(0, "step", 0.1 * i, 0.1 * i + 0.08, i + 1) for i in range(4)]
    spans += [Span(0, "blocked", 0.1 * i + 0.08, 0.1 * i + 0.1, i + 1) for i in range(4)]

    def headings(folder: str) -> list[str]:
        assert main(["timeline", folder, "--rounds", "1000000000"]) == 0
        blocks = capsys.readouterr().out.strip("\n").split("\n\n")
        return [block.splitlines()[0] for block in blocks[:-1]]

    for period, seed in ((1, 0), (1, 1), (8, 0)):
        folder = make_run(tmp_path / "c" / f"{period}-{seed}", period=period, seed=seed)
        (folder / "trace-0.json").write_text(json.dumps(to_chrome(spans)))
    assert headings("c") == ["pr-sgd period 1, seed 0", "pr-sgd period 1, seed 1", "pr-sgd period 8, seed 0"]
    assert headings("c/8-0") == ["pr-sgd period 8"]
    assert "pr-sgd period 1, seed 1: here idle" in (tmp_path / "c" / "figures" / "timeline.svg").read_text()


def test_a_timeline_names_all_workers_of_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two processes of four workers each, which tell of them by their first one, have a row each."""
    folder = make_run(tmp_path / "a", workers=8, processes=2)
    for process in (0, 1):
        spans = [Span(4 * process, "step", float(i), i + 0.8, i + 1) for i in range(4)]
        spans += [Span(4 * process, "blocked", i + 0.8, i + 1.0, i + 1) for i in range(4)]
        (folder / f"trace-{process}.json").write_text(json.dumps(to_chrome(spans)))
    assert main(["timeline", str(folder)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:5]] == ["0-3", "4-7"]
    assert all(f"<!-- {name} -->" in (folder / "figures" / "timeline.svg").read_text() for name in ("0-3", "4-7"))


def test_a_timeline_of_very_many_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than can be drawn: fewer are, however many were asked for."""
    folder = make_run(tmp_path / "a")
    spans = [Span(0, "step", float(i), i + 0.8, i + 1) for i in range(9000)]
    spans += [Span(0, "blocked", i + 0.8, i + 1.0, i + 1) for i in range(9000)]
    (folder / "trace-0.json").write_text(json.dumps(to_chrome(spans)))
    assert main(["timeline", str(folder), "--rounds", "8000"]) == 0
    assert "pr-sgd period 1" in capsys.readouterr().out
