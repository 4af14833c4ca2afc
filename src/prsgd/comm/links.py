"""What carries the averages, as numbers: for communicators, plans and cluster models; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from prsgd._check import one_of, positive

SHAPES = ("all-reduce", "parameter-server")
"""How a communicator forms a sum: by all workers together, or collected at worker 0 and sent back."""
LINK_SHAPES = ("ring", "tree", "parameter-server")
"""How it travels: an all-reduce as a ring or as a tree, or through the server's link."""


@lru_cache(maxsize=64)  # it is asked for the same sum at every average
def bytes_of_sum(shape: str, num_workers: int, num_bytes: int) -> tuple[int, int]:
    """What each of N workers sends, and the server besides, to sum ``num_bytes`` bytes.

    In an all-reduce each worker sends 2 (N - 1) / N of them. Through a parameter server each sends them once, and the
    server sends the sum to each; it is worker 0, which sends itself nothing.

    >>> bytes_of_sum("all-reduce", 8, 1000), bytes_of_sum("parameter-server", 8, 1000)
    ((1750, 0), (1000, 7000))
    """
    if shape != "parameter-server" or num_workers == 1:
        return round(2 * (num_workers - 1) * num_bytes / num_workers), 0
    return num_bytes, (num_workers - 1) * num_bytes


def bytes_of_combination(num_workers: int, brought_bytes: int, made_bytes: int, beside_bytes: int) -> int:
    """What each of N workers sends, in the mean, where each combines a part of what all bring and sends all others what
    it made of it: (N - 1) / N of what one brings and of all that is made, and N - 1 times what goes to everybody.

    >>> bytes_of_combination(8, 1000, 1000, 4)
    1778
    """
    return round((num_workers - 1) * ((brought_bytes + made_bytes) / num_workers + beside_bytes))


def bytes_summed(num_workers: int, bytes_sent: int, server_bytes_sent: int = 0) -> float:
    """How many bytes were summed, from what ``bytes_of_sum`` says that each worker and the server sent.

    >>> bytes_summed(8, 1750), bytes_summed(8, 1000, 7000)
    (1000.0, 1000)
    """
    return bytes_sent if server_bytes_sent else bytes_sent * num_workers / (2 * (num_workers - 1))


@dataclass(frozen=True)
class Link:
    """What carries the averages between workers that are all alike.

    >>> link = Link(bytes_per_second=125e6, latency_seconds=1e-3)
    >>> round(link.average_seconds(100_000_000, workers=8), 9)  # ring: 2 (N - 1) / N of the bytes, 2 (N - 1) messages
    1.414
    """

    bytes_per_second: float
    latency_seconds: float = 0.0
    shape: str = "ring"

    def __post_init__(self) -> None:
        positive("bytes_per_second", self.bytes_per_second)
        if not 0 <= self.latency_seconds < math.inf:
            raise ValueError(f"latency_seconds must be a finite number >= 0, got {self.latency_seconds!r}")
        one_of("shape", self.shape, LINK_SHAPES)

    def average_seconds(self, num_bytes: float, *, workers: int) -> float:
        """From the last worker's arrival to everybody's mean of ``num_bytes`` bytes.

        In a ring, N - 1 turns to add up and N - 1 to spread, each of 1/N of the bytes. In a tree, log2 N turns up and
        as many down, each of all bytes. Through a server, whose link carries N - 1 models in and N - 1 out.
        """
        if workers == 1:
            return 0.0
        hops = 2 * (workers - 1)
        if self.shape == "ring":
            return hops * (num_bytes / workers / self.bytes_per_second + self.latency_seconds)
        if self.shape == "tree":
            return 2 * (workers - 1).bit_length() * (num_bytes / self.bytes_per_second + self.latency_seconds)
        return hops * num_bytes / self.bytes_per_second + 2 * self.latency_seconds

    def messages_seconds(self, num_bytes: float, *, hops: int) -> float:
        """Of ``num_bytes`` that each worker sends in ``hops`` messages one after another, of whatever shape.

        >>> Link(bytes_per_second=125e6, latency_seconds=1e-3).messages_seconds(125e6, hops=7)
        1.007
        """
        return num_bytes / self.bytes_per_second + hops * self.latency_seconds

    def bytes_sent(self, num_bytes: int, *, workers: int) -> int:
        """Per worker and average, the server's own left out."""
        return bytes_of_sum(self.shape, workers, num_bytes)[0]
