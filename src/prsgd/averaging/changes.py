"""What travels is each worker's change since the point that all last agreed on, in a cheaper form C:

    point <- point + mean_i C(x_i - point + r_i)        r_i <- x_i - point + r_i - C(x_i - point + r_i)

r_i is what worker i has not been able to say yet (error feedback), kept where C is not right on average. The models
themselves would not stand a cheaper form: what is rounded off would be of their size, not of the change's.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing, Setting
from prsgd.averaging.summed import summed, weighted_sum, weights_of
from prsgd.comm.base import Communicator, Then, Work


@dataclass
class Memory:
    """All processes keep the same point and count; each keeps what its hosted workers have not said yet."""

    point: Tensor | None = None
    residuals: Tensor | None = None
    """(n, P)"""
    averages: int = 0


class Changes(Averaging):
    """The part that does not depend on the form: what is sent from where, and where all go."""

    weights: str
    _memory: Memory

    def start(self, point: Tensor) -> None:
        """All workers begin here."""
        self._memory.point, self._memory.residuals, self._memory.averages = point.clone(), None, 0

    def launch(self, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        weights = weights_of(self.weights, header)
        header = replace(header, sums=header.sums._replace(weight=sum(weights)))
        work = self._send(comm, snap, weights, header)

        def landing(sent: tuple[Callable[[], Tensor], Header]) -> Landing:
            began = time.perf_counter()
            total, landed = sent
            sums = landed.sums
            if _all_agree(landed, comm):  # workers that are still at work called consensus(), and this one answers
                return summed(comm, snap, header, weights).wait()
            if sums.weight and sums.done == comm.num_workers:  # the last one is exact
                return _besides(summed(comm, snap, header, weights).wait(), work)
            target = None
            if sums.weight and not sums.consensus:
                target = self._memory.point = self._point() + total().div_(sums.weight)
                self._memory.averages += 1
            here = sums.weight and len(snap) == comm.num_workers
            return Landing(
                target=target,
                header=landed,
                bytes_sent=work.bytes_sent,
                server_bytes_sent=work.server_bytes_sent,
                hops=work.hops,
                copy_seconds=time.perf_counter() - began,
                mean=_mean(snap, weights, self._point()) if here else None,
                knows_mean=bool(here),
            )

        return Then(work, landing)

    def final(self, comm: Communicator, snap: Tensor, header: Header) -> Landing:
        if header.sums.consensus:  # workers that are done wait for an average, and learn of it there
            _, landed = self._send(comm, snap, [0.0] * len(snap), header).wait()
            if not _all_agree(landed, comm):
                return Landing(None, landed, bytes_sent=0)
        return summed(comm, snap, header, weights_of(self.weights, header)).wait()

    def _point(self) -> Tensor:
        assert self._memory.point is not None, "LocalSGD calls start()"
        return self._memory.point

    def state_dict(self) -> dict[str, Any]:
        memory = self._memory
        named = {"point": memory.point, "residuals": memory.residuals}
        return {"averages": memory.averages, **{k: v.clone() for k, v in named.items() if v is not None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        memory = self._memory
        if state.get("point") is None:
            raise ValueError("the state is of a run whose averaging was another: it has no point that all agreed on")
        memory.point, memory.residuals = (
            None if state.get(name) is None else state[name].clone() for name in ("point", "residuals")
        )
        memory.averages = state.get("averages", 0)

    @abstractmethod
    def _send(
        self, comm: Communicator, snap: Tensor, weights: Sequence[float], header: Header
    ) -> Work[tuple[Callable[[], Tensor], Header]]:
        """Start to share the hosted workers' changes; what arrives is a way to make their sum, and all workers' header.

        Workers of weight 0 have nothing to say.
        """


class Gathered(Changes):
    """Every worker's change as bytes of its own, gathered by all: they all add up the same, in the same order."""

    keeps_residuals = False

    def check(self, setting: Setting) -> None:
        if setting.optimizer_state == "average":
            raise ValueError(
                f"{type(self).__name__}() cannot carry the optimizer's state: "
                'use optimizer_state="keep" or "reset", or mean()'
            )

    @abstractmethod
    def num_bytes(self, num_values: int, dtype: torch.dtype = torch.float32) -> int:
        """Of one worker's change, as it travels."""

    @abstractmethod
    def encode(self, change: Tensor, worker: int = 0) -> Tensor:
        """(P,) as uint8, ``num_bytes`` of them."""

    @abstractmethod
    def add(self, encoded: Tensor, total: Tensor, weight: float = 1.0) -> None:
        """total (P,) += weight * what ``encoded`` stands for."""

    def decode(self, encoded: Tensor, like: Tensor) -> Tensor:
        """What ``encoded`` stands for."""
        total = torch.zeros_like(like)
        self.add(encoded, total)
        return total

    def _send(
        self, comm: Communicator, snap: Tensor, weights: Sequence[float], header: Header
    ) -> Work[tuple[Callable[[], Tensor], Header]]:
        point = self._point()  # in the dtype of sums, which a half-precision fleet's rows are not
        n, num_values = snap.shape
        width = self.num_bytes(num_values, point.dtype)
        tail = header.tail().to(point.dtype)
        numbers = point.new_zeros(n, 1 + len(tail))
        numbers[:, 0] = point.new_tensor(weights)
        numbers[0, 1:] = tail  # this process's, once
        beside = numbers.view(torch.uint8)
        payload = torch.zeros(n, width + beside.shape[1], dtype=torch.uint8, device=snap.device)
        payload[:, width:] = beside
        kept: dict[int, Tensor] = {}
        for i, weight in enumerate(weights):
            if weight:
                payload[i, :width], kept[i] = self._encoded(snap, i, comm.workers[i])
            elif header.bad and header.bad[i]:
                kept[i] = point.new_zeros(0)  # of a model that is given up
        work = comm.all_gather(payload)

        def arrived(rows: Tensor) -> tuple[Callable[[], Tensor], Header]:
            numbers = rows[:, width:].clone(memory_format=torch.contiguous_format).view(point.dtype)
            landed = header.landed(header.extras.new_zeros(0), numbers[:, 1:].sum(dim=0))

            def total() -> Tensor:
                self._keep(kept, n)  # only now: what was answered to a consensus() goes again
                made = point.new_zeros(num_values)
                for row, weight in zip(rows, numbers[:, 0].tolist()):
                    if weight:
                        self.add(row[:width], made, weight)
                return made

            return total, landed

        return Then(work, arrived)

    def _encoded(self, snap: Tensor, i: int, worker: int) -> tuple[Tensor, Tensor]:
        """What hosted worker i says, and what it leaves out of that, if it is to keep it."""
        change = snap[i] - self._point()
        if not self.keeps_residuals:
            return self.encode(change, worker), change[:0]
        if self._memory.residuals is not None:
            change += self._memory.residuals[i]
        encoded = self.encode(change, worker)
        self.add(encoded, change, -1.0)
        return encoded, change

    def _keep(self, kept: Mapping[int, Tensor], num_hosted: int) -> None:
        if not self.keeps_residuals:
            return
        if self._memory.residuals is None:
            self._memory.residuals = self._point().new_zeros(num_hosted, len(self._point()))
        for i, residual in kept.items():
            self._memory.residuals[i] = residual if len(residual) else 0.0


def _mean(snap: Tensor, weights: Sequence[float], like: Tensor) -> Tensor:
    mean = torch.empty_like(like)
    weighted_sum(snap, weights, out=mean)
    return mean.div_(sum(weights))


def _besides(landing: Landing, work: Work[Any]) -> Landing:
    """With what came before it on the wire."""
    sent, by_server = landing.bytes_sent + work.bytes_sent, landing.server_bytes_sent + work.server_bytes_sent
    return replace(landing, bytes_sent=sent, server_bytes_sent=by_server)


def _all_agree(landed: Header, comm: Communicator) -> bool:
    """Is it a consensus, to which all workers have come that are not done?"""
    return landed.sums.consensus > 0 and landed.sums.consensus + landed.sums.done == comm.num_workers
