"""A run wherever it is to run: in this process, in several that are started here, or as one of torchrun's."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from prsgd import _json, tasks
from prsgd._check import shown, whole_number
from prsgd.comm import job
from prsgd.comm.launching import launch
from prsgd.data import splits
from prsgd.errors import CheckpointError, LaunchError
from prsgd.lab import feed, methods
from prsgd.lab import pool as jobs
from prsgd.lab import run as experiment
from prsgd.lab.checkpoint import Checkpoints, newest_common, write
from prsgd.lab.config import MOST, Config
from prsgd.lab.run import Observer, Progress, Stopped
from prsgd.records import Summary

MOST_PROCESSES = 1024
"""That we start on this machine: each imports torch."""
STOP = "stop"
"""A file with this name in a run's folder asks its processes to stop when the epoch ends."""


def check(config: Config) -> None:
    """See that the data are there and can be dealt out so, and that there is an end; a ValueError or DataError else."""
    if job.find() is None:  # which starts as many as it was told, on many machines
        whole_number("processes", config.processes, at_least=1, at_most=MOST_PROCESSES)
    shards = feed.deal(config, tasks.load(config.task))
    if feed.num_steps(config, shards) > MOST:
        length = shards.steps_per_epoch
        raise ValueError(
            f"epochs must be at most {MOST // length:,} for {length:,} steps each, got {shown(config.epochs)}"
        )


def warn_about(configs: Iterable[Config]) -> None:
    """Of what can be trained but is not what the theory is about."""
    alike = (splits.iid(), splits.pool())
    for config in {c.method: c for c in configs}.values():
        if methods.find(config.method).uneven and splits.parse(config.split) not in alike:
            warnings.warn(
                f"{config.method} on a {config.split} split: workers that take more steps pull the model towards their "
                "own data (the paper's Assumption 2, identical distributions, does not hold)",
                UserWarning,
                stacklevel=2,
            )


def check_checkpoints(config: Config, folder: Path) -> None:
    """A CheckpointError if the run in ``folder`` cannot be continued."""
    steps = [Checkpoints(folder, rank=rank).steps(on_damage=lambda _: None) for rank in range(config.processes)]
    if job.find() is None:  # there, other machines may have the others' files
        newest_common(steps, folder)


def plain_warnings() -> None:
    """One line for a warning, without the place in the code: for programs, not for libraries."""
    warnings.showwarning = lambda message, *_, **__: print(f"prsgd: warning: {message}", file=sys.stderr)


def train(
    config: Config,
    folder: Path,
    *,
    observe: Observer,
    should_stop: Callable[[], bool],
    tensorboard: bool = False,
) -> Summary:
    """Train ``config`` in ``folder``; raises ``Stopped`` if it was asked to stop."""
    if config.processes == 1 or job.find() is not None:
        return experiment.run(config, folder, observe=observe, should_stop=should_stop, tensorboard=tensorboard)
    return _train_in_processes(config, folder, observe, should_stop, tensorboard)


def _train_in_processes(
    config: Config, folder: Path, observe: Observer, should_stop: Callable[[], bool], tensorboard: bool
) -> Summary:
    (folder / STOP).unlink(missing_ok=True)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if should_stop():
                (folder / STOP).touch()
                return

    def listen(listener: Listener) -> None:
        try:
            with listener.accept() as pipe:
                while True:
                    observe(pipe.recv())
        except (EOFError, OSError):
            return  # the ranks are gone

    key = os.urandom(32)
    with tempfile.TemporaryDirectory() as place, Listener(f"{place}/progress", authkey=key) as listener:
        threading.Thread(target=watch, daemon=True).start()
        threading.Thread(target=listen, args=(listener,), daemon=True).start()
        try:
            outcomes = launch(
                _rank, processes=config.processes, args=(config, folder, f"{place}/progress", key, tensorboard)
            )
        finally:
            over.set()
            (folder / STOP).unlink(missing_ok=True)
    if isinstance(outcomes[0], int):
        raise Stopped(outcomes[0])
    return outcomes[0]


def _rank(config: Config, folder: Path, address: str, key: bytes, tensorboard: bool) -> Summary | int:
    """What each process does: its summary, or the step at which it was stopped."""
    plain_warnings()
    with Client(address, authkey=key) if job.is_first() else open(os.devnull) as pipe:
        observe = getattr(pipe, "send", None)
        try:
            return experiment.run(
                config, folder, observe=observe, should_stop=(folder / STOP).exists, tensorboard=tensorboard
            )
        except Stopped as stopped:
            return stopped.step


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
) -> list[Summary | jobs.Failure | None]:
    """Train all ``configs``, each in its own folder in ``folder``; what is finished already is not trained again.

    Returns, in order, a Summary, a Failure, or None for a run that was stopped or not begun.
    """
    results: list[Summary | jobs.Failure | None] = [finished_run(folder / c.folder_name) for c in configs]
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
    jobs.run_all(
        _job, work, at_once=at_once, on_start=on_start, on_message=on_message, on_result=on_result,
        should_stop=should_stop,
    )  # fmt: skip
    return results


def _job(task: Any, tell: Callable[[Any], None], stopped: Callable[[], bool]) -> Summary | None:
    plain_warnings()
    config, folder, tensorboard = task
    if not (folder / "config.json").exists():
        experiment.prepare(config, folder)
    try:
        return train(config, folder, observe=tell, should_stop=stopped, tensorboard=tensorboard)
    except Stopped:
        return None
    except LaunchError as error:
        raise LaunchError(last_line(error)) from None


def finished_run(folder: Path) -> Summary | None:
    """How the run in ``folder`` ended, if it did."""
    place = folder / "summary.json"
    try:
        return Summary(**_json.parse(place.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{place} cannot be read: {error}") from None


def last_line(error: Exception) -> str:
    """Of a message with a traceback in it, what went wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else str(error)


def note_failure(folder: Path, trace: str) -> Path | None:
    """Keep a traceback for those who want it; returns where, None if it could not be kept."""
    place = folder / "error.txt"
    try:
        write(place, trace.encode())
    except OSError:
        return None
    return place


def join_torchrun(folder: Path) -> Path:
    """Join the job; rank 0's folder is everybody's."""
    import torch

    import prsgd

    comm = prsgd.init()
    name = torch.zeros(4096, dtype=torch.uint8)
    text = os.fsencode(folder)
    name[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if torch.cuda.is_available():
        name = name.cuda()
    shared = bytes(comm.broadcast(name).wait().cpu().tolist()).rstrip(b"\0")
    return Path(os.fsdecode(shared))
