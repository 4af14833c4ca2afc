"""How a change travels: the seam between the mean of the workers' changes and its cheaper forms.

    point <- point + mean_i C(x_i - point + r_i)        r_i <- x_i - point + r_i - C(x_i - point + r_i)

C is the wire's form of a change. r_i is what worker i has not been able to say yet (error feedback), kept where C is
not right on average. The models themselves would not stand a cheaper form: what is rounded off would be of their size,
not of the change's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prsgd.averaging.base import Header, Setting
from prsgd.comm.base import Both, Communicator, Then, Work


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
    values: Callable[[], Tensor]
    """Makes it (P,), in the dtype of sums, for the wire to change."""


@dataclass(frozen=True)
class Arrived:
    """All workers' changes."""

    header: Header
    total: Callable[[], Tensor]
    """Makes their weighted sum (P,)."""
    kept: dict[int, Tensor]
    """By place: what hosted workers have not said."""


class Wire(ABC):
    """A form in which changes travel."""

    @property
    def keeps_residuals(self) -> bool:
        """Is what it leaves out to be said later?"""
        return False

    def check(self, setting: Setting) -> None:  # noqa: B027 - most work with everything
        """Raise a ValueError that says why it cannot work with this setting."""

    def check_weights(self, weights: object) -> None:  # noqa: B027
        """Raise a ValueError that says why it cannot carry changes of these weights."""

    @abstractmethod
    def send(self, comm: Communicator, changes: Sequence[Change], like: Tensor, header: Header) -> Work[Arrived]:
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

    def decode(self, encoded: Tensor, like: Tensor) -> Tensor:
        """What ``encoded`` stands for."""
        total = torch.zeros_like(like)
        self.add(encoded, total)
        return total

    def send(self, comm: Communicator, changes: Sequence[Change], like: Tensor, header: Header) -> Work[Arrived]:
        n, num_values, dtype = len(header.bad), len(like), like.dtype
        width = self.num_bytes(num_values, dtype)
        told = header.numbers().to(dtype)
        numbers = like.new_zeros(n, 1 + len(told))
        numbers[0, 1:] = told  # this process's, once
        payload = torch.zeros(n, width + numbers.view(torch.uint8).shape[1], dtype=torch.uint8, device=like.device)
        kept: dict[int, Tensor] = {}
        for change in changes:
            values = change.values()
            numbers[change.place, 0] = change.weight
            payload[change.place, :width] = encoded = self.encode(values, change.worker, change.average)
            if self.keeps_residuals:
                self.add(encoded, values, -1.0)
                kept[change.place] = values
        payload[:, width:] = numbers.view(torch.uint8)

        def arrived(rows: Tensor, exact: Tensor) -> Arrived:
            numbers = rows[:, width:].clone(memory_format=torch.contiguous_format).view(dtype)

            def total() -> Tensor:
                made: Tensor = like.new_zeros(num_values)
                for row, weight in zip(rows, numbers[:, 0].tolist()):
                    if weight:
                        self.add(row[:width], made, weight)
                return made

            landed = header.landed(header.extras.new_zeros(0), numbers[:, 1:].sum(dim=0), exact)
            return Arrived(landed, total, kept)

        gathered = comm.all_gather(payload)
        if not len(header.exact):
            return Then(gathered, lambda rows: arrived(rows, header.exact))
        return Then(Both(gathered, comm.all_reduce(header.exact.clone())), lambda both: arrived(*both))
