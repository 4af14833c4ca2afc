"""The examples run: as their first lines say, and small where they take long."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests import ranks
from tests.ranks import free_port

EXAMPLES = Path(__file__).parent.parent / "examples"


def load(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))


def torchrun(processes: int, name: str) -> str:
    args = ["--nproc-per-node", str(processes), "--master-port", str(free_port()), str(EXAMPLES / f"{name}.py")]
    result = ranks.torchrun(*args, cwd=EXAMPLES.parent)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_digits_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    results = load("digits_fleet")["main"](epochs=8)
    assert [r.period for r in results] == [1, 8]
    assert [r.rounds for r in results] == [176, 22]  # 22 steps an epoch
    assert results[0].megabytes == pytest.approx(8 * results[1].megabytes)
    assert all(r.accuracy > 0.9 for r in results)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


def test_own_loop_under_torchrun() -> None:
    said = torchrun(2, "own_loop")
    assert "all workers (2) ended with one model: test accuracy 9" in said
    assert "23 averages in 180 steps" in said


def test_own_loop_alone() -> None:
    accuracies = load("own_loop")["main"](epochs=2)
    assert accuracies[-1] > 0.8


def test_resumable_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = load("resumable")["main"]
    main(tmp_path, steps=200, pause_seconds=0)
    main(tmp_path, steps=400, pause_seconds=0)
    said = capsys.readouterr().out
    assert "from step 0 on" in said
    assert "from step 160 on" in said
    assert "after 400 steps" in said


def test_skipped_steps_under_torchrun() -> None:
    said = torchrun(3, "skipped_steps")
    assert "40 batches, of which GradScaler skipped [3, 13, 23, 33]" in said
    assert "steps that ran: 36; averages landed at steps [8, 16, 24, 32, 36]" in said
