"""Does a calibrated cluster predict real processes? Seconds per round, predicted and measured.

Two gloo processes that compute, on loopback and on a link of 1 Gbit/s (two network namespaces joined by a veth pair,
shaped with tbf: needs root and iproute2, otherwise skipped with the reason), and four whose steps are mostly sleep;
for periods 8 and 32 and overlaps 0, 1 and 6. All combinations run in turn, three times, with a
calibration before, between and after; medians are compared.

    python bench/cluster.py [loopback] [shaped] [sleeping]
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import prsgd
from prsgd.clocks.base import Sent
from prsgd.cluster.calibration import calibrate
from prsgd.cluster.clock import ClusterClock
from prsgd.cluster.model import Cluster

COMBINATIONS = [(period, overlap) for period in (8, 32) for overlap in (0, 1, 6)]
SETTINGS = {
    "loopback": (2, "2 processes that compute, loopback"),
    "shaped": (2, "2 processes that compute, 1 Gbit/s"),
    "sleeping": (4, "4 processes, steps mostly sleep, loopback"),
}
WIDTH = {"loopback": 700, "shaped": 700, "sleeping": 1000}
ROUNDS = {8: 16, 32: 6}
TIMEOUT_SECONDS = 400


def rank(setting: str) -> None:
    """One process: calibrate, then measure every combination twice; rank 0 prints JSON."""
    torch.set_num_threads(1)
    comm = prsgd.init()
    torch.manual_seed(0)
    width = WIDTH[setting]
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(128 if setting != "sleeping" else 8, width)

    def step() -> None:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if setting == "sleeping":
            time.sleep(max(0.0, 0.03 - (time.perf_counter() - began)))
        optimizer.step()

    calibrated = [calibrate(model, optimizer, step, comm)]
    found: dict[str, list[float]] = {}
    for _ in range(3):
        for period, overlap in COMBINATIONS:
            with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(period), overlap=overlap, comm=comm) as local:
                ends = []
                for t in range(1, period * (ROUNDS[period] + 1) + 1):
                    step()
                    if t % period == 0:
                        ends.append(time.perf_counter())
            rounds = [b - a for a, b in itertools.pairwise(ends)]
            found.setdefault(f"{period} {overlap}", []).extend(rounds)
            bytes_sent = local.records[0].bytes_sent
        calibrated.append(calibrate(model, optimizer, step, comm))
    if comm.workers.start == 0:
        seconds = {key: median(rounds) for key, rounds in found.items()}
        print("RESULT " + json.dumps([[vars_of(one) for one in calibrated], bytes_sent, seconds]), flush=True)


def vars_of(cluster: Cluster) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(cluster)


def predicted(cluster: Cluster, period: int, overlap: int, bytes_sent: int) -> float:
    """Seconds of a round after the first, by the cluster's clock; a step's spread is left out."""
    n = len(cluster.speeds)
    clock = ClusterClock(cluster)
    everyone = list(range(n))
    ends = []
    for number in (1, 2):
        for t in range(1, period + 1):
            clock.computed(everyone)
            if t == period - overlap or (t == period and not overlap):
                for i in everyone:
                    clock.closed(i)
                clock.launched([])
            if t == period:
                clock.arrived(Sent(bytes_sent), round=number, flight_seconds=0.0)
                for i in everyone:
                    clock.landed(i, number)
        ends.append(max(clock(i) for i in everyone))
    return ends[1] - ends[0]


def start(setting: str, processes: int) -> list[subprocess.Popen[str]]:
    shaped = setting == "shaped"
    if shaped:
        host, port = "10.231.7.1", 29511
    else:
        host = "127.0.0.1"
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
    found = []
    for number in range(processes):
        env = {
            **os.environ, "RANK": str(number), "WORLD_SIZE": str(processes), "MASTER_ADDR": host,
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": f"prsgd{number}" if shaped else "lo",
        }  # fmt: skip
        inside = ["ip", "netns", "exec", f"prsgd{number}"] if shaped else []
        command = [*inside, sys.executable, __file__, "--rank", setting]
        found.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    return found


def measure(setting: str, processes: int) -> Any:
    ranks = start(setting, processes)
    try:
        out = ranks[0].communicate(timeout=TIMEOUT_SECONDS)[0]
        for other in ranks[1:]:
            other.communicate(timeout=30)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
    return json.loads(next(line for line in out.splitlines() if line.startswith("RESULT "))[7:])


def shell(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def link_up() -> None:
    for number in (0, 1):
        shell("ip", "netns", "add", f"prsgd{number}")
    shell("ip", "link", "add", "prsgd0", "netns", "prsgd0", "type", "veth", "peer", "name", "prsgd1", "netns", "prsgd1")
    for number in (0, 1):
        place = ("ip", "netns", "exec", f"prsgd{number}")
        shell(*place, "ip", "addr", "add", f"10.231.7.{number + 1}/24", "dev", f"prsgd{number}")
        shell(*place, "ip", "link", "set", f"prsgd{number}", "up")
        shell(*place, "ip", "link", "set", "lo", "up")
        shape = ("tbf", "rate", "1gbit", "burst", "512kb", "latency", "50ms")
        shell(*place, "tc", "qdisc", "add", "dev", f"prsgd{number}", "root", *shape)


def link_down() -> None:
    for number in (0, 1):
        subprocess.run(["ip", "netns", "del", f"prsgd{number}"], capture_output=True, check=False)


def report(title: str, result: Any) -> None:
    calibrated, bytes_sent, measured = result
    usual = {
        key: median(one[key] for one in calibrated)
        for key in ("step_seconds", "bytes_per_second", "latency_seconds", "copy_seconds")
    }
    speeds = tuple(median(each) for each in zip(*(one["speeds"] for one in calibrated)))
    cluster = Cluster(title, speeds, **usual)
    print(f"\n{title}: {bytes_sent / 1e6:.1f} MB sent an average, a step {1e3 * cluster.step_seconds:.1f} ms,")
    print(
        f"latency {1e3 * cluster.latency_seconds:.2f} ms, {cluster.bytes_per_second / 1e6:.0f} MB/s, "
        f"copying {1e3 * cluster.copy_seconds:.1f} ms"
    )
    print("| period | overlap | predicted | measured | predicted / measured |\n|---|---|---|---|---|")
    for period, overlap in COMBINATIONS:
        seconds, seen = predicted(cluster, period, overlap, bytes_sent), measured[f"{period} {overlap}"]
        print(f"| {period} | {overlap} | {1e3 * seconds:.0f} ms | {1e3 * seen:.0f} ms | {seconds / seen:.2f} |")


def main(settings: list[str]) -> None:
    for setting in settings or SETTINGS:
        processes, title = SETTINGS[setting]
        if setting == "shaped":
            if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
                print(f"\n{title}: skipped, it needs root and iproute2")
                continue
            link_down()
            try:
                link_up()
            except subprocess.CalledProcessError as error:
                link_down()
                print(f"\n{title}: skipped, no network namespaces here: {error.stderr.decode().strip()}")
                continue
        try:
            report(title, measure(setting, processes))
        finally:
            if setting == "shaped":
                link_down()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(sys.argv[2])
    else:
        sys.path.insert(0, str(Path(__file__).parent))
        main(sys.argv[1:])
