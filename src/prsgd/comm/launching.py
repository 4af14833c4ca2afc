"""Starting the ranks of a job on this machine."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Generic, TypeVar

from prsgd._check import whole_number
from prsgd.comm.job import Job
from prsgd.errors import LaunchError

R = TypeVar("R")

GRACE_SECONDS = 2.0
"""How long the other ranks may take to end by themselves once one has failed: their own errors come too late to
matter, but what they print on the way out may help."""


def launch(fn: Callable[..., R], *, processes: int, args: Sequence[Any] = (), threads: int = 1) -> list[R]:
    """Run ``fn(*args)`` in ``processes`` new processes of one torch.distributed job, and return what each returned.

    ``prsgd.init()`` has been called in each, so a ``Fleet(model, num_workers=N)`` made there hosts its share of the
    N workers. Each process uses ``threads`` threads. If one raises, exits or is killed, the others are ended and a
    ``LaunchError`` tells what happened to the first one, with its traceback. Ctrl-C ends all of them. ``fn`` must be a
    function at the top level of a module, since it is sent to the new processes by name, and ``args`` and results
    must be such that pickle takes them.

        def train(epochs):
            fleet = prsgd.Fleet(model, num_workers=8)
            ...

        if __name__ == "__main__":
            prsgd.launch(train, processes=2, args=(10,))

    >>> import torch.distributed as dist
    >>> launch(dist.get_rank, processes=2)
    [0, 1]
    >>> launch(dist.get_rank, processes=0)
    Traceback (most recent call last):
    ValueError: processes must be a whole number >= 1, got 0
    """
    processes = whole_number("processes", processes, at_least=1)
    threads = whole_number("threads", threads, at_least=1)
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ValueError(f"args must be a list or tuple of fn's arguments, got {args!r}")
    job = pickle.dumps(_importable(fn)), _packed(args), threads
    from prsgd.comm.joining import loopback_store  # imports torch, which bad arguments need not wait for

    store = loopback_store(0, processes, timeout=timedelta(seconds=60))
    ranks = [_start(rank, processes, store.port, job) for rank in range(processes)]
    try:
        return _collect(ranks)
    finally:
        _end(ranks)
        del store


@dataclass(frozen=True)
class _Rank(Generic[R]):
    process: SpawnProcess
    outcome: Connection
    """Its result, or its traceback."""
    lifeline: Connection
    """Our end: when this process is gone, however it went, the rank sees it close and ends."""


def _importable(fn: Callable[..., R]) -> Callable[..., R]:
    if not callable(fn):
        raise ValueError(f"fn must be a function, got {fn!r}")
    name = getattr(fn, "__qualname__", repr(fn))
    main = sys.modules["__main__"]
    if getattr(fn, "__module__", None) == "__main__" and getattr(main, "__file__", None) is None:
        raise ValueError(
            f"fn must be importable in a new process, {name} was typed into an interpreter: put it in a file"
        )
    try:
        pickle.dumps(fn)
    except Exception as error:
        raise ValueError(f"fn must be a function at the top level of a module, got {name} ({error})") from None
    return fn


def _packed(args: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps(tuple(args))
    except Exception as error:
        raise ValueError(f"args must be such that pickle takes them, got {args!r} ({error})") from None


def _start(rank: int, processes: int, port: int, job: tuple[bytes, bytes, int]) -> _Rank[Any]:
    context = multiprocessing.get_context("spawn")
    outcome, send = context.Pipe(duplex=False)
    hold, lifeline = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(rank, processes, port, job, send, hold), name=f"prsgd rank {rank}")
    with uninterrupted():
        process.start()
    send.close()
    hold.close()
    return _Rank(process, outcome, lifeline)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Processes that are started meanwhile do not get Ctrl-C from their first moment on.

    A terminal sends it to all of them, and while they import torch they could not answer but by a traceback. Blocking
    loses nothing here: this process gets a signal that came in between afterwards.
    """
    resource_tracker.ensure_running()  # the first start would start it too, and lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_interrupts_to_the_parent() -> None:
    """In such a process: Ctrl-C goes to the parent, which tells its processes or ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _collect(ranks: Sequence[_Rank[R]]) -> list[R]:
    """Wait for all results, or raise for the first rank that fails."""
    results: dict[int, R] = {}
    waiting = {rank.outcome: number for number, rank in enumerate(ranks)}
    while waiting:
        # A child that a rank forked holds the rank's pipe open: a rank that is gone must be looked for too.
        ready = wait(list(waiting), 0.5) or [r.outcome for r in ranks if r.outcome in waiting and _is_gone(r)]
        for outcome in ready:
            number = waiting.pop(outcome)  # type: ignore[call-overload]  # all are Connections
            results[number] = _result(number, ranks)
    return [results[number] for number in range(len(ranks))]


def _is_gone(rank: _Rank[Any]) -> bool:
    return rank.process.exitcode is not None and not rank.outcome.poll()


def _result(number: int, ranks: Sequence[_Rank[R]]) -> R:
    rank = ranks[number]
    if _is_gone(rank):
        raise LaunchError(_death(number, ranks))
    try:
        ok, value = pickle.loads(rank.outcome.recv_bytes())
    except (EOFError, OSError):
        raise LaunchError(_death(number, ranks)) from None
    if ok:
        return value  # type: ignore[no-any-return]  # what the rank's fn returned
    first, text = _earliest(number, value, ranks)
    raise LaunchError(f"rank {first} of {len(ranks)} failed:\n\n{text}")


def _death(number: int, ranks: Sequence[_Rank[Any]]) -> str:
    process = ranks[number].process
    process.join(5)
    code = process.exitcode
    how = f"exited with code {code}"
    if code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    hint = " (is launch() called under if __name__ == '__main__'?)" if code == 1 else ""
    return f"rank {number} of {len(ranks)} {how} before its function returned{hint}"


def _earliest(number: int, failure: tuple[float, bool, str], ranks: Sequence[_Rank[Any]]) -> tuple[int, str]:
    """Of the ranks that failed, the one to show: a rank that lost a peer is the victim of another one's failure."""
    found = {number: failure}
    deadline = time.monotonic() + GRACE_SECONDS
    others = {rank.outcome: other for other, rank in enumerate(ranks) if other != number}
    while failure[1] and others and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(others), left):
            other = others.pop(ready)  # type: ignore[call-overload]  # all are Connections
            try:
                ok, value = pickle.loads(ranks[other].outcome.recv_bytes())
            except (EOFError, OSError):
                raise LaunchError(_death(other, ranks)) from None
            if not ok:
                found[other] = value
                if not value[1]:
                    return other, value[2]
    first = min(found, key=lambda other: (found[other][1], found[other][0]))
    return first, found[first][2]


def _end(ranks: Sequence[_Rank[Any]]) -> None:
    """Leave no rank behind: those that have not ended are told to, and killed if they do not."""
    for rank in ranks:
        rank.lifeline.close()
    for stop in (None, SpawnProcess.terminate, SpawnProcess.kill):
        for rank in ranks:
            if stop is not None and rank.process.is_alive():
                stop(rank.process)
        deadline = time.monotonic() + 1.0
        for rank in ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.process.close()
        rank.outcome.close()


def _main(
    rank: int, processes: int, port: int, job: tuple[bytes, bytes, int], send: Connection, hold: Connection
) -> None:
    """A rank's whole life."""
    leave_interrupts_to_the_parent()
    returned = threading.Event()
    threading.Thread(target=_watch, args=(hold, returned), daemon=True).start()
    fn_bytes, args_bytes, threads = job
    ours = Job(rank, processes, rank, "127.0.0.1", port, on_one_machine=True, has_store=True)  # the parent serves it
    os.environ.update(ours.environment(), OMP_NUM_THREADS=str(threads))
    import torch

    from prsgd.comm.joining import init
    from prsgd.errors import PeerError

    torch.set_num_threads(threads)
    try:
        fn = pickle.loads(fn_bytes)
        args = pickle.loads(args_bytes)
        init()
        outcome = _packed_result(fn(*args))
    except BaseException as error:
        text = traceback.format_exc()
        outcome = pickle.dumps((False, (time.time(), isinstance(error, PeerError), text)))
    sys.stdout.flush()
    sys.stderr.flush()
    returned.set()
    send.send_bytes(outcome)
    send.close()
    atexit._run_exitfuncs()  # the user's, and those that end daemonic children
    os._exit(0)  # no goodbye: tearing down a group whose peers have left can hang


def _packed_result(result: Any) -> bytes:
    try:
        return pickle.dumps((True, result))
    except Exception as error:
        raise ValueError(f"fn must return what pickle takes, got {result!r} ({error})") from None


def _watch(hold: Connection, returned: threading.Event) -> None:
    """End this rank when its parent is gone."""
    try:
        hold.recv_bytes()
    except (EOFError, OSError):
        if returned.is_set():  # the parent has all results, and the functions that run at exit may take their time
            time.sleep(GRACE_SECONDS)
        os._exit(1)
