"""What the core costs: averages, waiting, hooks, memory and the looped fleet, against bare torch.

    python bench/core.py            # a few minutes; two gloo ranks over loopback, one torch thread each
    python bench/core.py --quick    # does it run?

Whatever is compared is measured in turns (A B, B A) in the same processes, and a ratio is one of medians
(for the fleet, where steps take long, the median of the pairs' own).
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from models import resnet50_tensors
from torch import nn

import prsgd
from prsgd.tasks.resnet import resnet

NEVER = prsgd.every(10**9)
ROWS_TOLERANCE = 0.05
"""Resident memory is that of a whole process: 5 % of a row of 25M float32 is 5 MB of whatever else it touched."""


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    launches: int = 3
    """Of the two ranks, for an average's cost: gloo's speed differs from launch to launch more than within one."""
    small_pairs: int = 300
    large_pairs: int = 35
    """In each launch."""
    hook_pairs: int = 5000
    wait_runs: int = 4
    wait_averages: int = 26
    """Of each run; 4 runs of 26 are 104 for each overlap."""
    fleet_pairs: int = 100


QUICK = Amount(1, small_pairs=10, large_pairs=3, hook_pairs=100, wait_runs=1, wait_averages=3, fleet_pairs=2)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    measurement: str
    median: str
    ratio: str = ""
    target: str = ""
    reached: bool | None = None

    def __str__(self) -> str:
        reached = "" if self.reached is None else "yes" if self.reached else "NO"
        return f"{self.measurement:<42} {self.median:>11} {self.ratio:>8} {self.target:>8} {reached:>7}".rstrip()


# Measuring


def in_turns(calls: Sequence[Callable[[], object]], num_turns: int, ready: Callable[[], object]) -> list[list[float]]:
    """Seconds of each call, called in alternating order; ``ready`` runs before each."""
    seconds: list[list[float]] = [[] for _ in calls]
    for turn in range(num_turns):
        order = range(len(calls)) if turn % 2 == 0 else reversed(range(len(calls)))
        for which in order:
            ready()
            began = time.perf_counter()
            calls[which]()
            seconds[which].append(time.perf_counter() - began)
    return seconds


def average_cost(make_model: Callable[[], nn.Module], num_pairs: int) -> list[list[float]]:
    """Seconds of a bare all_reduce with a copy in and one out, of a step with an average as large, and of a bare step.

    There are no gradients: a step only looks at each parameter.
    """
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(1)) as local:
        for _ in range(5):
            optimizer.step()
        num_floats = local.records[0].bytes_sent // 4  # of two workers each sends the whole buffer once
        source, flat = torch.full((num_floats,), 0.0), torch.full((num_floats,), 0.0)
        group = dist.new_group()  # as LocalSGD does: the default group's connections are warm from the barrier

        def bare() -> None:
            flat.copy_(source)
            dist.all_reduce(flat, group=group)
            source.copy_(flat)

        in_turns((bare, optimizer.step, plain.step), 3, dist.barrier)
        return in_turns((bare, optimizer.step, plain.step), num_pairs, dist.barrier)


def waits(
    overlaps: Sequence[int], num_runs: int, num_averages: int, step_seconds: float
) -> dict[int, list[prsgd.Record]]:
    """Records of averages of 4M parameters with period 8, in runs with one overlap after the other."""
    model = nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(4)))
    records: dict[int, list[prsgd.Record]] = {overlap: [] for overlap in overlaps}
    for run in range(num_runs):
        for overlap in overlaps if run % 2 == 0 else reversed(overlaps):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            dist.barrier()
            with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(8), overlap=overlap) as local:
                for _ in range(8 * num_averages):
                    time.sleep(step_seconds)  # computing would leave the transfer no core of this machine's two
                    optimizer.step()
            records[overlap] += local.records[:num_averages]  # without that of the end of the run
    return records


def hook_cost(overlap: int, num_pairs: int) -> float:
    """Seconds that the hooks add to an optimizer.step() without an average."""
    optimizers = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-6)
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with prsgd.LocalSGD(model, optimizers[1], schedule=NEVER, overlap=overlap):
        plain, hooked = in_turns([o.step for o in optimizers], num_pairs, lambda: None)
    return median(hooked) - median(plain)


def memory(overlap: int, hosted: int) -> tuple[float, float]:
    """Rows of 25M float32 that LocalSGD holds between averages, and the most during one, beyond model and gradients."""
    averaging_memory(nn.Linear(8, 8), overlap, hosted)  # loads what code and connections need
    return averaging_memory(resnet50_tensors(), overlap, hosted)


def averaging_memory(model: nn.Module, overlap: int, hosted: int) -> tuple[float, float]:
    row_bytes = 4 * sum(p.numel() for p in model.parameters())
    workers = prsgd.Fleet(model, dist.get_world_size() * hosted) if hosted > 1 else model
    for module in workers.modules if isinstance(workers, prsgd.Fleet) else (model,):
        *_, last = module.parameters()
        last.grad = torch.zeros_like(last)  # a fleet's worker steps if it has a gradient
    del model, module, last
    optimizer = torch.optim.SGD(workers.parameters(), lr=0.1)
    before = resident_bytes("VmRSS")
    with prsgd.LocalSGD(workers, optimizer, schedule=prsgd.every(4), overlap=overlap):
        for _ in range(12):
            optimizer.step()
        held = resident_bytes("VmRSS") - before
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak starts anew
        for _ in range(8):
            optimizer.step()
        peak = resident_bytes("VmHWM") - before
    return held / row_bytes, peak / row_bytes


def resident_bytes(kind: str) -> int:
    """VmRSS: memory in use now; VmHWM: the most since the peak was reset."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))


def fleet_cost(num_pairs: int) -> list[list[float]]:
    """Seconds of a step of 8 ResNet-20s: plain modules with an optimizer each, and a hooked fleet."""
    torch.manual_seed(0)
    model = resnet(20)
    x, y = torch.randn(8, 4, 3, 32, 32), torch.randint(10, (8, 4))
    modules = [resnet(20) for _ in range(8)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in modules]
    fleet = prsgd.Fleet(model, 8, mode="loop")
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.01, momentum=0.9)

    def plain_step() -> None:
        for module, own, x_i, y_i in zip(modules, optimizers, x, y):
            own.zero_grad()
            nn.functional.cross_entropy(module(x_i), y_i).backward()
            own.step()

    def fleet_step() -> None:
        optimizer.zero_grad()
        fleet.backward(nn.functional.cross_entropy, x, y)
        optimizer.step()

    with prsgd.LocalSGD(fleet, optimizer, schedule=NEVER):
        in_turns((plain_step, fleet_step), 3, lambda: None)
        return in_turns((plain_step, fleet_step), num_pairs, lambda: None)


# The table


def average_lines(amount: Amount) -> list[Line]:
    lines = []
    for name, make_model, num_pairs, limit in (
        ("0.27M", resnet, amount.small_pairs, 1.6),
        ("25M", resnet50_tensors, amount.large_pairs, 1.25),
    ):
        launches = [
            prsgd.launch(average_cost, processes=2, args=(make_model, num_pairs)) for _ in range(amount.launches)
        ]
        bare, step, plain = (median(s for ranks in launches for r in ranks for s in r[which]) for which in range(3))
        ours = step - plain
        lines += [
            Line(f"bare all_reduce and two copies, {name}", f"{1e3 * bare:.2f} ms"),
            _at_most(f"blocking average, {name}", f"{1e3 * ours:.2f} ms", ours / bare, limit),
        ]
    return lines


def wait_lines(amount: Amount, step_seconds: float = 0.05) -> list[Line]:
    args = ((0, 1, 4), amount.wait_runs, amount.wait_averages, step_seconds)
    ranks = prsgd.launch(waits, processes=2, args=args)
    waited = {d: median(r.wait_seconds for rank in ranks for r in rank[d]) for d in (0, 1, 4)}
    flown = median(r.flight_seconds for rank in ranks for r in rank[1])
    lines = [
        Line(f"transfer of 4M, overlap 1 (step: {1e3 * step_seconds:.0f} ms)", f"{1e3 * flown:.2f} ms"),
        Line("waited per average of 4M, overlap 0", f"{1e3 * waited[0]:.3f} ms"),
    ]
    for d in (1, 4):
        share = waited[d] / waited[0]
        name, text = f"waited per average of 4M, overlap {d}", f"{1e3 * waited[d]:.3f} ms"
        lines.append(Line(name, text, f"{100 * share:.2f} %", "< 5 %", share < 0.05))
    return lines


def hook_lines(amount: Amount) -> list[Line]:
    lines = []
    for overlap in (0, 1):
        cost = median(prsgd.launch(hook_cost, processes=2, args=(overlap, amount.hook_pairs)))
        name = f"hooks, a step without average, overlap {overlap}"
        lines.append(Line(name, f"{1e6 * cost:.1f} us", "", "< 8 us", cost < 8e-6))
    return lines


def memory_lines() -> list[Line]:
    lines = []
    for overlap, hosted in ((0, 1), (1, 1), (0, 4), (2, 4)):
        held, peak = map(max, zip(*prsgd.launch(memory, processes=2, args=(overlap, hosted))))
        target = 1 + hosted * (overlap > 0)
        name = f"memory held, overlap {overlap}, {hosted} hosted"
        lines += [
            Line(name, f"{held:.2f} rows", "", f"{target} rows", held <= target + ROWS_TOLERANCE),
            Line("  most during an average", f"{peak:.2f} rows", "", f"{target} rows", peak <= target + ROWS_TOLERANCE),
        ]
    return lines


def fleet_lines(amount: Amount) -> list[Line]:
    [(plain, fleet)] = prsgd.launch(fleet_cost, processes=1, args=(amount.fleet_pairs,))
    ratio = median(p / f for p, f in zip(plain, fleet))
    return [
        Line("step of 8 ResNet-20s, 8 optimizers", f"{1e3 * median(plain):.1f} ms"),
        Line(
            "step of a looped fleet of 8", f"{1e3 * median(fleet):.1f} ms", f"{ratio:.3f}x", ">= 0.98x", ratio >= 0.98
        ),
    ]


def _at_most(name: str, text: str, ratio: float, limit: float) -> Line:
    return Line(name, text, f"{ratio:.2f}x", f"<= {limit}x", ratio <= limit)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the core costs, against bare torch.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: few pairs, no meaningful numbers")
    parser.add_argument("--limit-seconds", type=float, default=1200.0, help="time limit of the whole (default: 1200)")
    args = parser.parse_args()
    amount = QUICK if args.quick else Amount()
    signal.alarm(math.ceil(args.limit_seconds))  # ends this process, and with it the ranks
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f} at the start")
    print(f"{Line('measurement', 'median', 'ratio', 'target')} reached\n{'-' * 80}", flush=True)
    parts: tuple[Callable[[], list[Line]], ...] = (
        lambda: average_lines(amount),
        lambda: wait_lines(amount),
        lambda: hook_lines(amount),
        lambda: memory_lines(),
        lambda: fleet_lines(amount),
    )
    for part in parts:
        print(*part(), sep="\n", flush=True)


if __name__ == "__main__":
    main()
