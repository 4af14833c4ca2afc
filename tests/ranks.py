"""Real processes for tests, of one warm server: every rank has a time limit, and one that hangs is killed and named."""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

LIMIT_SECONDS = 120.0
"""For what takes a second where nothing else is running."""


def warmed() -> Any:
    """What starts processes: forks of a server that has imported torch, prsgd and every module of tests that is here.

    A rank's own imports would take 2 s of a core (an optimizer's first step imports torch._dynamo), and there are more
    than a thousand ranks.
    """
    context = _get_context("forkserver")
    ours = sorted(name for name in sys.modules if name.startswith("tests."))
    context.set_forkserver_preload(
        [
            "torch._dynamo",
            "torch.distributed.run",
            "prsgd.comm.joining",
            "prsgd.lab.processes",
            "prsgd.cli.train",
            *ours,
            "tests.frozen",
        ]
    )
    # Here, and not with the first process: launch() starts that one with SIGINT blocked, which the server, and every
    # rank after it, would inherit. Once the server runs, it stays as it is.
    forkserver.ensure_running()
    return context


def warm_context(method: str | None = None) -> Any:
    """In the place of ``multiprocessing.get_context``: new interpreters are forks of the server."""
    return warmed() if method == "spawn" else _get_context(method)


_get_context = multiprocessing.get_context


def warm_launch() -> None:
    """For a command's ``first``: what it starts are forks of the server, as with the fixture of this name."""
    multiprocessing.get_context = warm_context


def free_port() -> int:
    """Below the ports that the system gives away, or a connection of another test may take it before we do; tests that
    run side by side have ports of their own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 5
    number = 7 * os.getpid() + next(_count)
    for port in (10_000 + 4_000 * worker + (number + more) % 4_000 for more in range(4_000)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


_count = itertools.count()


def is_alive(pid: int) -> bool:
    """Is there such a process that has not ended?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class RankFailed(AssertionError):  # noqa: N818 - an assertion, like the others
    """A rank raised, died or hung."""


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = LIMIT_SECONDS) -> list[Any]:
    """``fn(rank, *args)`` in ``num_ranks`` processes of one gloo job; their results by rank."""
    outcomes = try_ranks(fn, num_ranks, *args, timeout_seconds=timeout_seconds)
    for rank, (kind, value) in enumerate(outcomes):
        if kind != "result":
            raise RankFailed(f"rank {rank}: {kind}: {value}")
    return [value for _, value in outcomes]


def try_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = LIMIT_SECONDS
) -> list[tuple[str, Any]]:
    """As ``run_ranks``; per rank ("result", value), ("error", "Type: text"), ("died", exit code) or ("hung", None)."""
    context, port = warmed(), free_port()
    ends, processes = [], []
    for rank in range(num_ranks):
        mine, theirs = context.Pipe()
        process = context.Process(target=_main, args=(theirs, rank, num_ranks, port, fn, args), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    outcomes: list[tuple[str, Any]] = [("hung", None)] * num_ranks
    deadline = time.monotonic() + timeout_seconds
    waiting: dict[Any, int] = {end: rank for rank, end in enumerate(ends)}
    joining = set(range(num_ranks))
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(waiting), left):
            rank = waiting[end]
            try:
                outcome = pickle.loads(end.recv_bytes())
            except (EOFError, ConnectionResetError):
                processes[rank].join(5)
                outcome = ("died", processes[rank].exitcode)
            if outcome != JOINED:
                outcomes[rank] = outcome
                del waiting[end]
            if rank in joining:
                joining.remove(rank)
                if not joining:
                    _release(ends)
    for process in processes:
        process.join(max(0.0, min(10.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes


def _release(ends: list[Connection]) -> None:
    for end in ends:
        with suppress(OSError):  # it failed to join
            end.send_bytes(b"go")


JOINED = ("joined", None)


def _main(
    pipe: Connection, rank: int, num_ranks: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import prsgd

    try:
        prsgd.init()
        pipe.send_bytes(pickle.dumps(JOINED))
        pipe.recv_bytes()  # nobody leaves, and takes the store along, while another one joins
        outcome = ("result", fn(rank, *args))
    except BaseException as error:
        if os.environ.get("PRSGD_TEST_TRACE"):
            traceback.print_exc()
        outcome = ("error", f"{type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(outcome))  # by value: send() would share the tensors' memory, which ends here
    pipe.close()
    os._exit(0)  # leave without a goodbye: what a test needs of its peers, it says itself


def run_command(
    *args: str, cwd: Path, first: Callable[[], None] | None = None, timeout_seconds: float = 250.0
) -> subprocess.CompletedProcess[str]:
    """``prsgd ARGS`` in a process of its own that need not import torch first; ``first`` is called in it before.

    >>> run_command("--version", cwd=Path()).stdout.split()[0]
    'prsgd'
    """
    with Program(command, *args, cwd=cwd, first=first) as program:
        out, err = program.communicate(timeout_seconds)
    return subprocess.CompletedProcess(["prsgd", *args], program.process.exitcode, out, err)


def command(*args: str) -> Any:
    """What the script ``prsgd`` does."""
    from prsgd.cli import main

    sys.argv = ["prsgd", *args]
    return main()


def script(path: str, *args: str) -> None:
    """What ``python PATH ARGS`` does."""
    sys.argv = [path, *args]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def torchrun(*args: str, cwd: Path, timeout_seconds: float = 250.0) -> subprocess.CompletedProcess[str]:
    """``torchrun ARGS``: its ranks are interpreters of their own, and it itself need not import torch first."""
    with Program(_torchrun, *args, cwd=cwd) as program:
        out, err = program.communicate(timeout_seconds)
    return subprocess.CompletedProcess(["torchrun", *args], program.process.exitcode, out, err)


def _torchrun(*args: str) -> None:
    from torch.distributed.run import main

    sys.argv = ["torchrun", *args]
    main()


class Program:
    """``fn(*args)`` as a program that is watched from outside, like subprocess.Popen, but that need not import torch
    first; ``first`` is called in it before. With ``to_the_end`` its interpreter ends as it does after a script, with
    the functions that run at exit and the destructors of what is left. When the block ends it is killed.

    >>> with Program(print, "here", cwd=Path()) as program:
    ...     program.communicate(60), program.poll()
    (('here\\n', ''), 0)
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *args: str,
        cwd: Path,
        first: Callable[[], None] | None = None,
        env: Mapping[str, str] | None = None,
        to_the_end: bool = False,
    ) -> None:
        self.args = args
        self._place = TemporaryDirectory()
        self._said = [Path(self._place.name, name) for name in ("stdout", "stderr")]
        more = (cwd, self._said, first, dict(env or {}), to_the_end)
        self.process = warmed().Process(target=_program, args=(fn, args, *more))
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid  # type: ignore[no-any-return]  # warmed() is Any

    def poll(self) -> int | None:
        return self.process.exitcode  # type: ignore[no-any-return]

    def send_signal(self, which: signal.Signals) -> None:
        os.kill(self.pid, which)

    def kill(self) -> None:
        self.process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it said on stdout and stderr, once it has ended."""
        self.process.join(timeout)
        out, err = (path.read_text() if path.exists() else "" for path in self._said)
        if self.process.is_alive():
            raise subprocess.TimeoutExpired(list(self.args), timeout, out, err)
        return out, err

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._place.cleanup()


def _program(
    fn: Callable[..., Any],
    args: tuple[str, ...],
    cwd: Path,
    said: list[Path],
    first: Callable[[], None] | None,
    env: dict[str, str],
    to_the_end: bool,
) -> None:
    for number, path in enumerate(said, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    os.environ.update({"OMP_NUM_THREADS": "1", "COLUMNS": "80", **env})
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    code = 0
    try:
        if first is not None:
            first()
        result = fn(*args)
        code = result if isinstance(result, int) else 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    if to_the_end:
        ctypes.pythonapi.Py_Exit(code)
    sys.exit(code)  # what multiprocessing runs leaves without more ado
