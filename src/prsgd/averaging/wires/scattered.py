"""Sums of changes in few bytes that scale: each worker adds up a part for all, and packs it again.

With S_j the lines of a change that worker j owns, w_i worker i's weight and C the wire's form:

    worker i -> owner j    C(change_i) on S_j                            (N - 1) / N of a packed change
    owner j  -> all        C(s_j), s_j = sum_i w_i C(change_i) on S_j    (N - 1) / N of a packed change

Everybody, the owner too, goes on with C(s_j), so all have the same to the last bit. C(s_j) is right on average, given
the changes, where C is. Where it is not, the owner keeps what it left out, as a part of the mean and not of the sum,
since the weights of the next average may be others: with W = sum_i w_i

    sent = C(s_j + W r_j)        r_j <- r_j + (s_j - sent) / W
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
SCATTERED_FROM = 3
"""Workers from which parts that are added up apart take less time than all changes gathered, packing counted in:
``python bench/compression.py``. Two workers send the same either way, and gathering rounds once."""


class Scattered(Gathered):
    """A wire whose bytes are lines, each of which stands for ``line_values`` numbers (the last one for what is left),
    so that the lines of a part stand for that part. Few workers gather all changes, others add up a part each."""

    way: str
    """One of ``WAYS``."""

    @property
    @abstractmethod
    def line_values(self) -> int:
        """How many numbers a line stands for."""

    @abstractmethod
    def encode(self, change: Tensor, worker: int = 0, average: int = 0, *, again: bool = False) -> Tensor:
        """(P,) as uint8, ``num_bytes`` of them; what is drawn at random depends on the worker, the average, and whether
        it is what the worker has to say itself or, ``again``, for all."""

    def scatters(self, num_workers: int, num_values: int) -> bool:
        """Do so many workers add up a part each? Not if there is not a line for everybody, unless they are told to."""
        if self.way != "auto":
            return self.way == "scatter"
        return num_workers >= SCATTERED_FROM and num_values >= num_workers * self.line_values

    def send(self, comm: Communicator, changes: Changes, like: Tensor, header: Header) -> Work[Arrived]:
        if not self.scatters(comm.num_workers, len(like)):
            return super().send(comm, changes, like, header)
        width, line = self.num_bytes(len(like), like.dtype), min(self.line_values, len(like))
        num_lines, line_bytes = -(-len(like) // line), self.num_bytes(line, like.dtype)
        numbers = self.numbers(changes, like, header)
        rows = like.new_zeros(len(numbers), num_lines * line_bytes, dtype=torch.uint8)
        kept = self.written(changes, like, rows[:, :width])
        parts = [hosted_range(num_lines, comm.num_workers, worker) for worker in comm.members]
        cuts = [slice(part.start * line, min(part.stop * line, len(like))) for part in parts]
        rest: list[Tensor] = []

        def combine(rows: Tensor, numbers: Tensor, owners: range) -> Tensor:
            own = {owner: cuts[owner] for owner in owners}
            packed, left = self._summed(rows.flatten(1), numbers[:, 0].tolist(), own, changes, like)
            rest.extend(left)
            return packed.view_as(rows[0])

        def arrived(result: tuple[Tensor, Tensor], exact: Tensor) -> Arrived:
            lines, numbers = result
            found = landed(header, numbers, exact)
            return Arrived(found, lambda: self.decode(lines.view(-1)[:width], like), kept, rest[0] if rest else None)

        work = comm.all_combine(rows.view(len(rows), num_lines, line_bytes), numbers, combine)
        return with_buffers(comm, header, work, arrived)

    def _summed(
        self, rows: Tensor, weights: Sequence[float], cuts: Mapping[int, slice], changes: Changes, like: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        """What all workers' ``rows`` (N, bytes) stand for, added up and packed again by the owners of ``cuts``; and, if
        that is to be said later, what they have not said of the mean."""
        packed, weight = torch.zeros_like(rows[0]), sum(weights)
        first, last = min(cut.start for cut in cuts.values()), max(cut.stop for cut in cuts.values())
        total = torch.zeros_like(like[first:last])
        width = self.num_bytes(len(total), like.dtype)
        for row, share in zip(rows, weights):
            if share:
                self.add(row[:width], total, share)
        if changes.rest is not None:
            total.add_(changes.rest[first:last], alpha=weight)
        at = 0
        for owner, cut in cuts.items():
            if cut.start < cut.stop:
                encoded = self.encode(total[cut.start - first : cut.stop - first], owner, changes.average, again=True)
                packed[at : at + len(encoded)] = encoded
                at += len(encoded)
        if not self.keeps_residuals or not weight:
            return packed, []
        self.add(packed[:width], total, -1.0)
        rest = torch.zeros_like(like)
        rest[first:last] = total.div_(weight)
        return packed, [rest]
