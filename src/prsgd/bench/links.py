"""Links that hurt: network namespaces of our own, joined by wires with a known rate and delay.

Every rank gets a namespace. Nothing is made outside of them: no interface, route or rule of the machine is touched,
and when the namespaces are gone all else is gone with them. Linux, root and iproute2 are needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prsgd import units
from prsgd.errors import PrsgdError

NAME = re.compile(r"prsgd-bench-(\d+)-\w+")
"""Of the namespaces: the process that made them is told by it."""
MTU = 9000
"""Of the wires with a delay: they are joined by a program, which takes about 10 us a packet."""
SUBNET = "10.213.7"
BURST_SECONDS = 524_288 / 125e6
"""512 kB at 1 Gbit/s, and as long at other rates: what fits into a burst is not held to the rate."""
LEAST_BURST_BYTES = 16_000
"""More than a packet has, or none would pass."""


class NoLinkError(PrsgdError):
    """The link cannot be made here."""


@dataclass(frozen=True)
class Link:
    """What lies between any two ranks.

    >>> Link.parse("100Mbit+10ms")
    Link(name='100Mbit+10ms', bytes_per_second=12500000.0, delay_seconds=0.01)
    """

    name: str
    bytes_per_second: float | None = None
    """None: loopback, as fast as it is."""
    delay_seconds: float = 0.0
    """Of one way."""

    @classmethod
    def parse(cls, text: str) -> Link:
        """``loopback``, a rate as ``1Gbit``, or a rate with the delay of one way as ``1Gbit+10ms``."""
        if text == "loopback":
            return cls(text)
        rate, _, delay = text.partition("+")
        seconds = units.seconds("a link's delay", delay) if delay else 0.0
        if seconds < 0 or seconds > 10:
            raise ValueError(f"a link's delay must be from 0s to 10s, got {delay!r}")
        return cls(text, units.bytes_per_second("a link", rate), seconds)


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    command: tuple[str, ...]
    """What its command begins with."""
    address: str
    interface: str


@contextmanager
def made(link: Link, ranks: int) -> Iterator[list[Place]]:
    """A place for each rank, any two of them joined by ``link``; all of it is gone afterwards, whatever happened.

    Raises NoLinkError with the reason if it cannot be made here.
    """
    if link.bytes_per_second is None:
        yield [Place((), "127.0.0.1", "lo")] * ranks
        return
    _require_tools(link)
    _remove_left()
    names = [f"prsgd-bench-{os.getpid()}-{rank}" for rank in range(ranks)]
    wires: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        if link.delay_seconds:
            wires.append(_join_by_program(names, link))
        else:
            _join_by_bridge(names, link)
        yield [Place(("ip", "netns", "exec", name), f"{SUBNET}.{rank + 1}", "wire0") for rank, name in enumerate(names)]
    finally:
        for wire in wires:
            _cut(wire)
        _remove([*names, _hub()])


def _join_by_bridge(names: Sequence[str], link: Link) -> None:
    """Two ends of one veth, or one to a bridge for each; what leaves an end is held to the rate."""
    assert link.bytes_per_second is not None
    if len(names) == 2:
        _ip("link", "add", "wire0", "netns", names[0], "type", "veth", "peer", "name", "wire0", "netns", names[1])
    else:
        _ip("netns", "add", _hub())
        _ip("-n", _hub(), "link", "add", "hub", "type", "bridge")
        _ip("-n", _hub(), "link", "set", "hub", "up")
        for rank, name in enumerate(names):
            port = f"port{rank}"
            _ip("link", "add", "wire0", "netns", name, "type", "veth", "peer", "name", port, "netns", _hub())
            _ip("-n", _hub(), "link", "set", port, "master", "hub", "up")
            _limit(_hub(), port, link.bytes_per_second)
    for rank, name in enumerate(names):
        _limit(name, "wire0", link.bytes_per_second)
        _up(name, rank)


def _limit(name: str, interface: str, bytes_per_second: float) -> None:
    rate = f"{round(8 * bytes_per_second)}bit"
    burst = max(LEAST_BURST_BYTES, round(BURST_SECONDS * bytes_per_second))
    shape = ("tbf", "rate", rate, "burst", f"{burst}b", "latency", "50ms")
    _ip("netns", "exec", name, "tc", "qdisc", "add", "dev", interface, "root", *shape)


def _up(name: str, rank: int) -> None:
    _ip("-n", name, "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", "wire0")
    _ip("-n", name, "link", "set", "wire0", "up")


def _join_by_program(names: Sequence[str], link: Link) -> subprocess.Popen[bytes]:
    """A TUN interface for each, and a program between them that holds packets back."""
    command = [sys.executable, "-m", "prsgd.bench.wire", str(link.bytes_per_second), str(link.delay_seconds), *names]
    wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    assert wire.stdout is not None
    if wire.stdout.readline().strip() != b"ready":
        _cut(wire)
        raise NoLinkError(f"{link.name}: TUN interfaces cannot be made here")
    for rank, name in enumerate(names):
        _ip("-n", name, "link", "set", "wire0", "mtu", str(MTU))
        _up(name, rank)
    return wire


def _cut(wire: subprocess.Popen[bytes]) -> None:
    wire.kill()
    wire.communicate()


def _hub() -> str:
    return f"prsgd-bench-{os.getpid()}-hub"


def _require_tools(link: Link) -> None:
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoLinkError(f"{link.name}: {tool} is not there (package iproute2)")
    if os.geteuid() != 0:
        raise NoLinkError(f"{link.name}: only root can make network namespaces")


def _remove_left() -> None:
    """Namespaces of a bench that was killed, whose process is no more."""
    place = Path("/run/netns")
    for name in sorted(p.name for p in place.iterdir()) if place.is_dir() else ():
        found = NAME.fullmatch(name)
        if found and not Path("/proc", found[1]).exists():
            _remove([name])


def _remove(names: Sequence[str]) -> None:
    for name in names:
        if Path("/run/netns", name).exists():
            with contextlib.suppress(NoLinkError):
                _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        raise NoLinkError(f"ip {' '.join(arguments)}: no answer within 30 s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise NoLinkError(f"ip {' '.join(arguments)}: {said[-1] if said else f'exit {done.returncode}'}")
