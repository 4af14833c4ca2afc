"""Sums of changes in few bytes that scale: each worker adds up a part for all, and packs it again.

With S_j the part of a change that worker j owns, w_i worker i's weight, C the wire's form and D one that is right on
average, C itself where C is:

    worker i -> owner j    C(change_i) on S_j                            (N - 1) / N of C(change)
    owner j  -> all        D(s_j), s_j = sum_i w_i C(change_i) on S_j    (N - 1) / N of D(change)

Everybody, the owner too, goes on with D(s_j), so all have the same to the last bit. Given the changes that is s_j on
average, so the second rounding adds no bias to the first, and needs no memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from prsgd.averaging.base import Header
from prsgd.averaging.wires.base import Arrived, Changes, Gathered, landed, with_buffers
from prsgd.comm.base import Communicator, Work, hosted_range

WAYS = ("auto", "gather", "scatter")


class Scattered(Gathered):
    """A wire whose bytes are lines, each of which stands for ``line_values`` numbers (the last one for what is left),
    so that the lines of a part stand for that part. All gather all changes, or each adds up a part for all: whichever
    sends less, unless ``way`` says."""

    way: str
    """One of ``WAYS``."""

    @property
    @abstractmethod
    def line_values(self) -> int:
        """How many numbers a line stands for."""

    @property
    @abstractmethod
    def of_sums(self) -> Scattered:
        """The form of what workers add up for all: right on average, in lines of as many numbers."""

    @abstractmethod
    def encode(self, change: Tensor, worker: int = 0, average: int = 0, *, again: bool = False) -> Tensor:
        """(P,) as uint8, ``num_bytes`` of them; what is drawn at random depends on the worker, the average, and whether
        it is what the worker has to say itself or, ``again``, for all."""

    def scatters(self, num_workers: int, num_values: int, dtype: torch.dtype = torch.float32) -> bool:
        """Do so many workers add up a part each? If that sends less, and there is a line for everybody.

        Gathering sends (N - 1) C, scattering (N - 1) (C + D) / N, for C and D bytes of a change and of a sum.
        """
        if self.way != "auto":
            return self.way == "scatter"
        one, of_sums = self.num_bytes(num_values, dtype), self.of_sums.num_bytes(num_values, dtype)
        return one + of_sums < num_workers * one and num_values >= num_workers * self.line_values

    def send(self, comm: Communicator, changes: Changes, like: Tensor, header: Header) -> Work[Arrived]:
        if not self.scatters(comm.num_workers, len(like), like.dtype):
            return super().send(comm, changes, like, header)
        line = min(self.line_values, len(like))
        num_lines = -(-len(like) // line)
        numbers = self.numbers(changes, like, header)
        rows = like.new_zeros(len(numbers), num_lines, self.num_bytes(line, like.dtype), dtype=torch.uint8)
        kept = self.written(changes, like, rows.flatten(1)[:, : self.num_bytes(len(like), like.dtype)])
        sums = like.new_empty(num_lines, self.of_sums.num_bytes(line, like.dtype), dtype=torch.uint8)
        parts = [hosted_range(num_lines, comm.num_workers, worker) for worker in comm.members]
        cuts = [slice(part.start * line, min(part.stop * line, len(like))) for part in parts]

        def combine(rows: Tensor, numbers: Tensor, owners: range) -> Tensor:
            sizes = {owner: len(like[cuts[owner]]) for owner in owners}
            packed = self._summed(rows.flatten(1), numbers[:, 0].tolist(), sizes, changes.average, like)
            made = rows.new_zeros(rows.shape[1], sums.shape[1])
            made.view(-1)[: len(packed)] = packed
            return made

        def arrived(numbers: Tensor, exact: Tensor) -> Arrived:
            packed = sums.view(-1)[: self.of_sums.num_bytes(len(like), like.dtype)]
            told = landed(header, numbers, exact)
            return Arrived(told, lambda point: self.of_sums.moved(point, [packed], [1.0], told.sums.weight), kept)

        return with_buffers(comm, header, comm.all_combine(rows, numbers, combine, out=sums), arrived)

    def _summed(
        self, rows: Tensor, weights: Sequence[float], sizes: Mapping[int, int], average: int, like: Tensor
    ) -> Tensor:
        """What all workers' ``rows`` (N, bytes) stand for, added up, and packed again by owners, so much by each."""
        part = like[: sum(sizes.values())]
        total = self.decode_sum(rows[:, : self.num_bytes(len(part), like.dtype)].unbind(), weights, part)
        each = zip(sizes, total.split(list(sizes.values())))
        return torch.cat([self.of_sums.encode(part, owner, average, again=True) for owner, part in each])
