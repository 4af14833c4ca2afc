"""A comparison: several runs in one folder, some of them at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prsgd import files
from prsgd.errors import LaunchError
from prsgd.lab.config import Config
from prsgd.lab.folder import finished_run, prepare
from prsgd.lab.pool import Failure, run_all
from prsgd.lab.processes import last_line, plain_warnings, train
from prsgd.lab.progress import Progress, Stopped
from prsgd.records import Summary


def compare(
    configs: Sequence[Config],
    folder: Path,
    *,
    at_once: int,
    started: Callable[[int], None],
    observe: Callable[[int, Progress], None],
    finished: Callable[[int, Any], None],
    should_stop: Callable[[], bool],
    tensorboard: bool = False,
) -> list[Summary | Failure | None]:
    """Train all ``configs``, each in its own folder in ``folder``; what is finished already is not trained again.

    Returns, in order, a Summary, a Failure, or None for a run that was stopped or not begun.
    """
    results: list[Summary | Failure | None] = [finished_run(folder / c.folder_name) for c in configs]
    todo = [i for i, result in enumerate(results) if result is None]
    for i, result in enumerate(results):
        if result is not None:
            finished(i, result)

    def on_start(number: int) -> None:
        started(todo[number])

    def on_message(number: int, message: Progress) -> None:
        observe(todo[number], message)

    def on_result(number: int, result: Any) -> None:
        results[todo[number]] = result
        finished(todo[number], result)

    work = [(configs[i], folder / configs[i].folder_name, tensorboard) for i in todo]
    run_all(
        _one_run, work, at_once=at_once, on_start=on_start, on_message=on_message, on_result=on_result,
        should_stop=should_stop,
    )  # fmt: skip
    return results


def _one_run(task: Any, tell: Callable[[Any], None], stopped: Callable[[], bool]) -> Summary | None:
    """What a process of the pool does; None if it was stopped on the way."""
    plain_warnings()
    config, folder, tensorboard = task
    if not (folder / files.CONFIG).exists():
        prepare(config, folder)
    try:
        return train(config, folder, observe=tell, should_stop=stopped, tensorboard=tensorboard)
    except Stopped:
        return None
    except LaunchError as error:
        raise LaunchError(last_line(error)) from None
