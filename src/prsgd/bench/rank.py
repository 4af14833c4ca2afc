"""One rank of one contestant: ``python -m prsgd.bench.rank '{"contestant": "ddp", ...}'``

It prepares itself, says so, and then takes as many steps as each line of its standard input says, answering with what
they took. It ends with its standard input, so that none is left when whoever started it is gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TextIO

from prsgd.comm.job import Job


@dataclass(frozen=True)
class Orders:
    """What a rank is told in the beginning."""

    contestant: str
    model: str
    period: int
    rank: int
    ranks: int
    address: str
    """Its own, and the first rank's, where the store is."""
    first: str
    port: int
    interface: str


@dataclass(frozen=True)
class Block:
    """What a number of steps took on one rank."""

    seconds: float
    processor_seconds: float
    """Of all threads of the process."""
    sync_seconds: float
    """Beyond the usual step, in all: where there is an average now and then, what the steps with one took longer."""


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")  # what libraries print is no answer
    os.dup2(2, 1)
    ours = Job(orders.rank, orders.ranks, 0, orders.first, orders.port, on_one_machine=False, has_store=False)
    os.environ.update(ours.environment(), GLOO_SOCKET_IFNAME=orders.interface, OMP_NUM_THREADS="1")
    import torch

    import prsgd
    from prsgd.bench.contestants import CONTESTANTS, Ground
    from prsgd.bench.models import work

    torch.set_num_threads(1)
    prsgd.init(backend="gloo", timeout_seconds=120)
    ground = Ground(orders.rank, orders.ranks, orders.address, orders.period)
    with CONTESTANTS[orders.contestant].train(work(orders.model, orders.rank), ground) as step:
        for _ in range(2 * orders.period):
            step()
        _say(answers, {"ready": True})
        for line in sys.stdin:
            times = [time.perf_counter()]
            processor = time.process_time()
            for _ in range(int(line)):
                step()
                times.append(time.perf_counter())
            processor = time.process_time() - processor
            took = [after - before for before, after in pairwise(times)]
            usual = median(took)
            block = Block(times[-1] - times[0], processor, sum(max(0.0, t - usual) for t in took))
            _say(answers, vars(block))


def _say(answers: TextIO, what: dict[str, object]) -> None:
    print(json.dumps(what), file=answers, flush=True)


if __name__ == "__main__":
    main()
