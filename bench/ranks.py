"""Functions run in new processes of one gloo job over loopback, until a deadline."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import prsgd


def in_ranks(num_ranks: int, deadline: float, job: Callable[..., Any], *args: object) -> list[Any]:
    """``job(*args)`` in ``num_ranks`` processes of one gloo job; what each returned."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends, processes = [], []
    try:
        for rank in range(num_ranks):
            mine, theirs = context.Pipe(duplex=False)
            processes.append(
                context.Process(target=_rank, args=(theirs, rank, num_ranks, port, job, args), daemon=True)
            )
            processes[-1].start()
            theirs.close()
            ends.append(mine)
        return [_outcome(job, end, deadline) for end in ends]
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _outcome(job: Callable[..., Any], end: Connection, deadline: float) -> Any:
    if not wait([end], max(0.0, deadline - time.monotonic())):
        raise SystemExit(f"{job.__name__}: the time limit is up")
    try:
        error, result = end.recv()
    except EOFError:
        raise SystemExit(f"{job.__name__}: a rank died") from None
    if error:
        raise SystemExit(f"{job.__name__}: {error}")
    return result


def _rank(
    pipe: Connection, rank: int, num_ranks: int, port: int, job: Callable[..., Any], args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    if num_ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        prsgd.init()
    try:
        pipe.send((None, job(*args)))
    except Exception:
        pipe.send((traceback.format_exc(), None))
    if num_ranks > 1:
        dist.destroy_process_group()
