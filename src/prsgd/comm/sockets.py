"""The TCP sockets of this process, as Linux tells: what is needed to end gloo's connections, which gloo itself cannot.

An endpoint is an address and a port as /proc writes them, "0100007F:1F90".
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED, _LISTENS = "01", "0A"


class _Socket(NamedTuple):
    fd: int
    inode: str
    local: str
    remote: str
    state: str


def listening() -> set[str]:
    """The endpoints on which this process listens; none where there is no /proc."""
    return {s.local for s in _sockets() if s.state == _LISTENS}


def readable(endpoint: str) -> tuple[str, int]:
    """Address and port of an endpoint.

    >>> readable("0100007F:1F90"), readable("00000000000000000000000001000000:1F90")
    (('127.0.0.1', 8080), ('::1', 8080))
    """
    address, port = endpoint.split(":")
    words = [int(address[place : place + 8], 16) for place in range(0, len(address), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words)), int(port, 16)


def established(endpoints: Collection[str]) -> int:
    """How many connections this process has that were made to or from one of these, and that neither side has ended."""
    return sum(s.state == _ESTABLISHED for s in _connected(endpoints))


def shut(endpoints: Collection[str]) -> None:
    """End this process's connections that were made to or from one of these, in both directions.

    Whoever waits for something to come or go over one fails at once, on both sides. The sockets stay open until their
    owner closes them.
    """
    for found in _connected(endpoints):
        with contextlib.suppress(OSError), _same(found) as same:  # its owner closed it just now, or the peer did
            if same is not None:
                same.shutdown(socket.SHUT_RDWR)


def notice_silence(endpoints: Collection[str], seconds: int) -> None:
    """Let the system end those connections whose other machine has not answered for so long, as after a cut cable. One
    whose process is only busy, or stopped between two transfers, answers all the same; one that is stopped in the
    middle of a large one, so that nothing is taken out of its socket, is lost too (TCP_USER_TIMEOUT)."""
    for found in _connected(endpoints):
        with contextlib.suppress(OSError), _same(found) as same:
            if same is None:
                continue
            same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, seconds // 3),
                (socket.TCP_KEEPINTVL, max(1, seconds // 6)),
                (socket.TCP_KEEPCNT, 4),
                (socket.TCP_USER_TIMEOUT, 1000 * seconds),
            ):
                same.setsockopt(socket.IPPROTO_TCP, option, value)


def _connected(endpoints: Collection[str]) -> list[_Socket]:
    return [s for s in _sockets() if s.state != _LISTENS and (s.local in endpoints or s.remote in endpoints)]


@contextlib.contextmanager
def _same(found: _Socket) -> Iterator[socket.socket | None]:
    """The socket itself; None if it was closed meanwhile, and the number is another file's."""
    duplicate = os.dup(found.fd)
    if str(os.fstat(duplicate).st_ino) != found.inode:
        os.close(duplicate)
        yield None
        return
    with socket.socket(fileno=duplicate) as same:
        yield same


def _sockets() -> list[_Socket]:
    mine = _own_inodes()
    found = []
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/self/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[9] in mine:
                found.append(_Socket(mine[fields[9]], fields[9], fields[1], fields[2], fields[3]))
    return found


def _own_inodes() -> dict[str, int]:
    """The open sockets' inodes, and a descriptor of each."""
    found = {}
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    for name in descriptors:
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[target[8:-1]] = int(name)
    return found
