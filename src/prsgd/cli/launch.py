"""``prsgd launch --elastic --workers 4 train.py ...``: a lighthouse, and processes that come and go."""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from prsgd._check import whole_number
from prsgd.cli.parser import Parser, fail, path, refusing
from prsgd.comm import job

GRACE_SECONDS = 5.0
"""How long processes may take to end once they were told to."""
TOLD_TO_END = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # Windows has one
PR_SET_PDEATHSIG = 1
"""Of Linux' prctl: the signal that a process gets when the one that started it is gone."""


def add(parser: Parser) -> None:
    parser.add_argument("--elastic", action="store_true", help="workers come and go (comm=prsgd.TorchFT())")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes to start (2)")
    parser.add_argument("--port", type=int, default=0, help="the lighthouse's, on loopback (a free one)")
    parser.add_argument("script", type=path, help="a Python program")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its own arguments")
    rest.required = False  # argparse would name it beside a script that is missing


def run(args: argparse.Namespace) -> int:
    if not args.elastic:
        fail("launch", "without --elastic processes are torchrun's: torchrun --nproc-per-node 2 SCRIPT", code=2)
    with refusing("launch"):
        workers = whole_number("workers", args.workers, at_least=1)
        port = whole_number("port", args.port, at_least=0, at_most=65535)
        if not Path(args.script).is_file():
            raise ValueError(f"{args.script}: no such file")
        from prsgd.comm.lighthouse import serve

        address, lighthouse = serve("127.0.0.1", port)
    told = " ".join(f"{name}={value}" for name, value in job.elastic_environment(0, workers, address).items())
    again = shlex.join([sys.executable, str(args.script), *args.arguments])
    print(f"prsgd launch: worker 0 again: {told} {again}", file=sys.stderr)
    for number in TOLD_TO_END:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, _told_to_end)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for worker in range(workers):
            processes.append(_start(worker, workers, address, args))
        return _watch(processes)
    finally:
        _end(processes)
        lighthouse.shutdown()


def _start(worker: int, workers: int, address: str, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    env = {**os.environ, **job.elastic_environment(worker, workers, address)}
    return subprocess.Popen([sys.executable, str(args.script), *args.arguments], env=env, preexec_fn=_tie_to_us())


def _tie_to_us() -> Callable[[], None] | None:
    """What a process does before its program begins, so that it ends with this one even if that is killed. On Linux
    alone: elsewhere nobody tells it."""
    if sys.platform != "linux":
        return None
    prctl, ours = ctypes.CDLL(None).prctl, os.getpid()

    def tie() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != ours:  # it was killed just before
            os._exit(1)

    return tie


def _told_to_end(number: int, _: FrameType | None) -> None:
    print(f"prsgd launch: ended by {signal.Signals(number).name}", file=sys.stderr)
    raise SystemExit(128 + number)


def _watch(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all, and tell of those that fail: 0 if one has ended well, and else what the first one said."""
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        for worker, process in enumerate(processes):
            if worker not in codes and (code := process.poll()) is not None:
                codes[worker] = code
                if code:
                    how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
                    left = len(processes) - len(codes)
                    print(f"prsgd launch: worker {worker} {how}; {left or 'none'} left", file=sys.stderr)
        time.sleep(0.05)
    return 0 if 0 in codes.values() else max(1, next(iter(codes.values())))


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Leave none behind."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
