"""Ranks that run one scenario after another, started anew only after a failure."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from tests.fuzz_outcome import Look, Outcome
from tests.fuzz_run import LIMIT_SECONDS, run_rank
from tests.fuzz_scenario import Scenario
from tests.ranks import free_port, warmed


class Crew:
    """``num_ranks`` processes of one gloo job."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._processes: list[Any] = []
        self._ends: list[Connection] = []

    def send(self, scenario: Scenario, looks: Sequence[Look] = (), rest: Look | None = None) -> None:
        """Let all ranks begin."""
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send_bytes(pickle.dumps((scenario, list(looks), rest)))

    def receive(self) -> list[Outcome]:
        """What every rank ended with; one that died or hung has an error that says so, and all are killed."""
        outcomes = [Outcome(error="hung") for _ in self._ends]
        deadline = time.monotonic() + 2 * LIMIT_SECONDS + 5
        waiting: dict[Any, int] = {end: rank for rank, end in enumerate(self._ends)}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for end in wait(list(waiting), left):
                rank = waiting.pop(end)
                try:
                    outcomes[rank] = pickle.loads(end.recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(5)
                    outcomes[rank] = Outcome(error=f"died with exit code {self._processes[rank].exitcode}")
                    deadline = min(deadline, time.monotonic() + LIMIT_SECONDS + 5)
        if any(outcome.error for outcome in outcomes) and not all("DivergedError" in o.error for o in outcomes):
            self.close()
        return outcomes

    def close(self) -> None:
        """End all processes."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        context, port = warmed(), free_port()
        for rank in range(self.num_ranks):
            mine, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs, rank, self.num_ranks, port), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)


def _main(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import prsgd

    prsgd.init(timeout_seconds=60.0)
    try:
        while True:
            scenario, looks, rest = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps(run_rank(rank, scenario, looks, rest)))  # send() would share the memory
    except (EOFError, OSError):  # nobody is there to ask for more
        os._exit(0)
