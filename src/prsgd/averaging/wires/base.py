"""How a change travels: the seam between the mean of the workers' changes and its cheaper forms.

    point <- point + mean_i C(x_i - point + r_i)        r_i <- x_i - point + r_i - C(x_i - point + r_i)

C is the wire's form of a change. r_i is what worker i has not been able to say yet (error feedback), kept where C is
not right on average. The models themselves would not stand a cheaper form: what is rounded off would be of their size,
not of the change's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from prsgd.averaging.base import Header, Setting
from prsgd.comm.base import Both, Communicator, Then, Work

S = TypeVar("S")
CACHED = 1 << 19
"""Numbers that fit into a processor's cache, roughly; with fewer, starting kernels takes longer than what they do."""


@dataclass(frozen=True)
class Change:
    """What one hosted worker has to say."""

    place: int
    """Among the hosted workers."""
    worker: int
    """Its id."""
    average: int
    """Averages that there have been: with the worker's id, what random numbers depend on."""
    weight: float
    values: Callable[..., Tensor]
    """Makes it (P,), in the dtype of sums, for the wire to change; of a slice that is given only that part, in
    ``out`` if that is given."""


@dataclass(frozen=True)
class Changes(Sequence[Change]):
    """What the hosted workers have to say that count."""

    each: tuple[Change, ...]
    average: int
    """Averages that there have been."""

    def __len__(self) -> int:
        return len(self.each)

    @overload
    def __getitem__(self, index: int) -> Change: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Change, ...]: ...
    def __getitem__(self, index: int | slice) -> Change | tuple[Change, ...]:
        return self.each[index]


@dataclass(frozen=True)
class Arrived:
    """All workers' changes."""

    header: Header
    moved: Callable[[Tensor], Tensor]
    """Makes of a point (P,) where they lead: point + their weighted sum / the weight of all."""
    kept: dict[int, Tensor]
    """By place: what hosted workers have not said."""


class Wire(ABC):
    """A form in which changes travel.

    >>> import prsgd
    >>> averaging = prsgd.mean(wire=prsgd.quantized(4))  # as an averaging by itself, quantized(4) is short for this
    >>> isinstance(averaging.wire, Wire)
    True
    """

    @property
    def keeps_residuals(self) -> bool:
        """Is what it leaves out to be said later?"""
        return False

    @property
    def takes_shards(self) -> bool:
        """Can a part of a change travel by itself? What the wire looks at together (a bucket, the largest share) is of
        that part then."""
        return False

    def check(self, setting: Setting) -> None:  # noqa: B027 - most work with everything
        """Raise a ValueError that says why it cannot work with this setting."""

    def check_weights(self, weights: object) -> None:  # noqa: B027
        """Raise a ValueError that says why it cannot carry changes of these weights."""

    @abstractmethod
    def send(self, comm: Communicator, changes: Changes, like: Tensor, header: Header) -> Work[Arrived]:
        """Start to share the hosted workers' changes, of which those of weight 0 are not among ``changes``; ``like``
        (P,) has their size and dtype."""


class Gathered(Wire):
    """Every worker's change as bytes of its own, gathered by all: they all add up the same, in the same order.

    Beside them travel a weight and the header's numbers; buffers, which are summed, by an all-reduce of their own.
    """

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

    def decode(self, encoded: Tensor, like: Tensor, weight: float = 1.0) -> Tensor:
        """weight * what ``encoded`` stands for."""
        total = torch.zeros_like(like)
        self.add(encoded, total, weight)
        return total

    def decode_sum(self, rows: Sequence[Tensor], weights: Sequence[float], like: Tensor) -> Tensor:
        """The weighted sum of what ``rows`` stand for; those of weight 0 are not read."""
        each = [(row, weight) for row, weight in zip(rows, weights) if weight]
        if not each:
            return torch.zeros_like(like)
        total = self.decode(each[0][0], like, each[0][1])
        for row, weight in each[1:]:
            self.add(row, total, weight)
        return total

    def moved(self, point: Tensor, rows: Sequence[Tensor], weights: Sequence[float], weight: float) -> Tensor:
        """point + the weighted sum of what ``rows`` stand for / weight."""
        return step(point, self.decode_sum(rows, weights, point), weight)

    def write(self, change: Change, like: Tensor, out: Tensor) -> Tensor | None:
        """Encode a hosted worker's change into ``out``; returns what it has not said, if that is to be said later."""
        values = change.values()
        out.copy_(self.encode(values, change.worker, change.average))
        if not self.keeps_residuals:
            return None
        self.add(out, values, -1.0)
        return values

    def send(self, comm: Communicator, changes: Changes, like: Tensor, header: Header) -> Work[Arrived]:
        width, numbers = self.num_bytes(len(like), like.dtype), self.numbers(changes, like, header)
        payload = like.new_zeros(len(numbers), width + numbers[0].nbytes, dtype=torch.uint8)
        payload[:, width:] = numbers.view(torch.uint8)
        kept = self.written(changes, like, payload[:, :width])

        def arrived(rows: Tensor, exact: Tensor) -> Arrived:
            numbers = rows[:, width:].clone(memory_format=torch.contiguous_format).view(like.dtype)
            weights, told = numbers[:, 0].tolist(), landed(header, numbers, exact)
            return Arrived(
                told, lambda point: self.moved(point, rows[:, :width].unbind(), weights, told.sums.weight), kept
            )

        return with_buffers(comm, header, comm.all_gather(payload), arrived)

    def written(self, changes: Changes, like: Tensor, rows: Tensor) -> dict[int, Tensor]:
        """Encode the changes into ``rows`` (n, ...); by place what is to be said later."""
        kept = {change.place: self.write(change, like, rows[change.place]) for change in changes}
        return {place: residual for place, residual in kept.items() if residual is not None}

    def numbers(self, changes: Changes, like: Tensor, header: Header) -> Tensor:
        """(n, 1 + K): each hosted worker's weight; beside the first one's what this process tells."""
        told = header.numbers().to(like.dtype)
        numbers = like.new_zeros(len(header.bad), 1 + len(told))
        numbers[0, 1:] = told
        for change in changes:
            numbers[change.place, 0] = change.weight
        return numbers


def step(point: Tensor, total: Tensor, weight: float) -> Tensor:
    """point + total / weight, in the memory of ``total``."""
    return torch.addcdiv(point, total, total.new_tensor(weight), out=total)


def fresh(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """As ``torch.empty_like`` of a row, in large pages where the system lends them, which numpy asks for and torch does
    not: to map 25M numbers page by page takes longer than to unpack them."""
    dtype = dtype or like.dtype
    if like.device.type != "cpu" or not like.numel():
        return torch.empty_like(like, dtype=dtype)
    return torch.from_numpy(np.empty(like.numel() * dtype.itemsize, np.uint8)).view(dtype)


def runs(num_values: int) -> Iterator[slice]:
    """So many numbers, cut so that what is done to a run finds it in a core's cache.

    >>> [(run.start, run.stop) for run in runs(CACHED + 1)] == [(0, CACHED), (CACHED, CACHED + 1)]
    True
    """
    return (slice(at, min(at + CACHED, num_values)) for at in range(0, num_values, CACHED))


def landed(header: Header, numbers: Tensor, exact: Tensor) -> Header:
    """The header of all workers, from their ``numbers`` (N, 1 + K) and buffers."""
    return header.landed(header.extras.new_zeros(0), numbers[:, 1:].sum(dim=0), exact)


def with_buffers(
    comm: Communicator, header: Header, work: Work[S], arrived: Callable[[S, Tensor], Arrived]
) -> Work[Arrived]:
    """What ``arrived`` makes of the work's result and of all workers' buffers, which are summed meanwhile."""
    if not len(header.exact):
        return Then(work, lambda result: arrived(result, header.exact))
    return Then(Both(work, comm.all_reduce(header.exact.clone())), lambda both: arrived(*both))
