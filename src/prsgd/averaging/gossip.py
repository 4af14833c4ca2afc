"""Gossip: every worker mixes its model with its neighbours' (D-PSGD, Lian et al. 2017).

    x_i <- sum_j W_ij x_j        W doubly stochastic: rows and columns add up to 1, so the mean of all stays where it is

``every(1)`` with overlap 1 is D-PSGD as printed: the gradient at x_i is taken while the neighbours' models arrive, and
x_i <- sum_j W_ij x_j - lr G_i. Only neighbours speak, in two messages: what they are about to do, and their model. All
workers meet in an all-reduce for ``consensus()`` and when the run ends, with one exact mean; the records come then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from prsgd._check import one_of
from prsgd.averaging.base import Averaging, Header, Landing, Memory, Setting
from prsgd.averaging.graphs import SOURCES, Matrix, Rows, checked, matrix_of, spectral_gap
from prsgd.comm.base import Both, Communicator, Route, Then, Work
from prsgd.errors import DivergedError, MismatchError

AVERAGES, IS_DONE, ASKS_CONSENSUS = 0, 1, 2
"""What a worker is about to do."""
MESSAGE = 3
"""Numbers that it tells: that, whether its model is finite, and how many steps it skipped since the last average."""
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
            one_of("graph", self.graph, SOURCES)
        else:
            object.__setattr__(self, "graph", checked(self.graph))

    def matrix(self, num_workers: int) -> Matrix:
        """(N, N): row i says how much worker i takes of each."""
        return matrix_of(self.graph, num_workers)

    def spectral_gap(self, num_workers: int) -> float:
        """1 - |the second largest eigenvalue|: 1 brings all to the mean at once, near 0 takes many averages."""
        return spectral_gap(self.matrix(num_workers))

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
        """What a worker sends for an average: its ``num_values`` numbers and a short message to each that hears it."""
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
