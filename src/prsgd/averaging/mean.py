"""The paper's averaging: the mean of all workers' models. Two choices make it: the weights, and the wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from prsgd.averaging import weights as weighing
from prsgd.averaging.base import Averaging, Header, Landing, Memory, Setting
from prsgd.averaging.summed import summed, weighted_sum
from prsgd.averaging.wires.base import Arrived, Change, Changes, Wire
from prsgd.averaging.wires.half import half
from prsgd.comm.base import Communicator, Then, Work


@dataclass(frozen=True)
class mean(Averaging):  # noqa: N801 - a word in the user's sentence
    """The mean of the workers' models, each counting the same (the paper), or by its "steps" or "samples" of the round,
    or by a function of what it brings (``prsgd.Brought``).

    ``weights="samples"`` needs ``local.log(samples=...)`` *before* each ``optimizer.step()``. With a ``wire`` what
    travels is each model's change since the last average, in a cheaper form: ``half()``, ``quantized(4)``,
    ``sparse(0.01)``. ``dtype=torch.bfloat16`` is short for ``wire=half(torch.bfloat16)``.

    >>> mean("steps", wire=half())
    mean(weights='steps', wire=half(dtype=torch.bfloat16))
    """

    weights: weighing.AnyWeights = "uniform"
    wire: Wire | None = None
    dtype: InitVar[torch.dtype | None] = None

    def __post_init__(self, dtype: torch.dtype | None) -> None:
        weighing.found(self.weights)
        if not isinstance(self.wire, Wire | None):
            raise ValueError(f"wire must be one such as half() or quantized(4), got {self.wire!r}")
        if dtype is not None:
            if self.wire is not None:
                raise ValueError("wire and dtype are two ways to say how changes travel: give one of them")
            object.__setattr__(self, "wire", half(dtype))
        if self.wire is not None:
            self.wire.check_weights(self.weights)

    @property
    def knows_drift(self) -> bool:
        return self.wire is None

    @property
    def is_one_sum(self) -> bool:
        return self.wire is None

    @property
    def parts_evenly(self) -> bool:
        return self.weights == "uniform"

    @property
    def tells(self) -> bool:
        return isinstance(self.weights, weighing.Weights) and self.weights.tells

    def tell(self, brought: weighing.Brought) -> float:
        return weighing.found(self.weights).tell(brought)

    def check(self, setting: Setting) -> None:
        if self.wire is not None:
            self.wire.check(setting)

    def init(self, point: Tensor, hosted: int) -> Memory:
        """With a wire: the ``point`` that all last agreed on, the number of ``averages``, and each hosted worker's
        ``residuals`` (n, P) where the wire leaves something out."""
        if self.wire is None:
            return {}
        memory = {"point": point.clone(), "averages": 0}
        return {**memory, "residuals": point.new_zeros(hosted, len(point))} if self.wire.keeps_residuals else memory

    def met(self, memory: Memory, point: Tensor) -> Memory:
        return {**memory, "point": point} if "point" in memory else memory

    def weigh(self, header: Header) -> Sequence[float]:
        if self.weights == "uniform":
            return list(map(float, header.counts))
        weights = weighing.found(self.weights)
        return [weighing.weighed(weights, b) if counts else 0.0 for counts, b in zip(header.counts, header.brought)]

    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        if self.wire is None:
            return summed(comm, snap, header, self.weigh(header))
        # In a consensus nothing lands, and the loop takes the exact mean: there is nothing to say.
        weights = [0.0] * len(snap) if header.sums.consensus else self.weigh(header)
        header = header.weighing(sum(weights))
        average = memory["averages"]
        changes = tuple(
            Change(i, comm.workers[i], average, weight, partial(_change, memory, snap, i))
            for i, weight in enumerate(weights)
            if weight
        )
        work = self.wire.send(comm, Changes(changes, average), memory["point"], header)

        def landing(arrived: Arrived) -> Landing:
            began = time.perf_counter()
            found = Landing(
                target=None,
                header=arrived.header,
                bytes_sent=work.bytes_sent,
                server_bytes_sent=work.server_bytes_sent,
                hops=work.hops,
            )
            if not arrived.header.sums.weight:
                return found
            target = arrived.moved(memory["point"])
            after = {**memory, "point": target, "averages": average + 1}
            if "residuals" in memory:
                after["residuals"] = _residuals(memory["residuals"], arrived.kept, header.bad)
            known = _mean(snap, weights, target) if len(snap) == len(comm.members) else None
            seconds = time.perf_counter() - began
            return replace(found, target=target, memory=after, mean=known, copy_seconds=seconds)

        return Then(work, landing)


def _change(memory: Memory, snap: Tensor, i: int, part: slice = slice(None), out: Tensor | None = None) -> Tensor:
    """What hosted worker i has to say, in the dtype of sums, which a half-precision fleet's rows are not."""
    change = torch.sub(snap[i, part], memory["point"][part], out=out)
    return change.add_(memory["residuals"][i, part]) if "residuals" in memory else change


def _residuals(before: Tensor, kept: dict[int, Tensor], bad: Sequence[bool]) -> Tensor:
    after = before.clone()
    for i, is_bad in enumerate(bad):
        if is_bad:  # its model is given up, and so is what it had to say
            after[i] = 0.0
    for i, residual in kept.items():
        after[i] = residual
    return after


def _mean(snap: Tensor, weights: Sequence[float], like: Tensor) -> Tensor:
    mean = torch.empty_like(like)
    weighted_sum(snap, weights, out=mean)
    return mean.div_(sum(weights))
