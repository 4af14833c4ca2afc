"""The job that this process belongs to: do its ranks fit together, do they reach each other, and how fast?

What they tell of themselves travels through the store in which they meet, as JSON, so that it is known also where gloo
cannot connect them.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in torch's own export list

import prsgd
from prsgd.comm import sockets
from prsgd.comm.base import Communicator
from prsgd.comm.job import Job
from prsgd.comm.joining import current, join, serves, stay_inside, store_of
from prsgd.errors import PeerError, PrsgdError
from prsgd.preflight.finding import Finding, is_wrong
from prsgd.preflight.machine import Network, network

LIMIT_SECONDS = 60.0
"""For ranks to come, and for gloo to connect them."""
SUMMED_BYTES = 1 << 24
_TIMES = 5
"""The fastest of so many is told: on a busy machine the others are the machine's."""
_AGAIN_SECONDS = 0.2


_CONNECT = (
    "export GLOO_SOCKET_IFNAME=NAME with the interface by which the machines reach each other, and let no firewall "
    "stand between their ports"
)
_NOT_LOOKED_AT = Finding("note", "network", "not looked at: how to ask for interfaces is known for Linux alone")


@dataclass(frozen=True)
class Versions:
    """Of what all ranks must have alike."""

    prsgd: str
    torch: str
    python: str

    def __str__(self) -> str:
        return f"prsgd {self.prsgd}, torch {self.torch}, Python {self.python}"


def versions() -> Versions:
    """This process's."""
    return Versions(prsgd.__version__, torch.__version__, platform.python_version())


@dataclass(frozen=True)
class Told:
    """What a rank tells of itself."""

    host: str
    versions: Versions
    network: Network | None

    @classmethod
    def read(cls, text: bytes) -> Told:
        """What ``json.dumps(asdict(told))`` wrote.

        >>> told = Told("box", Versions("1", "2", "3"), Network("box", {"lo": "127.0.0.1"}, asked=("lo",)))
        >>> Told.read(json.dumps(asdict(told)).encode()) == told
        True
        """
        found = json.loads(text)
        network = found["network"]
        if network is not None:
            network = Network(**{**network, "asked": tuple(network["asked"])})
        return cls(found["host"], Versions(**found["versions"]), network)


def alone() -> list[Finding]:
    """Without a job."""
    seen = network()
    return [
        Finding("ok", "versions", str(versions())),
        _NOT_LOOKED_AT if seen is None else seen.look(several_machines=None),
    ]


class Meeting:
    """The ranks of a job, come together in its store to be looked at."""

    def __init__(self, ours: Job) -> None:
        self._job = ours
        try:
            if not serves(ours):
                _await(ours)
            self._store: Store = store_of(ours, timeout=timedelta(seconds=LIMIT_SECONDS))
        except PeerError:
            raise
        except (OSError, RuntimeError, dist.DistError):
            raise PeerError(
                f"rank {ours.rank} of {ours.size} found nobody at {ours.address}, port {ours.port} (MASTER_ADDR, "
                f"MASTER_PORT) within {LIMIT_SECONDS:.0f} s"
            ) from None

    def findings(self) -> list[Finding]:
        """The same in every rank, but for the measured times."""
        ours = self._job
        stay_inside(ours)
        mine = Told(platform.node(), versions(), network((ours.address, ours.port)))
        self._store.set(f"doctor/{ours.rank}", json.dumps(asdict(mine)))
        told = list(map(self._told_by, range(ours.size)))
        machines = len({one.host for one in told})
        found = [
            Finding("ok", "job", f"{_count(ours.size, 'rank')} on {_count(machines, 'machine')}"),
            *compare([one.versions for one in told]),
            *networks(told),
        ]
        return found if is_wrong(found) else [*found, *self._connected()]

    def part(self) -> None:
        """Nobody leaves before rank 0 has said what it has to say, since torchrun ends all as soon as one fails; and
        rank 0, which may serve the store, not before the others."""
        if self._job.rank == 0:
            self._store.set("doctor/said", "yes")
            with suppress(RuntimeError, dist.DistError):  # one has ended some other way
                self._store.wait([f"doctor/left/{rank}" for rank in range(1, self._job.size)])
        else:
            self._store.wait(["doctor/said"])
            self._store.set(f"doctor/left/{self._job.rank}", "yes")

    def _told_by(self, rank: int) -> Told:
        try:
            text = self._store.get(f"doctor/{rank}")
        except (RuntimeError, dist.DistError):
            missing = [str(r) for r in range(self._job.size) if not self._store.check([f"doctor/{r}"])]
            raise PeerError(f"rank {', '.join(missing)} did not come within {LIMIT_SECONDS:.0f} s") from None
        return Told.read(text)

    def _connected(self) -> list[Finding]:
        before = sockets.listening()
        try:
            join(self._job, self._store, backend=None, timeout=timedelta(seconds=LIMIT_SECONDS))
            comm = current(timeout_seconds=LIMIT_SECONDS)
            speed = measure(comm)
        except (RuntimeError, dist.DistError, PrsgdError) as error:
            why = str(error).splitlines()[0]
            return [Finding("error", "link", f"the ranks could not be connected: {why}", _CONNECT)]
        places = sorted({sockets.readable(endpoint) for endpoint in sockets.listening() - before})
        listed = ", ".join(f"{address} port {port}" for address, port in places)
        return [speed, Finding("ok", "listening", f"rank {self._job.rank}: {listed or 'nowhere'}")]


def _await(ours: Job) -> None:
    """Until somebody listens where the ranks meet, or an OSError: torch would try for twice as long, and say so in a
    hundred lines."""
    until = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            socket.create_connection((ours.address, ours.port), timeout=LIMIT_SECONDS).close()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(_AGAIN_SECONDS)


def compare(told: Sequence[Versions]) -> list[Finding]:
    """A line for each that differs by rank, or one that they are all alike. A patch release of Python is no
    difference, nor is what torch was built for.

    >>> ours = Versions("0.1.0", "2.13.0+cpu", "3.11.7")
    >>> [found.text for found in compare([ours, replace(ours, torch="2.12.0"), replace(ours, python="3.11.9")])]
    ['torch is 2.13.0 in rank 0, 2; 2.12.0 in rank 1']
    """
    kinds: dict[str, Callable[[Versions], str]] = {
        "prsgd": lambda one: one.prsgd,
        "torch": lambda one: one.torch.partition("+")[0],
        "Python": lambda one: one.python.rpartition(".")[0],
    }
    found = []
    for name, of in kinds.items():
        by_version: dict[str, list[str]] = {}
        for rank, one in enumerate(told):
            by_version.setdefault(of(one), []).append(str(rank))
        if len(by_version) > 1:
            listed = "; ".join(f"{version} in rank {', '.join(ranks)}" for version, ranks in by_version.items())
            level = "error" if name == "prsgd" else "warning"
            found.append(Finding(level, "versions", f"{name} is {listed}", "install one version everywhere"))  # type: ignore[arg-type]
    return found or [Finding("ok", "versions", str(told[0]))]


def networks(told: Sequence[Told]) -> list[Finding]:
    """What is wrong with the machines' networks, one line each, or how it is with that of rank 0."""
    several = len({one.host for one in told}) > 1
    seen: dict[tuple[str, Finding], int] = {}
    for rank, one in enumerate(told):
        if one.network is not None:
            seen.setdefault((one.host, one.network.look(several_machines=several)), rank)
    wrong = [
        replace(found, text=f"rank {rank} on {host}: {found.text}")
        for (host, found), rank in seen.items()
        if found.level != "ok"
    ]
    return wrong or [found for _, found in seen][:1] or [_NOT_LOOKED_AT]


def measure(comm: Communicator) -> Finding:
    """Sums of a small and of a large buffer, by all ranks."""
    if comm.num_workers == 1:
        return Finding("note", "link", "one rank alone has nobody to average with")
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    seconds = []
    for num_bytes in (4, SUMMED_BYTES):
        flat = torch.ones(num_bytes // 4, device=device)
        times = []
        for _ in range(_TIMES):
            begin = time.perf_counter()
            comm.all_reduce(flat).wait()
            times.append(time.perf_counter() - begin)
        seconds.append(min(times))
    return Finding(
        "ok", "link",
        f"an all-reduce of {SUMMED_BYTES >> 20} MiB takes {seconds[1] * 1e3:.3g} ms, one of a single number "
        f"{seconds[0] * 1e3:.3g} ms ({dist.get_backend()})",
    )  # fmt: skip


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
