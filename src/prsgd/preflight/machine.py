"""This machine's network, as gloo will use it; no torch."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from prsgd.preflight.finding import Finding

_SIOCGIFADDR = 0x8915
"""Asks Linux for an interface's IPv4 address."""
_ELSEWHERE = "198.51.100.1", 9
"""An address in no network of ours (RFC 5737), which nothing is sent to."""
VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True)
class Network:
    """What gloo goes by, which listens on one address, and tells it to the other processes."""

    host: str
    addresses: Mapping[str, str]
    """Of this machine's interfaces, by name."""
    asked: tuple[str, ...] = ()
    """The interfaces that GLOO_SOCKET_IFNAME names."""
    resolved: str | None = None
    """The address of this machine that its own name stands for; without one gloo takes loopback."""
    outward: str | None = None
    """The address by which this machine reaches the others; None if it reaches nobody."""

    @property
    def address(self) -> str:
        """Where gloo listens.

        >>> Network("box", {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, resolved="127.0.1.1").address
        '127.0.1.1'
        >>> Network("box", {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, asked=("eth0",), resolved="127.0.1.1").address
        '10.0.0.5'
        """
        if self.asked:
            return self.addresses.get(self.asked[0], "nowhere")
        return self.resolved or "127.0.0.1"

    def named(self, address: str) -> str:
        """With the interface that has it: "eth0 (10.0.0.5)"."""
        name = next((name for name, own in self.addresses.items() if own == address), None)
        return f"{name} ({address})" if name else address

    def look(self, *, several_machines: bool | None) -> Finding:
        """Is it right for a job? (None: there is no job.)

        >>> box = Network("box", {"lo": "127.0.0.1", "eth0": "10.0.0.5"}, resolved="127.0.1.1", outward="10.0.0.5")
        >>> box.look(several_machines=True).text
        "gloo listens on 127.0.1.1, which 'box' stands for: no other machine can reach that"
        >>> box.look(several_machines=True).remedy
        'export GLOO_SOCKET_IFNAME=eth0 on this machine, whose address is 10.0.0.5'
        """
        missing = [name for name in self.asked if name not in self.addresses]
        if missing:
            known = ", ".join(f"{name} ({address})" for name, address in self.addresses.items())
            return Finding(
                "error", "network", f"{VARIABLE} names {missing[0]!r}, which is no interface with an address here",
                f"set it to one of: {known}",
            )  # fmt: skip
        where = f"gloo listens on {self.named(self.address)}"
        if several_machines is False:
            return Finding("ok", "network", f"{where}; all ranks are on this machine")
        if ipaddress.ip_address(self.address).is_loopback:
            why = f"{VARIABLE} says" if self.asked else f"{self.host!r} stands for"
            text = f"{where}, {'as' if self.asked else 'which'} {why}: no other machine can reach that"
            if several_machines is None:
                remedy = f"with several machines: {self._remedy()}"
                return Finding("note", "network", text, remedy)
            return Finding("error", "network", text, self._remedy())
        if not self.asked and self.outward not in (self.address, None):
            text = f"{where}, but this machine reaches the others from {self.named(self.outward or '')}"
            return Finding("warning", "network", text, self._remedy())
        return Finding("ok", "network", where)

    def _remedy(self) -> str:
        outward = next((name for name, own in self.addresses.items() if own == self.outward), None)
        if outward is None or ipaddress.ip_address(self.addresses[outward]).is_loopback:
            return f"export {VARIABLE}=NAME with the interface that reaches the others, of {', '.join(self.addresses)}"
        return f"export {VARIABLE}={outward} on this machine, whose address is {self.outward}"


def network(others: tuple[str, int] = _ELSEWHERE) -> Network | None:
    """This machine's. ``others``: an address and a port of those it has to reach. None where it is no Linux, of which
    alone it is known how to ask for an interface's address."""
    if sys.platform != "linux":
        return None
    asked = tuple(filter(None, os.environ.get(VARIABLE, "").split(",")))
    return Network(socket.gethostname(), _addresses(), asked, _resolved(), _outward(others))


def _addresses() -> dict[str, str]:
    """IPv4, or IPv6 where there is no other; link-local ones reach nobody by themselves."""
    found = {name: address for _, name in socket.if_nameindex() if (address := _ipv4(name)) is not None}
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            wide = ipaddress.IPv6Address(int(digits, 16))
            if not wide.is_link_local:
                found.setdefault(name, str(wide))
    return found


def _ipv4(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):  # it has none
        answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None


def _resolved() -> str | None:
    """As gloo does it: the first address of this machine's name on which it can listen."""
    with suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as listener, suppress(OSError):
                listener.bind((place[0], 0))
                return str(place[0])
    return None


def _outward(others: tuple[str, int]) -> str | None:
    """Of a UDP socket that is pointed at them, over which nothing is sent."""
    with suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(*others, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as pointed:
            pointed.connect(place)
            return str(pointed.getsockname()[0])
    return None
