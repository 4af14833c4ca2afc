"""The paper's averaging: the mean of all workers' models. Its weights, its wire and a clip are choices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from prsgd._check import positive
from prsgd.averaging import weights as weighing
from prsgd.averaging.base import Averaging, Header, Landing, Memory, Setting
from prsgd.averaging.summed import summed, weighted_sum
from prsgd.averaging.wires.base import CACHED, Arrived, Change, Changes, Wire
from prsgd.averaging.wires.half import half
from prsgd.comm.base import Communicator, Then, Work


@dataclass(frozen=True)
class mean(Averaging):  # noqa: N801 - a word in the user's sentence
    """The mean of the workers' models, each counting the same (the paper), or by its "steps" or "samples" of the round,
    or by a function of what it brings (``prsgd.Brought``).

    ``weights="samples"`` needs ``local.log(samples=...)`` *before* each ``optimizer.step()``. With a ``wire`` what
    travels is each model's change since the last average, in a cheaper form: ``half()``, ``quantized(4)``,
    ``sparse(0.01)``. ``dtype=torch.bfloat16`` is short for ``wire=half(torch.bfloat16)``. ``clip`` is the largest norm
    that the mean change may have since the last average: a longer one is scaled down to it, for one more row of memory.
    ``consensus()`` and the average that ends a run are not clipped.

    >>> mean("steps", wire=half(), clip=10.0)
    mean(weights='steps', wire=half(dtype=torch.bfloat16), clip=10.0)
    """

    weights: weighing.AnyWeights = "uniform"
    wire: Wire | None = None
    dtype: InitVar[torch.dtype | None] = None
    clip: float | None = None

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
        if self.clip is not None:
            positive("clip", self.clip)

    @property
    def knows_drift(self) -> bool:
        return self.wire is None

    @property
    def is_one_sum(self) -> bool:
        return self.wire is None

    @property
    def takes_shards(self) -> bool:
        return self.wire is None or self.wire.takes_shards

    @property
    def parts_evenly(self) -> bool:
        return self.weights == "uniform"

    @property
    def tells(self) -> bool:
        return isinstance(self.weights, weighing.Weights) and self.weights.tells

    def tell(self, brought: weighing.Brought) -> float:
        return weighing.found(self.weights).tell(brought)

    def hear(self, known: tuple[float, ...], told: tuple[float, ...]) -> tuple[float, ...]:
        return weighing.found(self.weights).hear(known, told)

    def distrusts(self, brought: weighing.Brought) -> bool:
        return self.tells and weighing.found(self.weights).distrusts(brought)

    def left_out(self, told: tuple[float, ...]) -> tuple[int, ...]:
        return weighing.found(self.weights).left_out(told)

    def measure(self, memory: Memory, snap: Tensor) -> tuple[Callable[[], float | None], ...]:
        if "point" not in memory:
            return ()
        return tuple(cache(partial(_distance, row, memory["point"])) for row in snap)

    def check(self, setting: Setting) -> None:
        if self.wire is not None:
            self.wire.check(setting)

    def init(self, point: Tensor, hosted: int) -> Memory:
        """With a wire, a clip or weights that measure changes: the ``point`` that all last agreed on. With a wire: the
        number of ``averages``, and each hosted worker's ``residuals`` (n, P) where the wire leaves something out."""
        memory: dict[str, Any] = {}
        if self.wire is not None or self._keeps_point:
            memory["point"] = point.clone()
        if self.wire is not None:
            memory["averages"] = 0
            if self.wire.keeps_residuals:
                memory["residuals"] = point.new_zeros(hosted, len(point))
        return memory

    @property
    def _keeps_point(self) -> bool:
        return self.clip is not None or weighing.found(self.weights).measures

    def met(self, memory: Memory, point: Tensor) -> Memory:
        return {**memory, "point": point} if "point" in memory else memory

    def weigh(self, header: Header) -> Sequence[float]:
        if self.weights == "uniform":
            return list(map(float, header.counts))
        weights = weighing.found(self.weights)
        return [weighing.weighed(weights, b) if counts else 0.0 for counts, b in zip(header.counts, header.brought)]

    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        if self.wire is None:
            work = summed(comm, snap, header, self.weigh(header))
            return Then(work, partial(self._remembering, memory)) if self._keeps_point else work
        # In a consensus nothing lands, and the loop takes the exact mean: there is nothing to say.
        weights = [0.0] * len(snap) if header.sums.consensus else self.weigh(header)
        header = header.weighing(sum(weights))
        average = memory["averages"]
        changes = tuple(
            Change(i, comm.workers[i], average, weight, partial(_change, memory, snap, i))
            for i, weight in enumerate(weights)
            if weight
        )
        sent = self.wire.send(comm, Changes(changes, average), memory["point"], header)

        def landing(arrived: Arrived) -> Landing:
            began = time.perf_counter()
            found = Landing(
                target=None,
                header=arrived.header,
                bytes_sent=sent.bytes_sent,
                server_bytes_sent=sent.server_bytes_sent,
                hops=sent.hops,
            )
            if not arrived.header.sums.weight:
                return found
            target = self._clipped(memory["point"], arrived.moved(memory["point"]), arrived.header)
            after = {**memory, "point": target, "averages": average + 1}
            if "residuals" in memory:
                out = self.left_out(arrived.header.tells)
                given_up = [bad or worker in out for bad, worker in zip(header.bad, comm.workers)]
                after["residuals"] = _residuals(memory["residuals"], arrived.kept, given_up)
            known = _mean(snap, weights, target) if len(snap) == len(comm.members) else None
            seconds = time.perf_counter() - began
            return replace(found, target=target, memory=after, mean=known, copy_seconds=seconds)

        return Then(sent, landing)

    def _remembering(self, memory: Memory, landing: Landing) -> Landing:
        """The landing of a mean in full, clipped, and the point that all agree on now."""
        if landing.target is None:
            return landing
        began = time.perf_counter()
        target = self._clipped(memory["point"], landing.target, landing.header)
        point = target.clone() if target is landing.target else target  # it lies where the next sum will
        seconds = landing.copy_seconds + time.perf_counter() - began
        return replace(landing, target=target, memory={**memory, "point": point}, copy_seconds=seconds)

    def _clipped(self, point: Tensor, target: Tensor, header: Header) -> Tensor:
        """The target, or what lies on the way to it as far from the point as ``clip`` allows."""
        norm = 0.0 if self.clip is None else header.whole_length(_distance(target, point))
        if self.clip is None or norm <= self.clip:
            return target
        if norm == math.inf or math.isnan(norm):  # a sum of large models: it says not even where to
            return point.clone()
        return torch.lerp(point, target, self.clip / norm)


def _distance(row: Tensor, point: Tensor) -> float:
    """Of a row from a point; in float64 if need be, since float32 does not hold the squares of all that it holds."""
    for dtype in (None, torch.float64):
        parts = zip(row.split(CACHED), point.split(CACHED))
        lengths = torch.stack([torch.linalg.vector_norm(r - p, dtype=dtype) for r, p in parts])
        found = float(torch.linalg.vector_norm(lengths, dtype=torch.float64))
        if math.isfinite(found):
            break
    return found


def _change(memory: Memory, snap: Tensor, i: int, part: slice = slice(None), out: Tensor | None = None) -> Tensor:
    """What hosted worker i has to say, in the dtype of sums, which a half-precision fleet's rows are not."""
    change = torch.sub(snap[i, part], memory["point"][part], out=out)
    return change.add_(memory["residuals"][i, part]) if "residuals" in memory else change


def _residuals(before: Tensor, kept: dict[int, Tensor], given_up: Sequence[bool]) -> Tensor:
    after = before.clone()
    for i, residual in kept.items():
        after[i] = residual
    for i, is_given_up in enumerate(given_up):
        if is_given_up:  # its model is, and so is what it had to say
            after[i] = 0.0
    return after


def _mean(snap: Tensor, weights: Sequence[float], like: Tensor) -> Tensor:
    mean = torch.empty_like(like)
    weighted_sum(snap, weights, out=mean)
    return mean.div_(sum(weights))
