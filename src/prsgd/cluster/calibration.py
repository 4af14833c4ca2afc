"""A real group of processes, measured: step times, latency and bandwidth, as a cluster that predicts it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from statistics import median, stdev

import torch
from torch import nn
from torch.optim import Optimizer

from prsgd._check import whole_number
from prsgd.cluster.model import Cluster
from prsgd.comm.base import Communicator
from prsgd.comm.links import bytes_summed
from prsgd.core.local_sgd import LocalSGD
from prsgd.errors import UsageError
from prsgd.schedules.fixed import every

PERIOD = 4
SMALL = 64
"""Numbers in a message whose size takes no time."""


def calibrate(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[], None],
    comm: Communicator,
    *,
    steps: int = 60,
    averages: int = 20,
    name: str = "calibrated",
) -> Cluster:
    """A collective of one worker per process: ``step()`` trains one step, ``optimizer.step()`` included.

    Takes ``steps`` steps with LocalSGD, of which the first third warms up, then ``averages`` sums of two sizes.
    The model is trained by them.

    >>> import prsgd
    >>> model = nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> def step():
    ...     optimizer.zero_grad()
    ...     model(torch.ones(8, 4)).square().mean().backward()
    ...     optimizer.step()
    >>> cluster = calibrate(model, optimizer, step, prsgd.init(), steps=24)  # without torchrun: one worker
    >>> cluster.speeds, 0 < cluster.step_seconds < 1
    ((1.0,), True)
    """
    whole_number("steps", steps, at_least=6 * PERIOD)
    if len(comm.workers) != 1:
        raise UsageError("calibrate() measures processes that host one worker each")
    with LocalSGD(model, optimizer, schedule=every(PERIOD), comm=comm) as local:
        for _ in range(steps):
            step()
    spans = [span for span in local.trace.spans() if span.kind == "step" and span.number > steps // 3]
    times = [span.end - span.begin for span in spans]
    copying = median(record.copy_seconds for record in local.records)
    width = _width(local.records[0].bytes_sent, comm.num_workers)
    latency, bandwidth = _link(comm, width, averages, next(model.parameters()).device)
    logs = [math.log(seconds) for seconds in times]
    mine = torch.tensor([[median(times), stdev(logs), copying, latency, bandwidth]], dtype=torch.float64)
    everyone = comm.all_gather(mine.to(next(model.parameters()).device)).wait().cpu()
    usual = everyone[:, 0].tolist()
    return Cluster(
        name=name,
        speeds=tuple(float(f"{max(usual) / one:.6g}") for one in usual),
        step_seconds=max(usual),
        bytes_per_second=float(everyone[:, 4].min()),
        latency_seconds=float(everyone[:, 3].max()),
        jitter=float(f"{float(everyone[:, 1].median()):.3g}"),
        copy_seconds=float(everyone[:, 2].max()),
    )


def _width(bytes_sent: int, workers: int) -> int:
    """float32 numbers in an average for which each worker sends so many bytes."""
    return max(1, round(bytes_summed(workers, bytes_sent) / 4)) if workers > 1 else 1


def _link(comm: Communicator, width: int, averages: int, device: torch.device) -> tuple[float, float]:
    """Of a ring: 2 (N - 1) messages, each of 1/N of the bytes."""
    n = comm.num_workers
    if n == 1:
        return 0.0, 1e12
    small, large = (_quiet([_sum_seconds(comm, size, device) for _ in range(averages)]) for size in (SMALL, width))
    seconds = max(large - small, 0.05 * large)  # where a model is no larger than a message, nobody can tell
    return min(small, large) / (2 * (n - 1)), 2 * (n - 1) / n * 4 * width / seconds


def _quiet(times: list[float]) -> float:
    """The lower quartile: others on the machine only make it longer."""
    return sorted(times)[len(times) // 4]


def _sum_seconds(comm: Communicator, width: int, device: torch.device) -> float:
    flat = torch.zeros(width, device=device)
    comm.all_reduce(torch.zeros(1, device=device)).wait()  # all begin together
    began = time.perf_counter()
    float(comm.all_reduce(flat).wait()[0])  # on a GPU, until it is there
    return time.perf_counter() - began
