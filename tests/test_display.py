"""What people see while it runs, in a terminal and in a file; and that a run says when it starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from prsgd.cli.display import Display
from prsgd.lab.pool import run_all
from prsgd.lab.progress import Progress
from prsgd.records import Evaluation

pytestmark = pytest.mark.usefixtures("warm_launch")


def progress(step: int) -> Progress:
    seen = Evaluation(epoch=step / 10, step=step, train_loss=2.3, test_loss=2.3, test_score=0.1, seconds=1.0)
    return Progress(
        step=step, num_steps=40, epoch=step / 10, num_epochs=4, round=step // 8, evaluation=seen, seconds=1.0,
        seconds_left=None,
    )  # fmt: skip


def table(display: Display) -> list[str]:
    console = Console(width=80)
    with console.capture() as said:
        console.print(display._table())
    return [line.rstrip() for line in said.get().splitlines()]


def test_a_row_says_waiting_starting_and_where_a_run_is() -> None:
    display = Display(["one", "two", "three"])
    display.starting(0)
    display.starting(1)
    display.show(1, progress(8))
    rows = table(display)
    assert rows[1].split() == ["one", "starting"]
    assert rows[2].split()[:5] == ["two", "0.8", "of", "4", "1"]
    assert rows[3].split() == ["three", "waiting"]


def test_plain_lines_say_starting_instead_of_epoch_0(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("prsgd.cli.display.time.monotonic", lambda: clock[0])
    display = Display(["one"])
    display.starting(0)
    clock[0] += 3
    display.show(0, progress(0))
    clock[0] += 8
    display.show(0, progress(8))
    assert capsys.readouterr().err.splitlines() == [
        "one: starting",
        "one: epoch 0.8 of 4, round 1, loss 2.3000, accuracy 10.0%",
    ]


def double(number: int, tell: Callable[[Any], None], stopped: Callable[[], bool]) -> int:
    tell("begun")
    return 2 * number


def test_jobs_say_which_has_started() -> None:
    said: list[tuple[str, int]] = []
    run_all(
        double,
        [3, 4, 5],
        at_once=1,
        on_start=lambda number: said.append(("start", number)),
        on_message=lambda number, _: said.append(("message", number)),
        on_result=lambda number, result: said.append((f"result {result}", number)),
        should_stop=lambda: False,
    )
    assert said == [(word, n) for n in range(3) for word in ("start", "message", f"result {2 * (3 + n)}")]
