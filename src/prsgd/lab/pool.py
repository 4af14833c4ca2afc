"""Several independent runs at a time, each in a process of its own that outlives the run.

A process is told what to do through a pipe and answers through it; when this program is gone, however it went, the pipe
closes and the process ends.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from prsgd.comm.launching import leave_interrupts_to_the_parent, uninterrupted

Job = Callable[[Any, Callable[[Any], None], Callable[[], bool]], Any]
"""(what to do, tell, should I stop) -> result. At the top level of a module."""


@dataclass(frozen=True)
class Failure:
    """A job that did not return."""

    kind: str
    """The exception's name, or "killed"."""
    message: str
    trace: str = ""


def run_all(
    fn: Job,
    tasks: Sequence[Any],
    *,
    at_once: int,
    on_start: Callable[[int], None],
    on_message: Callable[[int, Any], None],
    on_result: Callable[[int, Any], None],
    should_stop: Callable[[], bool],
) -> None:
    """``fn`` of each task, ``at_once`` at a time.

    ``on_start(number)`` is told that a job was given to a process, which may have to start first;
    ``on_message(number, message)`` gets what a job tells, ``on_result(number, result)`` what it returned or a Failure.
    Once ``should_stop()`` says yes, the running jobs are told so and no other is started.
    """
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    todo = list(range(len(tasks)))
    processes: dict[Connection, SpawnProcess] = {}
    doing: dict[Connection, int] = {}

    def give(pipe: Connection) -> None:
        if todo and not stop.is_set():
            doing[pipe] = todo.pop(0)
            on_start(doing[pipe])
            pipe.send(tasks[doing[pipe]])
        else:
            pipe.close()

    def hire() -> None:
        mine, theirs = context.Pipe()
        process = context.Process(target=_main, args=(fn, theirs, stop))
        with uninterrupted():
            process.start()
        theirs.close()
        processes[mine] = process
        give(mine)

    try:
        for _ in range(min(at_once, len(tasks))):
            hire()
        while doing:
            ready = wait(list(doing), 0.2)
            if should_stop():
                stop.set()
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError):
                    on_result(doing.pop(pipe), _death(processes[pipe]))
                    pipe.close()
                    if todo and not stop.is_set():
                        hire()
                    continue
                if kind == "message":
                    on_message(doing[pipe], content)
                else:
                    on_result(doing.pop(pipe), content)
                    give(pipe)
    finally:
        for pipe, process in processes.items():
            pipe.close()
            process.join(0 if doing else 10)
            if process.is_alive():
                process.kill()
                process.join()


def _death(process: SpawnProcess) -> Failure:
    process.join(5)
    code = process.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
    return Failure("killed", f"its process was {how}")


def _main(fn: Job, pipe: Connection, stop: Any) -> None:
    """A process's life: jobs, one after another."""
    leave_interrupts_to_the_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    try:
        while True:
            task = pipe.recv()
            try:
                result = fn(task, lambda message: pipe.send(("message", message)), stop.is_set)
            except (BrokenPipeError, EOFError):
                raise
            except Exception as error:
                result = Failure(type(error).__name__, str(error), traceback.format_exc())
            pipe.send(("result", result))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone, or has nothing more to do
