"""A run wherever it is to run: in this process, in several that are started here, or as one of torchrun's."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Client, Listener
from pathlib import Path

from prsgd import files
from prsgd._warn import warn
from prsgd.comm import job
from prsgd.comm.launching import launch
from prsgd.errors import LaunchError
from prsgd.lab.config import Config
from prsgd.lab.progress import Observer, Stopped
from prsgd.lab.run import run
from prsgd.records import Summary


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
    max_restarts: int = 0,
) -> Summary:
    """Train ``config`` in ``folder``; raises ``Stopped`` if it was asked to stop.

    If one of several processes fails, all are started again, up to ``max_restarts`` times, and go on from the newest
    checkpoint.
    """
    if config.processes == 1 or job.find() is not None:
        return run(config, folder, observe=observe, should_stop=should_stop, tensorboard=tensorboard)
    for left in range(max_restarts, -1, -1):
        try:
            return _train_in_processes(config, folder, observe, should_stop, tensorboard)
        except LaunchError as error:
            if not left or should_stop():
                raise
            warn(f"{last_line(error)}; all start again ({left} of {max_restarts} left)")
    raise AssertionError("the last one returns or raises")


def _train_in_processes(
    config: Config, folder: Path, observe: Observer, should_stop: Callable[[], bool], tensorboard: bool
) -> Summary:
    (folder / files.STOP).unlink(missing_ok=True)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if should_stop():
                (folder / files.STOP).touch()
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
                _in_one_process,
                processes=config.processes,
                args=(config, folder, f"{place}/progress", key, tensorboard),
            )
        finally:
            over.set()
            (folder / files.STOP).unlink(missing_ok=True)
    if isinstance(outcomes[0], int):
        raise Stopped(outcomes[0])
    return outcomes[0]


def _in_one_process(config: Config, folder: Path, address: str, key: bytes, tensorboard: bool) -> Summary | int:
    """What each process does: its summary, or the step at which it was stopped."""
    plain_warnings()
    with Client(address, authkey=key) if job.is_first() else nullcontext() as pipe:
        observe = None if pipe is None else pipe.send
        try:
            return run(
                config, folder, observe=observe, should_stop=(folder / files.STOP).exists, tensorboard=tensorboard
            )
        except Stopped as stopped:
            return stopped.step


def last_line(error: Exception) -> str:
    """Of a message with a traceback in it, what went wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{lines[0]} {lines[-1]}" if len(lines) > 1 else str(error)


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
