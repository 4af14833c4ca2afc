"""Faults at random moments, and what becomes of the run: kills, two at once, hangs, a link that is down for 3 s.

python bench/chaos.py --kills 50 --pairs 20 --cuts 10     # states, and torchrun that starts again
python bench/chaos.py --elastic --kills 200 --pairs 20 --hangs 20 --lighthouses 10 --cuts 10     # TorchFT

(Cuts are made as root, in network namespaces.)

A kill takes whichever worker chance says, the one with rank 0 too, while all average; the next comes after all have
gone on. "Rounds lost" are averages that had landed and are made again; "recovered" is the time from the fault to the
next average of all workers; with TorchFT it is the longest gap between two averages of a worker that was not harmed,
and "joined" the time from when a worker that was started in its place is ready to its first average. At the end all
models must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from prsgd.bench.links import Link, NoLinkError, Place, made
from prsgd.comm.job import Job, elastic_environment

WORKER = Path(__file__).with_name("chaos_worker.py")
LIMIT_SECONDS = 60.0
"""In which a run must go on after a fault."""
START_SECONDS = 300.0
"""In which it must begin: Python's imports on a busy machine."""


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
    joined: list[float] = field(default_factory=list)
    alike: bool = False

    def line(self) -> str:
        rounds = f"{median(self.lost):g} / {max(self.lost)}" if self.lost else ""
        times, joined = (f"{median(s):.2f} / {max(s):.2f} s" if s else "" for s in (self.seconds, self.joined))
        apart = "0" if self.alike else "NOT 0"
        return f"| {self.fault} | {self.survived} of {self.tried} | {rounds} | {times} | {joined} | {apart} |"


class Run:
    """The folder of a run, and what its workers have written there."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self.workers = folder, workers
        self._said: list[list[dict[str, Any]]] = [[] for _ in range(workers)]
        self._read_bytes = [0] * workers

    def said(self, worker: int) -> list[dict[str, Any]]:
        """All words of a worker; only what is new is read, since a long run has many and is asked often."""
        path = self.folder / f"said-{worker}.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read_bytes[worker])
                whole, _, _ = file.read().rpartition(b"\n")
            self._read_bytes[worker] += len(whole) + 1 if whole else 0
            self._said[worker] += [json.loads(line) for line in whole.splitlines() if line.endswith(b"}")]
        return self._said[worker]

    def newest(self) -> list[dict[str, Any]]:
        """The last word of each worker."""
        return [self.said(worker)[-1] for worker in range(self.workers)]

    def averaging_since(self, moment: float, workers: Sequence[int]) -> float | None:
        """When these had all landed an average after ``moment``; None: they have not yet."""
        found = []
        for worker in workers:
            later = list(takewhile(lambda word: word["at"] > moment, reversed(self.said(worker))))
            landed = [word["at"] for word in later if "starts" not in word]
            if not landed:
                return None
            found.append(landed[-1])
        return float(max(found))

    def begin(self) -> None:
        """Wait for the first average of all."""
        self.await_average(0.0, limit_seconds=START_SECONDS)

    def await_average(
        self, moment: float, workers: Sequence[int] | None = None, *, limit_seconds: float = LIMIT_SECONDS
    ) -> float:
        deadline = time.time() + limit_seconds
        while time.time() < deadline:
            at = self.averaging_since(moment, range(self.workers) if workers is None else workers)
            if at is not None:
                return at
            time.sleep(0.02)
        raise LostError(f"no average of all within {limit_seconds:g} s")

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
        run.begin()
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
                began = max(_starts(run, i)["at"] for i in range(workers))
                tries.seconds.append(run.await_average(began) - moment)
                again = min(_starts(run, i)["round"] for i in range(workers))  # by now of a worker that has its state
            except LostError as error:
                print(f"{tries.fault}: {error}", file=sys.stderr)
                break
            tries.lost.append(done - again)
            tries.survived += 1
        tries.alike = run.end()
    return tries


def _starts(run: Run, worker: int) -> dict[str, Any]:
    """The newest word that a worker has said when it starts: the first one before it has looked for a state."""
    return next(word for word in reversed(run.said(worker)) if "starts" in word)


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
            run.begin()
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


class Crew(Run):
    """Workers that come and go, and their lighthouse at the place of the first."""

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        super().__init__(folder, len(places))
        self.places, port = places, _free_port()
        self._address = f"{places[0].address}:{port}"
        options = "--min_replicas", "1", "--heartbeat_timeout_ms", "500", "--quorum_tick_ms", "20"
        command = [*places[0].command, "torchft_lighthouse", "--bind", self._address, *options]
        self._words = (folder / "words").open("a")
        self._lighthouse_command = command
        self.processes: dict[int, Started] = {}
        self.light()
        for worker in range(len(places)):
            self.processes[worker] = self._start(worker)

    def light(self) -> None:
        """Start the lighthouse, at the place where it always is."""
        self.lighthouse = subprocess.Popen(self._lighthouse_command, stdout=self._words, stderr=self._words)

    def replace(self, worker: int) -> None:
        """Start another one in its place."""
        self.processes[worker].kill()
        self.processes[worker].wait()
        self.processes[worker] = self._start(worker)

    def close(self) -> None:
        for process in (*self.processes.values(), self.lighthouse):
            process.kill()
            process.wait()
        self._words.close()

    def longest_gap(self, moment: float, workers: Sequence[int]) -> float:
        """Between two averages of any of these, of which the second came after ``moment``."""
        gaps: list[float] = []
        for worker in workers:
            times = [word["at"] for word in self.said(worker) if "starts" not in word]
            gaps += [after - before for before, after in pairwise(times) if after > moment]
        return max(gaps)

    def _start(self, worker: int) -> Started:
        place = self.places[worker]
        env = {**_at(place), **elastic_environment(worker, self.workers, self._address)}
        arguments = [str(WORKER), str(self.folder), "torchft"]
        if not place.command:
            return Forked(arguments, env, self._words.name)
        command = [*place.command, sys.executable, *arguments]
        return subprocess.Popen(command, env=env, stdout=self._words, stderr=self._words)


class Started(Protocol):
    """A worker's process."""

    pid: int

    def kill(self) -> None: ...
    def wait(self) -> int | None: ...


class Forked:
    """A Python program in a process that is forked from one which has imported torch: a start takes seconds of all
    cores otherwise, which 200 kills would mostly be made of."""

    context = multiprocessing.get_context("forkserver")

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], words: str) -> None:
        self.context.set_forkserver_preload(["torch._dynamo", "torchft", "prsgd.comm.torch_ft", "prsgd.core.local_sgd"])
        self._process = self.context.Process(target=_be, args=(arguments, env, words))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _be(arguments: Sequence[str], env: Mapping[str, str], words: str) -> None:
    """What a forked process does."""
    file = os.open(words, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(env)
    sys.argv = list(arguments)
    runpy.run_path(arguments[0], run_name="__main__")


def harms(
    what: str, number: int, at_once: int, chance: random.Random, harm: Callable[[Crew, list[int]], bool], link: Link, *,
    workers: int = 4,
) -> Tries:  # fmt: skip
    """``harm`` does it to ``at_once`` workers, and says whether others are to be started in their places."""
    tries = Tries(f"{what}, torchft")
    with made(link, workers) as places, tempfile.TemporaryDirectory() as folder:
        crew = Crew(Path(folder), places)
        try:
            crew.begin()
            for _ in range(number):
                time.sleep(chance.uniform(1.0, 2.0))
                # The lighthouse is at the first one's place: a link that is cut there cuts it off from all.
                victims = chance.sample(range(1 if harm is _cut_off else 0, workers), at_once)
                others = [worker for worker in range(workers) if worker not in victims]
                done, moment = max(word["round"] for word in crew.newest()), time.time()
                tries.tried += 1
                try:
                    gone = harm(crew, victims)
                    crew.await_average(max(moment, time.time()), others)
                    tries.seconds.append(crew.longest_gap(moment, others))
                    tries.lost.append(max(0, done - min(crew.newest()[worker]["round"] for worker in others)))
                    for victim in victims:
                        before = len(crew.said(victim))
                        if gone:
                            crew.replace(victim)
                        crew.await_average(time.time(), [victim])
                        ready = [word["at"] for word in crew.said(victim)[before:] if "starts" in word]
                        first = next(w["at"] for w in crew.said(victim)[before:] if "starts" not in w)
                        tries.joined += [first - ready[0]] if ready else []
                except LostError as error:
                    print(f"{tries.fault}: {error}", file=sys.stderr)
                    break
                tries.survived += 1
            tries.alike = crew.end()
        finally:
            crew.close()
    return tries


def _killed(crew: Crew, victims: list[int]) -> bool:
    for victim in victims:
        crew.processes[victim].kill()
    time.sleep(1.0)
    return True


def _stopped(crew: Crew, victims: list[int]) -> bool:
    for victim in victims:
        os.kill(crew.processes[victim].pid, signal.SIGSTOP)
    time.sleep(5.0)
    for victim in victims:
        os.kill(crew.processes[victim].pid, signal.SIGCONT)
    return False


def _stopped_for_ever(crew: Crew, victims: list[int]) -> bool:
    for victim in victims:
        os.kill(crew.processes[victim].pid, signal.SIGSTOP)
    time.sleep(5.0)
    return True


def _lighthouse_gone(crew: Crew, _: list[int]) -> bool:
    """For 3 s, in which all go on; those that come back then find it where it was."""
    crew.lighthouse.kill()
    crew.lighthouse.wait()
    time.sleep(1.0)
    crew.await_average(time.time())
    time.sleep(2.0)
    crew.light()
    return False


def _cut_off(crew: Crew, victims: list[int]) -> bool:
    for state, seconds in (("down", 3.0), ("up", 0.0)):
        for victim in victims:
            _set(crew.places[victim].command[-1], state)
        time.sleep(seconds)
    return False


def _at(place: Place) -> dict[str, str]:
    return {**os.environ, "GLOO_SOCKET_IFNAME": place.interface, "OMP_NUM_THREADS": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _worker_at(place: Place, rank: int, places: Sequence[Place], folder: str) -> subprocess.Popen[bytes]:
    ours = Job(rank, len(places), 0, places[0].address, 29500, on_one_machine=False, has_store=False)
    command = [*place.command, sys.executable, str(WORKER), folder, "torchrun"]
    return subprocess.Popen(command, env={**_at(place), **ours.environment()})


def _set(namespace: str, state: str) -> None:
    subprocess.run(["ip", "-n", namespace, "link", "set", "wire0", state], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Faults at random moments.")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--hangs", type=int, default=0)
    parser.add_argument("--cuts", type=int, default=0)
    parser.add_argument("--lighthouses", type=int, default=0)
    parser.add_argument("--elastic", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # torchrun is there
    chance = random.Random(args.seed)
    loopback, wire = Link.parse("loopback"), Link.parse("1Gbit")
    if args.elastic:
        rows = [
            ("SIGKILL of one of 4", args.kills, 1, _killed, loopback, 4),
            ("SIGKILL of two of 4", args.pairs, 2, _killed, loopback, 4),
            ("SIGSTOP for 5 s of one of 4", args.hangs, 1, _stopped, loopback, 4),
            ("SIGSTOP for ever of one of 4", args.hangs, 1, _stopped_for_ever, loopback, 4),
            ("lighthouse dead for 3 s", args.lighthouses, 0, _lighthouse_gone, loopback, 4),
            ("link of one of 3 down 3 s", args.cuts, 1, _cut_off, wire, 3),
        ]
        kinds = [
            (number, partial(harms, what, number, at_once, chance, harm, link, workers=workers))
            for what, number, at_once, harm, link, workers in rows
        ]
    else:
        kinds = [
            (args.kills, partial(kills, args.kills, 1, 3, chance)),
            (args.pairs, partial(kills, args.pairs, 2, 4, chance)),
            (args.cuts, partial(cuts, args.cuts, chance)),
        ]
    print("| fault | survived | rounds lost (median / most) | recovered (median / worst) | joined | models apart |")
    print("|---|---|---|---|---|---|")
    for fault in (fault for number, fault in kinds if number):
        try:
            print(fault().line(), flush=True)
        except NoLinkError as error:
            print(f"left out: {error}", file=sys.stderr)
        except LostError as error:
            print(f"it did not begin: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
