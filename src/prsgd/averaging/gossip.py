"""Gossip: every worker mixes its model with its neighbours' (D-PSGD, Lian et al. 2017).

    x_i <- sum_j W_ij x_j        W doubly stochastic: rows and columns add up to 1, so the mean of all stays where it is

``every(1)`` with overlap 1 is D-PSGD as printed: the gradient at x_i is taken while the neighbours' models arrive, and
x_i <- sum_j W_ij x_j - lr G_i. Only neighbours speak, in two messages: what they are about to do, and their model. All
workers meet in an all-reduce for ``consensus()`` and when the run ends, with one exact mean; the records come then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prsgd._check import one_of
from prsgd.averaging.base import Averaging, Header, Landing, Memory, Setting
from prsgd.comm.base import Both, Communicator, Route, Then, Work
from prsgd.errors import DivergedError, MismatchError

Matrix = NDArray[np.float64]
Rows = tuple[tuple[float, ...], ...]
AVERAGES, IS_DONE, ASKS_CONSENSUS = 0, 1, 2
"""What a worker is about to do."""
MESSAGE = 3
"""Numbers that it tells: that, whether its model is finite, and how many steps it skipped since the last average."""
TOLERANCE = 1e-6
"""Of what a given matrix's rows and columns add up to; float32's rounding is below it, and is taken out."""
_HAS = {IS_DONE: "run out of data", ASKS_CONSENSUS: "called consensus()"}
_TOGETHER = (
    "with gossip() all workers need the same number of averages, and every one of them calls consensus(), between the "
    "same two: by local.launched, where workers take different steps"
)


@dataclass(frozen=True)
class gossip(Averaging):  # noqa: N801 - a word in the user's sentence
    """Mix with the neighbours in a graph: "ring", "torus", "exponential" (worker i hears i - 1, i - 2, i - 4, ...),
    "complete", or a doubly stochastic matrix whose row i says how much worker i takes of each.

    All workers need as many averages as the others, and keep their own BatchNorm statistics until all meet.

    >>> gossip("ring").matrix(5)[0].tolist()
    [0.3333333333333333, 0.3333333333333333, 0.0, 0.0, 0.3333333333333333]
    >>> round(gossip("ring").spectral_gap(8), 3), round(gossip("exponential").spectral_gap(8), 3)
    (0.195, 0.5)
    """

    hears_neighbours_only: ClassVar[bool] = True

    graph: str | Rows = "ring"

    def __post_init__(self) -> None:
        if isinstance(self.graph, str):
            one_of("graph", self.graph, _SOURCES)
        else:
            object.__setattr__(self, "graph", _checked(self.graph))

    def matrix(self, num_workers: int) -> Matrix:
        """(N, N): row i says how much worker i takes of each."""
        return _matrix(self.graph, num_workers)

    def spectral_gap(self, num_workers: int) -> float:
        """1 - |the second largest eigenvalue|: 1 brings all to the mean at once, near 0 takes many averages."""
        return _spectral_gap(self.matrix(num_workers))

    def check(self, setting: Setting) -> None:
        self.matrix(setting.num_workers)
        if setting.optimizer_state == "average":
            raise ValueError(
                'gossip() cannot average the optimizer state: use optimizer_state="keep" or "reset", or mean()'
            )
        if setting.shares_speed:
            raise ValueError(
                "the schedule needs every worker's speed, and with gossip() workers hear neighbours only: use mean()"
            )
        if setting.by_clock:
            raise ValueError(
                "rounds by the clock give workers different numbers of averages, gossip() needs the same: use mean()"
            )

    def init(self, point: Tensor, hosted: int) -> Memory:
        """``lost``: averages in a row after which a hosted worker had no finite model, nor its neighbours."""
        return {"lost": 0}

    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        if 0 < header.sums.done < len(snap):
            raise MismatchError(f"a worker of this process has run out of data before the others: {_TOGETHER}")
        what = ASKS_CONSENSUS if header.sums.consensus else IS_DONE if header.sums.done else AVERAGES
        told = self._tell(comm, what, header)
        if what != AVERAGES:  # nor do the neighbours, nor theirs: all workers meet
            all_meet = {"workers": comm.num_workers, "consensus" if header.sums.consensus else "done": comm.num_workers}
            sent = self.bytes_sent(comm.num_workers, 0, header.exact.dtype)
            met = Landing(None, replace(header, sums=header.sums._replace(**all_meet)), bytes_sent=sent)
            return Then(told, lambda _: met)
        weights = self.matrix(comm.num_workers)
        outgoing, incoming = _routes(weights, comm.workers)
        hears = tuple(tuple(np.flatnonzero(weights[worker]).tolist()) for worker in comm.workers)
        snap = snap.to(header.exact.dtype)  # of sums; a half-precision fleet's rows are as they lie
        here = dict(zip(comm.workers, snap))
        received = {route: torch.empty_like(snap[0]) for route in incoming}
        work = Both(told, comm.exchange({route: here[route[0]] for route in outgoing}, received))
        bytes_sent = self.bytes_sent(comm.num_workers, snap.shape[1], snap.dtype)

        def landing(both: tuple[set[int], None]) -> Landing:
            began = time.perf_counter()
            bad = both[0] | {worker for worker, is_bad in zip(comm.workers, header.bad) if is_bad}
            targets = torch.empty_like(snap)
            for target, worker, sources in zip(targets, comm.workers, hears):
                rows = {j: here[j] if j in here else received[(j, worker)] for j in sources if j not in bad}
                _mix(target, worker, rows, weights[worker])
            lost = memory["lost"] + 1 if bool(targets[:, :1].isnan().any()) else 0
            if lost > comm.num_workers:
                raise DivergedError(
                    f"no finite model has come from the neighbours in {comm.num_workers} averages; "
                    "lower the lr, or clip gradients"
                )
            return Landing(
                target=targets,
                header=replace(header, sums=header.sums._replace(workers=comm.num_workers - len(bad), bad=len(bad))),
                bytes_sent=bytes_sent,
                hops=1,
                hears=hears,
                copy_seconds=time.perf_counter() - began,
                memory={"lost": lost},
                mean=snap.mean(dim=0) if len(snap) == comm.num_workers and not bad else None,
                shared=False,
            )

        return Then(work, landing)

    def bytes_sent(self, num_workers: int, num_values: int, dtype: torch.dtype = torch.float32) -> int:
        """Per worker and average: what it is about to do, and so many numbers of its model, to each that hears it."""
        weights = self.matrix(num_workers)
        links = int(np.count_nonzero(weights) - np.count_nonzero(weights.diagonal()))
        return round(links / num_workers * (num_values + MESSAGE) * dtype.itemsize)

    def _tell(self, comm: Communicator, what: int, header: Header) -> Work[set[int]]:
        """Tell the neighbours what this process's workers do, and learn which of theirs have no finite model."""
        outgoing, incoming = _routes(self.matrix(comm.num_workers), comm.workers)
        skipped = dict(zip(comm.workers, header.skipped or (0,) * len(header.bad)))
        own = {w: header.exact.new_tensor([what, bad, skipped[w]]) for w, bad in zip(comm.workers, header.bad)}
        received = {route: header.exact.new_zeros(MESSAGE) for route in incoming}

        def heard(_: None) -> set[int]:
            found = set()
            for (source, to), message in received.items():
                does, is_bad, theirs = message.tolist()
                if (what == AVERAGES) != (does == AVERAGES):
                    odd = f"worker {source} has {_HAS[int(does)]}" if does else f"this one has {_HAS[what]} before"
                    raise MismatchError(
                        f"{odd} while {'this one' if does else f'worker {source}'} averages: {_TOGETHER}"
                    )
                if what == AVERAGES and theirs != skipped[to]:
                    raise MismatchError(
                        f"worker {source} skipped {theirs:g} steps since the last average (as GradScaler does) and "
                        f"worker {to} {skipped[to]}, which shifts a worker's averages; {_TOGETHER}"
                    )
                if is_bad:
                    found.add(source)
            return found

        return Then(comm.exchange({route: own[route[0]] for route in outgoing}, received), heard)


def _mix(target: Tensor, worker: int, rows: Mapping[int, Tensor], weights: Matrix) -> None:
    """target <- the mix of the finite ``rows``; what a neighbour without a model would have given, the worker keeps."""
    given = {j: float(weights[j]) for j in rows}
    missing = 1.0 - sum(given.values()) if len(given) < np.count_nonzero(weights) else 0.0
    if not given:
        target.fill_(float("nan"))  # a neighbour may have a model by the next average
        return
    scale = 1.0
    if worker in given:
        given[worker] += missing
    else:
        scale = 1.0 / (1.0 - missing)
    target.zero_()
    for j, weight in given.items():
        target.add_(rows[j], alpha=weight * scale)


def _routes(weights: Matrix, hosted: range) -> tuple[list[Route], list[Route]]:
    """(from, to) of what leaves this process, and of what comes to it."""
    outgoing = [(j, i) for j in hosted for i in np.flatnonzero(weights[:, j]).tolist() if i not in hosted]
    incoming = [(j, i) for i in hosted for j in np.flatnonzero(weights[i]).tolist() if j not in hosted]
    return outgoing, incoming


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


_SOURCES: dict[str, Callable[[int], Iterable[set[int]]]] = {
    "ring": _ring,
    "torus": _torus,
    "exponential": _exponential,
    "complete": _complete,
}
"""By graph: whom each of N workers hears."""


@lru_cache(maxsize=16)
def _matrix(graph: str | Rows, num_workers: int) -> Matrix:
    if not isinstance(graph, str):
        if len(graph) != num_workers:
            raise ValueError(f"graph is a matrix for {len(graph)} workers, and there are {num_workers}")
        found = np.array(graph)
    else:
        if num_workers < 2:
            raise ValueError(f'gossip("{graph}") needs at least 2 workers, got {num_workers}')
        found = np.zeros((num_workers, num_workers))
        for worker, sources in enumerate(_SOURCES[graph](num_workers)):
            heard = sorted({worker, *sources})
            found[worker, heard] = 1 / len(heard)
    found.flags.writeable = False
    return found


def _checked(graph: Any) -> Rows:
    """A doubly stochastic matrix of a connected graph, as tuples."""
    try:
        found: Matrix = np.array(graph.tolist() if isinstance(graph, Tensor) else graph, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.zeros(0)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or not found.size:
        raise ValueError(f"graph must be one of {', '.join(_SOURCES)} or a square matrix of numbers, got {graph!r}")
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
    if _spectral_gap(found) < 1e-12:
        raise ValueError("graph must bring the models together: its spectral gap is 0, they would only go around")
    if np.abs([found.sum(axis=0) - 1, found.sum(axis=1) - 1]).max() > 1e-15 * len(found):  # thirds in float32
        for _ in range(20):
            found = found / found.sum(axis=1, keepdims=True)
            found = found / found.sum(axis=0)
    return tuple(tuple(row) for row in found.tolist())


def _spectral_gap(weights: Matrix) -> float:
    if len(weights) == 1:
        return 1.0
    return float(1.0 - np.sort(np.abs(np.linalg.eigvals(weights)))[-2])
