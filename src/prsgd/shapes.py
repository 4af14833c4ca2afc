"""How a sum over the workers travels, as numbers: for the communicators, and for plans, which need no torch."""

from __future__ import annotations

SHAPES = ("all-reduce", "parameter-server")
"""How a sum is formed: by all workers in a ring, or collected at worker 0 and sent back."""


def bytes_of_sum(shape: str, num_workers: int, num_bytes: int) -> tuple[int, int]:
    """What each of N workers sends, and the server besides, to sum ``num_bytes`` bytes.

    In a ring each worker sends 2 (N - 1) / N of them. Through a parameter server each sends them once, and the server
    sends the sum to each; it is worker 0, which sends itself nothing.

    >>> bytes_of_sum("all-reduce", 8, 1000), bytes_of_sum("parameter-server", 8, 1000)
    ((1750, 0), (1000, 7000))
    """
    if shape == "all-reduce" or num_workers == 1:
        return round(2 * (num_workers - 1) * num_bytes / num_workers), 0
    return num_bytes, (num_workers - 1) * num_bytes
