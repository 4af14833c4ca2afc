"""Who hears whom: graphs by name, and doubly stochastic matrices, whose rows and columns add up to 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Matrix = NDArray[np.float64]
Rows = tuple[tuple[float, ...], ...]
TOLERANCE = 1e-6
"""Of what a given matrix's rows and columns add up to; float32's rounding is below it, and is taken out."""


def _ring(n: int) -> Iterable[set[int]]:
    return ({(i - 1) % n, (i + 1) % n} for i in range(n))


def _torus(n: int) -> Iterable[set[int]]:
    rows = next((r for r in range(int(n**0.5), 1, -1) if n % r == 0), 0)
    if not rows:
        raise ValueError(f'gossip("torus") needs a number of workers that is a product such as 2 x 3, got {n}')
    columns = n // rows
    for i in range(n):
        row, column = divmod(i, columns)
        around = [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
        yield {r % rows * columns + c % columns for r, c in around}


def _exponential(n: int) -> Iterable[set[int]]:
    return ({(i - (1 << k)) % n for k in range((n - 1).bit_length())} for i in range(n))


def _complete(n: int) -> Iterable[set[int]]:
    return (set(range(n)) for _ in range(n))


SOURCES: dict[str, Callable[[int], Iterable[set[int]]]] = {
    "ring": _ring,
    "torus": _torus,
    "exponential": _exponential,
    "complete": _complete,
}
"""By graph: whom each of N workers hears."""


@lru_cache(maxsize=16)
def matrix_of(graph: str | Rows, num_workers: int) -> Matrix:
    """(N, N): row i says how much worker i takes of each."""
    if not isinstance(graph, str):
        if len(graph) != num_workers:
            raise ValueError(f"graph is a matrix for {len(graph)} workers, and there are {num_workers}")
        found = np.array(graph)
    else:
        if num_workers < 2:
            raise ValueError(f'gossip("{graph}") needs at least 2 workers, got {num_workers}')
        found = np.zeros((num_workers, num_workers))
        for worker, sources in enumerate(SOURCES[graph](num_workers)):
            heard = sorted({worker, *sources})
            found[worker, heard] = 1 / len(heard)
    found.flags.writeable = False
    return found


def checked(graph: Any) -> Rows:
    """A doubly stochastic matrix of a connected graph, as tuples."""
    try:
        found: Matrix = np.array(graph.tolist() if isinstance(graph, Tensor) else graph, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or not found.size:
        raise ValueError(f"graph must be one of {', '.join(SOURCES)} or a square matrix of numbers, got {graph!r}")
    if not np.isfinite(found).all() or (found < 0).any():
        raise ValueError("graph must be a doubly stochastic matrix: its entries are finite and not negative")
    for axis, kind in ((1, "row"), (0, "column")):
        sums = found.sum(axis=axis)
        worst = int(np.abs(sums - 1).argmax())
        if abs(sums[worst] - 1) > TOLERANCE:
            raise ValueError(
                f"graph must be a doubly stochastic matrix: {kind} {worst} adds up to {sums[worst]:.10g}, not to 1"
            )
    reached, new = {0}, {0}
    while new:
        new = {int(j) for i in new for j in np.flatnonzero(found[i] + found[:, i])} - reached
        reached |= new
    if len(reached) < len(found):
        apart = min(set(range(len(found))) - reached)
        raise ValueError(f"graph must be connected: nothing leads from worker 0 to worker {apart}")
    if spectral_gap(found) < 1e-12:
        raise ValueError("graph must bring the models together: its spectral gap is 0, they would only go around")
    if np.abs([found.sum(axis=0) - 1, found.sum(axis=1) - 1]).max() > 1e-15 * len(found):  # thirds in float32
        for _ in range(20):
            found = found / found.sum(axis=1, keepdims=True)
            found = found / found.sum(axis=0)
    return tuple(tuple(row) for row in found.tolist())


def spectral_gap(weights: Matrix) -> float:
    """1 - |the second largest eigenvalue|."""
    if len(weights) == 1:
        return 1.0
    return float(1.0 - np.sort(np.abs(np.linalg.eigvals(weights)))[-2])
