"""Faults at random moments, and what becomes of the run: kills, two at once, a link that is down for 3 s.

python bench/chaos.py --kills 50 --pairs 20 --cuts 10     # the last as root: in network namespaces

A kill takes whichever worker chance says, the one with rank 0 too, while all average; the next comes after all have
gone on. "Rounds lost" are averages that had landed and are made again; "recovered" is the time from the fault to the
next average of all workers. At the end all models must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from prsgd.bench.links import Link, NoLinkError, Place, made

WORKER = Path(__file__).with_name("chaos_worker.py")
LIMIT_SECONDS = 60.0
"""In which a run must go on after a fault."""


class LostError(Exception):
    """The run did not go on."""


@dataclass
class Tries:
    """What came of one kind of fault."""

    fault: str
    tried: int = 0
    survived: int = 0
    lost: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    alike: bool = False

    def line(self) -> str:
        rounds = f"{median(self.lost):g} / {max(self.lost)}" if self.lost else ""
        times = f"{median(self.seconds):.2f} / {max(self.seconds):.2f} s" if self.seconds else ""
        apart = "0" if self.alike else "NOT 0"
        return f"| {self.fault} | {self.survived} of {self.tried} | {rounds} | {times} | {apart} |"


class Run:
    """The folder of a run, and what its workers have written there."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers

    def said(self, worker: int) -> list[dict[str, Any]]:
        path = self.folder / f"said-{worker}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def newest(self) -> list[dict[str, Any]]:
        """The last word of each worker."""
        return [self.said(worker)[-1] for worker in range(self.workers)]

    def averaging_since(self, moment: float, workers: Sequence[int]) -> float | None:
        """When these had all landed an average after ``moment``; None: they have not yet."""
        found = []
        for worker in workers:
            later = [word["at"] for word in self.said(worker) if word["at"] > moment and "starts" not in word]
            if not later:
                return None
            found.append(later[0])
        return float(max(found))

    def await_average(self, moment: float, workers: Sequence[int] | None = None) -> float:
        deadline = time.time() + LIMIT_SECONDS
        while time.time() < deadline:
            at = self.averaging_since(moment, range(self.workers) if workers is None else workers)
            if at is not None:
                return at
            time.sleep(0.02)
        raise LostError(f"no average of all within {LIMIT_SECONDS:g} s")

    def end(self) -> bool:
        """Let all end; are their models alike?"""
        (self.folder / "end").touch()
        deadline = time.time() + LIMIT_SECONDS
        while len(models := list(self.folder.glob("model-*"))) < self.workers and time.time() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        return len(models) == self.workers and len({model.read_text() for model in models}) == 1


def kills(number: int, at_once: int, workers: int, chance: random.Random) -> Tries:
    """Under torchrun."""
    tries = Tries(f"SIGKILL of {'one' if at_once == 1 else at_once} of {workers}, torchrun")
    with started(workers, restarts=number + 5) as run:
        run.await_average(0.0)
        for _ in range(number):
            time.sleep(chance.uniform(0.0, 1.0))
            before = run.newest()
            victims = chance.sample(range(workers), at_once)
            moment = time.time()
            for victim in victims:
                os.kill(before[victim]["pid"], signal.SIGKILL)
            tries.tried += 1
            done = max(word["round"] for word in run.newest())
            try:
                while {word["pid"] for word in run.newest()} & {word["pid"] for word in before}:
                    if time.time() > moment + LIMIT_SECONDS:
                        raise LostError("not started again")
                    time.sleep(0.02)
                again = min(next(w for w in reversed(run.said(i)) if "starts" in w)["round"] for i in range(workers))
                began = max(next(w for w in reversed(run.said(i)) if "starts" in w)["at"] for i in range(workers))
                tries.seconds.append(run.await_average(began) - moment)
            except LostError as error:
                print(f"{tries.fault}: {error}", file=sys.stderr)
                break
            tries.lost.append(done - again)
            tries.survived += 1
        tries.alike = run.end()
    return tries


@contextmanager
def started(workers: int, *, restarts: int) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as place:
        options = "--nproc-per-node", str(workers), "--max-restarts", str(restarts)
        command = ["torchrun", *options, str(WORKER), place, "torchrun"]
        with Path(place, "words").open("w") as words:
            process = subprocess.Popen(
                command, stdout=words, stderr=words, start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        try:
            yield Run(Path(place), workers)
        finally:
            process.terminate()
            process.wait(30)


def cuts(number: int, chance: random.Random, *, seconds: float = 3.0) -> Tries:
    """Two workers in namespaces of their own; the link between them is down for some seconds."""
    tries = Tries(f"link down for {seconds:g} s, no restart")
    with made(Link.parse("1Gbit"), 2) as places, tempfile.TemporaryDirectory() as folder:
        processes = [_worker_at(place, rank, places, folder) for rank, place in enumerate(places)]
        run = Run(Path(folder), 2)
        try:
            run.await_average(0.0)
            for _ in range(number):
                time.sleep(chance.uniform(0.0, 1.0))
                name = places[chance.randrange(2)].command[-1]
                done = max(word["round"] for word in run.newest())
                _set(name, "down")
                time.sleep(seconds)
                _set(name, "up")
                moment = time.time()
                tries.tried += 1
                try:
                    tries.seconds.append(run.await_average(moment) - moment)
                except LostError as error:
                    print(f"{tries.fault}: {error}", file=sys.stderr)
                    break
                tries.lost.append(max(0, done - min(word["round"] for word in run.newest())))
                tries.survived += 1
            tries.alike = run.end()
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return tries


def _worker_at(place: Place, rank: int, places: Sequence[Place], folder: str) -> subprocess.Popen[bytes]:
    job = {
        "RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": places[0].address, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": place.interface,
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return subprocess.Popen(
        [*place.command, sys.executable, str(WORKER), folder, "torchrun"], env={**os.environ, **job}
    )


def _set(namespace: str, state: str) -> None:
    subprocess.run(["ip", "-n", namespace, "link", "set", "wire0", state], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults at random moments.")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    faults: list[Callable[[], Tries]] = []
    if args.kills:
        faults.append(lambda: kills(args.kills, 1, 3, chance))
    if args.pairs:
        faults.append(lambda: kills(args.pairs, 2, 4, chance))
    if args.cuts:
        faults.append(lambda: cuts(args.cuts, chance))
    print("| fault | survived | rounds lost (median / most) | recovered (median / worst) | models apart |")
    print("|---|---|---|---|---|")
    for fault in faults:
        try:
            print(fault().line(), flush=True)
        except NoLinkError as error:
            print(f"left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
