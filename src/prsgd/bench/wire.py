"""A wire with a delay: ``python -m prsgd.bench.wire BYTES_PER_SECOND DELAY_SECONDS NAMESPACE NAMESPACE ...``

Opens a TUN interface ``wire0`` in every namespace and carries packets between them by their destination: each sender's
packets leave one after the other at the rate, and arrive the delay later. Says "ready" when the interfaces are there
and ends when its standard input does.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from collections.abc import Sequence

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
LONGEST_PACKET = 65536
MOST_QUEUED_SECONDS = 0.05
"""Of sending: a packet that finds more before it is dropped, as by a router whose memory is full."""


def open_tun(namespace: str) -> int:
    """An interface ``wire0`` in the namespace; its packets are read from and written to the file returned."""
    place = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(place, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"no way into the namespace {namespace}")
    os.close(place)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", b"wire0", IFF_TUN | IFF_NO_PI))
    return tun


def carry(tuns: Sequence[int], bytes_per_second: float, delay_seconds: float) -> None:
    """Until standard input ends. The last byte of an IPv4 destination address says whose packet it is, from 1 on."""
    free_at = [0.0] * len(tuns)  # when the last packet that a sender gave has left
    under_way: list[tuple[float, int, int, bytes]] = []
    count = 0
    files = [*tuns, sys.stdin.fileno()]
    senders = {tun: sender for sender, tun in enumerate(tuns)}
    while True:
        left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else 1.0
        for file in select.select(files, [], [], left)[0]:
            if file not in senders:
                return
            sender = senders[file]
            while True:
                try:
                    packet = os.read(file, LONGEST_PACKET)
                except BlockingIOError:
                    break
                now = time.monotonic()
                leaves = max(now, free_at[sender]) + len(packet) / bytes_per_second
                receiver = packet[19] - 1 if packet[0] >> 4 == 4 else -1
                if 0 <= receiver < len(tuns) and free_at[sender] - now <= MOST_QUEUED_SECONDS:
                    free_at[sender], count = leaves, count + 1
                    heapq.heappush(under_way, (leaves + delay_seconds, count, receiver, packet))
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, receiver, packet = heapq.heappop(under_way)
            with contextlib.suppress(BlockingIOError):  # it is full, and TCP sends it again
                os.write(tuns[receiver], packet)


def main() -> None:
    rate, delay, *namespaces = sys.argv[1:]
    tuns = [open_tun(namespace) for namespace in namespaces]
    print("ready", flush=True)
    carry(tuns, float(rate), float(delay))


if __name__ == "__main__":
    main()
