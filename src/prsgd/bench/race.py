"""A race: every contestant trains the same model over the same link, in turns.

Each contestant is a team of processes that wait until it is their turn, so that one that fails or hangs is left out by
name and the others go on. In every round every team takes its steps once, in an order that changes; ratios are of the
same round, and what is told is their median.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

from prsgd.bench.contestants import CONTESTANTS, NONE
from prsgd.bench.links import Link, Place, made
from prsgd.bench.rank import PARTS, Block, Orders
from prsgd.errors import PrsgdError

START_SECONDS = 120.0
"""How long a team may take until it is ready."""
STEP_SECONDS = 2.0
"""And so much more for each step."""
BLOCK_SECONDS = 0.5
"""A block of the one that does not communicate takes at least so long."""
EVERY_STEP_SHARE = 8
"""One that communicates at every step takes so many times fewer of them: it is slow, and its steps are alike."""


class DropOutError(PrsgdError):
    """A team cannot go on; the message says why."""


@dataclass(frozen=True)
class Lap:
    """One team's block in one round; seconds are those of the slowest rank."""

    steps: int
    seconds: float
    processor_seconds: float
    sync_seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of one average by what it does, the mean of the ranks; empty unless it leaves records."""
    others_seconds: float = 0.0
    """Of the machine's processors that went to others meanwhile."""


@dataclass
class Race:
    """What came out, of one model over one link."""

    model: str
    link: str
    ranks: int
    period: int
    laps: dict[str, list[Lap]] = field(default_factory=dict)
    """By contestant, one a round."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By contestant, why."""

    @property
    def others_load(self) -> float:
        """How many processors the machine gave to others while a team took its steps: the median of all laps."""
        return median(lap.others_seconds / lap.seconds for laps in self.laps.values() for lap in laps)

    def shares(self, contestant: str) -> list[float]:
        """Of the throughput without communication, round by round."""
        both = zip(self.laps[NONE], self.laps[contestant])
        return [limit.seconds / limit.steps / (lap.seconds / lap.steps) for limit, lap in both]

    def share(self, contestant: str) -> float:
        return median(self.shares(contestant))

    def sync_seconds(self, contestant: str) -> float:
        """What one average takes, beyond the usual steps of its own run."""
        return median(lap.sync_seconds * self.period / lap.steps for lap in self.laps[contestant])

    def processor_seconds(self, contestant: str) -> float:
        """What communication takes of the processor in one period, on the busiest rank."""
        both = zip(self.laps[NONE], self.laps[contestant])
        return self.period * median(
            lap.processor_seconds / lap.steps - limit.processor_seconds / limit.steps for limit, lap in both
        )

    def parts(self, contestant: str) -> dict[str, float]:
        """Where the seconds of one average go, where that is known: the median of the rounds."""
        laps = [lap.parts for lap in self.laps[contestant] if lap.parts]
        return {part: median(lap[part] for lap in laps) for part in PARTS if laps}

    def ranking(self) -> list[str]:
        """The fastest first."""
        return sorted(self.laps, key=self.share, reverse=True)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Race:
        laps = {name: [Lap(**lap) for lap in laps] for name, laps in content["laps"].items()}
        return cls(**{**content, "laps": laps})


def race(
    model: str,
    link: Link,
    contestants: Sequence[str],
    *,
    period: int,
    ranks: int = 2,
    rounds: int = 7,
    tell: Callable[[str], object] = str,
) -> Race:
    """Let them race. Raises NoLinkError if the link cannot be made here."""
    found = Race(model, link.name, ranks, period)
    with made(link, ranks) as places, ExitStack() as stack:
        teams = {}
        for name in [NONE, *(c for c in contestants if c != NONE)]:
            tell(f"{model}, {link.name}: {name} gets ready")
            try:
                warm_up = CONTESTANTS[name].warm_up(period)
                orders = Orders(contestant=name, model=model, period=period, warm_up=warm_up)
                teams[name] = stack.enter_context(team(orders, places))
            except DropOutError as problem:
                found.left_out[name] = str(problem)
        if NONE not in teams:
            raise DropOutError(f"{model}, {link.name}: {found.left_out[NONE]}")
        steps = _steps(teams[NONE], period)
        shuffle = random.Random(0).shuffle
        for round in range(rounds):
            order = list(teams)
            shuffle(order)
            laps = {}
            for name in order:
                tell(f"{model}, {link.name}: round {round + 1} of {rounds}, {name}")
                own = max(2, steps // EVERY_STEP_SHARE) if CONTESTANTS[name].every_step else steps
                try:
                    laps[name] = teams[name].take(own)
                except DropOutError as problem:
                    found.left_out[name] = f"round {round + 1}: {problem}"
                    teams.pop(name).end()
                    found.laps.pop(name, None)
                    if name == NONE:
                        raise
            for name, lap in laps.items():
                found.laps.setdefault(name, []).append(lap)
    return found


def _steps(limit: Team, period: int) -> int:
    """So many, whole periods, that a block takes long enough to be measured."""
    lap = limit.take(period)
    return period * max(1, round(BLOCK_SECONDS / lap.seconds))


class Team:
    """The ranks of one contestant, ready to go."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]], said: Sequence[Path]) -> None:
        self._processes, self._said = processes, said
        self._pipes = [process.stdout for process in processes if process.stdout is not None]
        self._limit_seconds = START_SECONDS

    def wait(self, steps: int) -> None:
        """Until all are ready, with so many steps behind them."""
        self._answers(START_SECONDS + STEP_SECONDS * steps)

    def end(self) -> None:
        """It has no more turns, and must not disturb those of others."""
        _end(self._processes)

    def take(self, steps: int) -> Lap:
        """Let all ranks take so many steps."""
        busy = _busy_seconds()
        self._tell(str(steps))
        limit = START_SECONDS + max(self._limit_seconds, STEP_SECONDS * steps)
        blocks = [Block(**answer) for answer in self._answers(limit)]
        others = max(0.0, _busy_seconds() - busy - sum(block.processor_seconds for block in blocks))
        lap = Lap(
            steps,
            max(block.seconds for block in blocks),
            max(block.processor_seconds for block in blocks),
            max(block.sync_seconds for block in blocks),
            {part: fmean(block.parts[part] for block in blocks) for part in blocks[0].parts},
            others,
        )
        self._limit_seconds = max(self._limit_seconds, 10 * lap.seconds)
        return lap

    def accuracy(self) -> float:
        """Of the mean of its ranks' models."""
        self._tell("accuracy")
        return float(self._answers(START_SECONDS + self._limit_seconds)[0]["accuracy"])

    def _tell(self, line: str) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # its answer will be missing
                process.stdin.write(f"{line}\n")
                process.stdin.flush()

    def _answers(self, limit_seconds: float) -> list[Any]:
        deadline = time.monotonic() + limit_seconds
        answers: dict[int, Any] = {}
        while len(answers) < len(self._processes):
            left = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready, _, _ = select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise DropOutError(f"rank {min(left.values())} did not answer within {limit_seconds:.0f} s")
            for pipe in ready:
                line = pipe.readline()
                if not line:
                    raise DropOutError(f"rank {left[pipe]} ended: {self._last_words(left[pipe])}")
                answers[left[pipe]] = json.loads(line)
        return [answers[rank] for rank in range(len(self._processes))]

    def _last_words(self, rank: int) -> str:
        lines = [line for line in self._said[rank].read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "without a word"


@contextmanager
def team(orders: Orders, places: Sequence[Place]) -> Iterator[Team]:
    """One rank at each place, all ready; they are ended afterwards. Raises DropOutError with the reason."""
    package = CONTESTANTS[orders.contestant].package
    if package is not None and find_spec(package) is None:
        raise DropOutError(f"{package} is not installed (pip install 'prsgd[bench]')")
    with tempfile.TemporaryDirectory(prefix="prsgd-bench-") as folder:
        processes: list[subprocess.Popen[str]] = []
        said = [Path(folder, f"rank{rank}") for rank in range(len(places))]
        try:
            port = _free_port()
            for rank, place in enumerate(places):
                own = replace(orders, rank=rank, ranks=len(places), address=place.address, interface=place.interface)
                own = replace(own, first=places[0].address, port=port)
                command = [*place.command, sys.executable, "-m", "prsgd.bench.rank", json.dumps(vars(own))]
                with said[rank].open("w") as words:
                    processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=words,
                            text=True,
                            start_new_session=True,  # Ctrl-C is ours to answer
                        )
                    )
            ready = Team(processes, said)
            ready.wait(orders.warm_up)
            yield ready
        finally:
            _end(processes)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """At once: nobody waits for what they might still have to say to each other."""
    for process in processes:
        if process.returncode is not None:  # it was ended before, and its number may be another's by now
            continue
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


def _busy_seconds() -> float:
    """Of all processors of the machine, since it was started; 0 where it does not tell."""
    place = Path("/proc/stat")
    if not place.exists():
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft, *_ = map(int, place.read_text().split()[1:9])
    return (user + nice + system + interrupts + soft) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    """On this machine; in a namespace of its own every port is free. None of those that outgoing connections are given,
    as it is listened at a while later."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise DropOutError("no port is free on this machine")
