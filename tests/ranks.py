"""Real processes for tests: every rank has a time limit, and a rank that hangs is killed and named."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "prsgd.core.local_sgd", "prsgd.comm.joining"])


class RankFailed(AssertionError):  # noqa: N818 - an assertion, like the others
    """A rank raised, died or hung."""


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
    """``fn(rank, *args)`` in ``num_ranks`` processes of one gloo job; their results by rank."""
    outcomes = try_ranks(fn, num_ranks, *args, timeout_seconds=timeout_seconds)
    for rank, (kind, value) in enumerate(outcomes):
        if kind != "result":
            raise RankFailed(f"rank {rank}: {kind}: {value}")
    return [value for _, value in outcomes]


def try_ranks(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float = 60.0
) -> list[tuple[str, Any]]:
    """As ``run_ranks``; per rank ("result", value), ("error", "Type: text"), ("died", exit code) or ("hung", None)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends, processes = [], []
    for rank in range(num_ranks):
        mine, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_main, args=(theirs, rank, num_ranks, port, fn, args), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    outcomes: list[tuple[str, Any]] = [("hung", None)] * num_ranks
    deadline = time.monotonic() + timeout_seconds
    waiting: dict[Any, int] = {end: rank for rank, end in enumerate(ends)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(waiting), left):
            rank = waiting.pop(end)
            try:
                outcomes[rank] = pickle.loads(end.recv_bytes())
            except EOFError:
                processes[rank].join(5)
                outcomes[rank] = ("died", processes[rank].exitcode)
    for process in processes:
        process.join(max(0.0, min(10.0, deadline - time.monotonic())))
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes


def _main(
    pipe: Connection, rank: int, num_ranks: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import prsgd

    try:
        prsgd.init()
        outcome = ("result", fn(rank, *args))
    except BaseException as error:
        if os.environ.get("PRSGD_TEST_TRACE"):
            traceback.print_exc()
        outcome = ("error", f"{type(error).__name__}: {error}")
    pipe.send_bytes(pickle.dumps(outcome))  # by value: send() would share the tensors' memory, which ends here
    pipe.close()
    os._exit(0)  # leave without a goodbye: what a test needs of its peers, it says itself
