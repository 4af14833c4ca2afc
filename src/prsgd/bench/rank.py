"""One rank of one contestant: ``python -m prsgd.bench.rank '{"contestant": "ddp", ...}'``

It prepares itself, says so, and then takes as many steps as each line of its standard input says, answering with what
they took; the line "accuracy" is answered with that of the mean of all ranks' models. It ends with its standard input,
so that none is left when whoever started it is gone.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, TextIO

from prsgd.comm.job import Job

if TYPE_CHECKING:
    import prsgd
    from prsgd.bench.models import Work


@dataclass(frozen=True)
class Orders:
    """What a rank is told in the beginning."""

    contestant: str
    model: str
    period: int
    warm_up: int = 0
    """Steps that are taken first, and not looked at."""
    seed: int = 0
    lr: float = 0.01
    rank: int = 0
    ranks: int = 1
    address: str = ""
    """Its own, and the first rank's, where the store is."""
    first: str = ""
    port: int = 0
    interface: str = ""


@dataclass(frozen=True)
class Block:
    """What a number of steps took on one rank."""

    seconds: float
    processor_seconds: float
    """Of all threads of the process."""
    sync_seconds: float
    """Beyond the usual step, in all: where there is an average now and then, what the steps with one took longer."""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of one average by what it does, in the middle of those of the block; empty unless it leaves records."""


PARTS = ("copy", "wait", "flight")
"""copy: copying, checking and writing models. wait: blocked. flight: from launch to arrival, which an overlap hides."""


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")  # what libraries print is no answer
    os.dup2(2, 1)
    ours = Job(orders.rank, orders.ranks, 0, orders.first, orders.port, on_one_machine=False, has_store=False)
    os.environ.update(ours.environment(), GLOO_SOCKET_IFNAME=orders.interface, OMP_NUM_THREADS="1")
    import torch

    import prsgd
    from prsgd.bench.contestants import CONTESTANTS, Ground, Recorded
    from prsgd.bench.models import work

    torch.set_num_threads(1)
    prsgd.init(backend="gloo", timeout_seconds=120)
    job = work(orders.model, orders.rank, orders.ranks, orders.seed, orders.lr)
    ground = Ground(orders.rank, orders.ranks, orders.address, orders.period)
    with CONTESTANTS[orders.contestant].train(job, ground) as step:
        local = step.local if isinstance(step, Recorded) else None
        for _ in range(orders.warm_up):
            step()
        drained(local)
        taken = orders.warm_up
        _say(answers, {"ready": True})
        for line in sys.stdin:
            if line.strip() == "accuracy":
                _say(answers, {"accuracy": accuracy(job)})
                continue
            times = [time.perf_counter()]
            processor = time.process_time()
            for _ in range(int(line)):
                step()
                times.append(time.perf_counter())
            took = [after - before for before, after in pairwise(times)]
            usual = median(took)
            parts = {} if local is None else parts_of(local, int(line))
            taken += len(took)
            exposed = max(0.0, drained(local) - (orders.period - taken % orders.period) * usual)
            processor = time.process_time() - processor
            seconds = times[-1] - times[0] + exposed
            beyond = max(0.0, seconds - len(took) * usual)  # noise is on both sides of the usual step
            _say(answers, vars(Block(seconds, processor, beyond, parts)))


def drained(local: prsgd.LocalSGD | None) -> float:
    """Wait for an average that is under way, so that it does not travel in the others' turns; the steps that are left
    of its round would have hidden it. Returns the seconds."""
    began = time.perf_counter()
    if local is not None:
        _ = local.is_ending  # waits for what is under way, and lands nothing
    return time.perf_counter() - began


def parts_of(local: prsgd.LocalSGD, steps: int) -> dict[str, float]:
    """Of the averages in the newest so many steps whose records are complete, or of the newest such one before."""
    newest = [record for record in local.records if record.step > local.step - steps]
    records = newest or list(local.records)[-1:]
    return {part: median(getattr(record, f"{part}_seconds") for record in records) for part in PARTS if records}


def accuracy(work: Work) -> float:
    """Of the mean of all ranks' models, on all test samples."""
    import torch
    import torch.distributed as dist

    assert work.accuracy is not None
    mean = copy.deepcopy(work.model)
    with torch.no_grad():
        for tensor in (*mean.parameters(), *mean.buffers()):
            if tensor.is_floating_point():
                dist.all_reduce(tensor)
                tensor /= dist.get_world_size()
    sums = torch.tensor(work.accuracy(mean))
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def _say(answers: TextIO, what: dict[str, object]) -> None:
    print(json.dumps(what), file=answers, flush=True)


if __name__ == "__main__":
    main()
