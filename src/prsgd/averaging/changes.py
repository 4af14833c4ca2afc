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

import torch
from torch import Tensor

from prsgd.averaging.base import Averaging, Header, Landing, Memory, Setting
from prsgd.averaging.summed import weighted_sum, weights_of
from prsgd.comm.base import Communicator, Then, Work


@dataclass(frozen=True)
class Arrived:
    """All workers' changes."""

    header: Header
    total: Callable[[], Tensor]
    """Makes their weighted sum (P,)."""


class Changes(Averaging):
    """The part that does not depend on the form: what is sent from where, and where all go.

    All processes remember the same ``point`` and number of ``averages``; each the ``residuals`` (n, P) of its hosted
    workers, where there are any.
    """

    weights: str
    keeps_residuals = False

    def init(self, point: Tensor, hosted: int) -> Memory:
        memory = {"point": point.clone(), "averages": 0}
        return {**memory, "residuals": point.new_zeros(hosted, len(point))} if self.keeps_residuals else memory

    def weigh(self, header: Header) -> Sequence[float]:
        return weights_of(self.weights, header)

    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        # In a consensus nothing lands, and the loop takes the exact mean: there is nothing to say.
        weights = [0.0] * len(snap) if header.sums.consensus else self.weigh(header)
        header = replace(header, sums=header.sums._replace(weight=sum(weights)))
        kept = {i: memory["point"].new_zeros(()) for i, bad in enumerate(header.bad) if bad}  # its model is given up
        work = self._send(memory, comm, snap, weights, header, kept)

        def landing(arrived: Arrived) -> Landing:
            began = time.perf_counter()
            weight = arrived.header.sums.weight
            found = Landing(
                target=None,
                header=arrived.header,
                bytes_sent=work.bytes_sent,
                server_bytes_sent=work.server_bytes_sent,
                hops=work.hops,
            )
            if not weight:
                return found
            target = memory["point"] + arrived.total().div_(weight)
            return replace(
                found,
                target=target,
                memory={**memory, "point": target, "averages": memory["averages"] + 1, **self._residuals(memory, kept)},
                mean=_mean(snap, weights, target) if len(snap) == comm.num_workers else None,
                copy_seconds=time.perf_counter() - began,
            )

        return Then(work, landing)

    def _residuals(self, memory: Memory, kept: Mapping[int, Tensor]) -> dict[str, Tensor]:
        if not self.keeps_residuals:
            return {}
        residuals = memory["residuals"].clone()
        for i, residual in kept.items():
            residuals[i] = residual
        return {"residuals": residuals}

    def _change(self, memory: Memory, snap: Tensor, i: int) -> Tensor:
        """What hosted worker i has to say, in the dtype of sums, which a half-precision fleet's rows are not."""
        change: Tensor = snap[i] - memory["point"]
        return change.add_(memory["residuals"][i]) if self.keeps_residuals else change

    @abstractmethod
    def _send(
        self,
        memory: Memory,
        comm: Communicator,
        snap: Tensor,
        weights: Sequence[float],
        header: Header,
        kept: dict[int, Tensor],
    ) -> Work[Arrived]:
        """Start to share the hosted workers' changes; workers of weight 0 have nothing to say.

        What a worker leaves out of its change goes into ``kept``, by its place, if it is to say it later.
        """


class Gathered(Changes):
    """Every worker's change as bytes of its own, gathered by all: they all add up the same, in the same order."""

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
    def encode(self, change: Tensor, worker: int = 0, average: int = 0) -> Tensor:
        """(P,) as uint8, ``num_bytes`` of them; what is drawn at random depends on the worker and the average."""

    @abstractmethod
    def add(self, encoded: Tensor, total: Tensor, weight: float = 1.0) -> None:
        """total (P,) += weight * what ``encoded`` stands for."""

    def decode(self, encoded: Tensor, like: Tensor) -> Tensor:
        """What ``encoded`` stands for."""
        total = torch.zeros_like(like)
        self.add(encoded, total)
        return total

    def _send(
        self,
        memory: Memory,
        comm: Communicator,
        snap: Tensor,
        weights: Sequence[float],
        header: Header,
        kept: dict[int, Tensor],
    ) -> Work[Arrived]:
        point = memory["point"]
        n, num_values = snap.shape
        width = self.num_bytes(num_values, point.dtype)
        tail = header.tail().to(point.dtype)
        numbers = point.new_zeros(n, 1 + len(tail))
        numbers[:, 0] = point.new_tensor(weights)
        numbers[0, 1:] = tail  # this process's, once
        beside = numbers.view(torch.uint8)
        payload = torch.zeros(n, width + beside.shape[1], dtype=torch.uint8, device=snap.device)
        payload[:, width:] = beside
        for i, weight in enumerate(weights):
            if weight:
                change = self._change(memory, snap, i)
                payload[i, :width] = encoded = self.encode(change, comm.workers[i], memory["averages"])
                if self.keeps_residuals:
                    self.add(encoded, change, -1.0)
                    kept[i] = change

        def arrived(rows: Tensor) -> Arrived:
            numbers = rows[:, width:].clone(memory_format=torch.contiguous_format).view(point.dtype)

            def total() -> Tensor:
                made: Tensor = point.new_zeros(num_values)
                for row, weight in zip(rows, numbers[:, 0].tolist()):
                    if weight:
                        self.add(row[:width], made, weight)
                return made

            return Arrived(header.landed(header.extras.new_zeros(0), numbers[:, 1:].sum(dim=0)), total)

        return Then(comm.all_gather(payload), arrived)


def _mean(snap: Tensor, weights: Sequence[float], like: Tensor) -> Tensor:
    mean = torch.empty_like(like)
    weighted_sum(snap, weights, out=mean)
    return mean.div_(sum(weights))
