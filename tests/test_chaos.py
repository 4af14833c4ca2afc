"""The quick form of bench/chaos.py: a kill under torchrun, and of those that come and go one and two at once."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

CHAOS = Path(__file__).parent.parent / "bench" / "chaos.py"
LIMIT_SECONDS = 300


def rows(*options: str) -> list[list[str]]:
    """The cells of its table."""
    done = subprocess.run([sys.executable, str(CHAOS), *options], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(lines) > 2, done.stdout + done.stderr
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_run_goes_on_from_its_states_after_a_kill() -> None:
    ((fault, survived, lost, _, _, apart),) = rows("--kills", "1", "--pairs", "0")
    assert (fault, survived, apart) == ("SIGKILL of one of 3, torchrun", "1 of 1", "0")
    assert float(lost.split("/")[1]) <= 10  # two states of 5 averages: the newest may be half written


@pytest.mark.skipif(find_spec("torchft") is None, reason="the extra elastic is not installed")
def test_workers_that_come_and_go_lose_at_most_one_round_by_kills() -> None:
    found = rows("--elastic", "--kills", "1", "--pairs", "1")
    assert [row[0] for row in found] == ["SIGKILL of one of 4, torchft", "SIGKILL of two of 4, torchft"]
    for _, survived, lost, _, joined, apart in found:
        assert (survived, apart) == ("1 of 1", "0")
        assert joined
        assert float(lost.split("/")[1]) <= 1
