"""Ranks that are kept for many tests: a library that takes seconds to import is imported once in each of them."""

from __future__ import annotations

import importlib
import os
import pickle
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from tests.ranks import LIMIT_SECONDS, RankFailed, free_port, warmed


class Kept:
    """``num_ranks`` processes of one gloo job, as under torchrun, in which functions run that are named by
    "module:function". After an error or a hang they are ended, and started afresh for the next call.

    >>> with Kept(2) as ranks:
    ...     ranks.run("tests.kept:what_rank", "here")
    ['0 here', '1 here']
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._processes: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in self._processes:
            process.kill()
            process.join()
            pipe.close()
        self._processes = []

    def run(self, name: str, *args: Any, timeout_seconds: float = LIMIT_SECONDS) -> list[Any]:
        """``fn(rank, *args)`` in each rank; their results by rank, or a ``RankFailed`` that names the rank."""
        outcomes = self.try_run(name, *args, timeout_seconds=timeout_seconds)
        for rank, (kind, value) in enumerate(outcomes):
            if kind != "result":
                raise RankFailed(f"rank {rank}: {kind}: {value}")
        return [value for _, value in outcomes]

    def try_run(self, name: str, *args: Any, timeout_seconds: float = LIMIT_SECONDS) -> list[tuple[str, Any]]:
        """As ``run``; per rank ("result", value), ("error", "Type: text"), ("died", None) or ("hung", None)."""
        if not self._processes:
            port = free_port()
            self._processes = [self._start(rank, port) for rank in range(self._num_ranks)]
        deadline, outcomes = time.monotonic() + timeout_seconds, []
        for _, pipe in self._processes:
            pipe.send((name, args))
        for _, pipe in self._processes:
            try:
                here = pipe.poll(max(0.0, deadline - time.monotonic()))
                outcomes.append(pickle.loads(pipe.recv_bytes()) if here else ("hung", None))
            except (EOFError, OSError):
                outcomes.append(("died", None))
        if any(kind != "result" for kind, _ in outcomes):
            self.__exit__()
        return outcomes

    def _start(self, rank: int, port: int) -> tuple[Any, Connection]:
        context = warmed()
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, self._num_ranks, port), daemon=True)
        process.start()
        theirs.close()
        return process, mine


def what_rank(rank: int, where: str) -> str:
    return f"{rank} {where}"


def _serve(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(num_ranks),
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    import prsgd

    prsgd.init()
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"  # now: nobody of torchrun keeps a store here
    while True:
        name, args = pipe.recv()
        module, function = name.split(":")
        try:
            outcome = "result", getattr(importlib.import_module(module), function)(rank, *args)
        except BaseException as error:
            if os.environ.get("PRSGD_TEST_TRACE"):
                traceback.print_exc()
            outcome = "error", f"{type(error).__name__}: {error}"
        pipe.send_bytes(pickle.dumps(outcome))
