"""Processes that are killed and started again: by torchrun, and by ``prsgd train --processes --max-restarts``."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Program, _torchrun, command, run_command, torchrun

LOOP = """
import os, sys, torch, prsgd
comm = prsgd.init()
rank, torch_restarts = comm.workers.start, int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), overlap=1)
with prsgd.resumable(sys.argv[1], local, every=3, model=model, optimizer=optimizer) as run:
    for t in range(run.step, 40):
        if rank == int(sys.argv[2]) and t == 27 and torch_restarts == 0:
            os.kill(os.getpid(), 9)
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + t))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.arange(4) % 3).backward()
        optimizer.step()
        run.tick()
with open(f"{sys.argv[1]}-{rank}", "w") as file:
    print(run.step, torch_restarts, *(p.tolist() for p in model.parameters()), file=file)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_starts_a_users_loop_again(victim: int, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    args = "--nproc-per-node", "2", "--max-restarts", "1", "loop.py"
    done = torchrun(*args, "broken", str(victim), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = torchrun(*args, "whole", "-1", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    told = {path.name: path.read_text().split(maxsplit=2) for path in tmp_path.glob("*-[01]")}
    assert told["whole-0"][:2] == told["whole-1"][:2] == ["0", "0"]
    assert told["broken-0"][:2] == told["broken-1"][:2]
    assert told["broken-0"][:2] in (["23", "1"], ["17", "1"])  # the newest may not have been written when it was killed
    assert len({words[2] for words in told.values()}) == 1


TRAIN = "train", "--workers", "4", "--epochs", "30", "--out", "broken"


def kill_one(program: Program, folder: Path, victim: int) -> None:
    """A rank of the program's, as soon as a checkpoint is whole that is not the last one."""
    deadline = time.monotonic() + 100
    while not list(folder.glob(f"checkpoints/step-*/manifest-{victim}.json")):
        assert program.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    [pid] = [pid for pid in children(program.pid) if rank_of(pid) == victim]
    os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def rank_of(pid: int) -> int | None:
    """By what torchrun has told it; None: it is no rank."""
    told = re.search(r"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_text())
    return None if told is None else int(told[1])


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_train_goes_on_under_torchrun(tmp_path: Path) -> None:
    args = "--nproc-per-node", "2", "--max-restarts", "1", "-m", "prsgd"
    with Program(_torchrun, *args, *TRAIN, cwd=tmp_path) as program:
        kill_one(program, tmp_path / "broken", 1)
        _, said = program.communicate(200)
    assert program.poll() == 0, said
    assert "continuing broken" in said
    assert torchrun(*args, *TRAIN[:-1], "whole", cwd=tmp_path).returncode == 0
    assert summary(tmp_path / "broken")["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


def test_train_starts_its_processes_again(tmp_path: Path) -> None:
    with Program(command, *TRAIN, "--processes", "2", "--max-restarts", "1", cwd=tmp_path) as program:
        folder = tmp_path / "broken"
        deadline = time.monotonic() + 100
        while not list(folder.glob("checkpoints/step-*/manifest-1.json")):
            assert program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        victim = max(pid for pid in children(program.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(victim, signal.SIGKILL)
        _, said = program.communicate(200)
    assert program.poll() == 0, said
    assert "was killed by SIGKILL before its function returned; all start again (1 of 1 left)" in said
    done = run_command(*TRAIN[:-1], "whole", "--processes", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert summary(folder)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]


@pytest.mark.parametrize(
    ("number", "env", "words"),
    [
        ("-1", {}, "max_restarts must be a whole number >= 0, got -1"),
        ("1", {}, "prsgd train has started itself: with --processes 2 or more"),
        (
            "1",
            {"RANK": "0", "WORLD_SIZE": "1"},
            "prsgd train has started itself: torchrun has a --max-restarts of its own",
        ),
    ],
)
def test_no_restart_is_left(number: str, env: dict[str, str], words: str, tmp_path: Path) -> None:
    with Program(command, *TRAIN, "--max-restarts", number, cwd=tmp_path, env=env) as program:
        _, said = program.communicate(100)
    assert (program.poll(), said.count("\n")) == (2, 1)
    assert words in said
    assert list(tmp_path.iterdir()) == []


def test_a_restart_that_begins_anew_says_so(tmp_path: Path) -> None:
    """Refused after that, so that nothing is trained here."""
    env = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}
    with Program(command, "train", "--max-restarts", "1", cwd=tmp_path, env=env) as program:
        _, said = program.communicate(100)
    assert said.startswith("prsgd: warning: torchrun has started this run again, which begins anew: with --out")
