"""An all-reduce whose sum is the caller's, by messages between processes: lines to their owners, and back to all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from prsgd.comm.base import Combine, hosted_range
from prsgd.comm.works import OwnError


@dataclass(frozen=True)
class Peers:
    """The processes of a group, of which this one is number ``process``."""

    process: int
    blocks: Sequence[range]
    """The workers of each."""
    limit: timedelta
    """Of each transfer."""
    tags: Sequence[int]
    """Of three exchanges, which no others have."""

    @property
    def others(self) -> Iterator[int]:
        """Those after this one first, so that not all speak to the same at the same time."""
        return ((self.process + k) % len(self.blocks) for k in range(1, len(self.blocks)))

    def lines(self, num_lines: int) -> list[slice]:
        """Of so many, those that the workers of each process own."""
        num_workers = self.blocks[-1].stop
        ends = [[hosted_range(num_lines, num_workers, block[end]) for end in (0, -1)] for block in self.blocks]
        return [slice(first.start, last.stop) for first, last in ends]


@torch.no_grad()
def combine_over(
    peers: Peers,
    lines: Tensor,
    beside: Tensor,
    combine: Combine,
    out: Tensor,
    numbers: Tensor,
    group: dist.ProcessGroup,
) -> None:
    """``Communicator.all_combine`` for one of several processes, which fills ``out`` and ``numbers``, and blocks."""
    owned, workers = peers.lines(len(out)), peers.blocks[peers.process]
    rows_of = [slice(block.start, block.stop) for block in peers.blocks]
    here, mine = rows_of[peers.process], owned[peers.process]
    rows = lines.new_empty(len(numbers), mine.stop - mine.start, *lines.shape[2:])
    numbers[here], rows[here] = beside, lines[:, mine]
    to_owners = [lines[:, part].contiguous() for part in owned]
    first = [
        *_start(peers, group, [beside] * len(owned), [numbers[part] for part in rows_of], peers.tags[0]),
        *_start(peers, group, to_owners, [rows[part] for part in rows_of], peers.tags[1]),
    ]
    _finish(first, peers.limit)
    try:
        made = combine(rows, numbers, workers)
    except Exception as error:
        raise OwnError(error) from None
    out[mine] = made  # and from there to the others: it may be of another dtype, or lie in another order
    second = _start(peers, group, [out[mine]] * len(owned), [out[part] for part in owned], peers.tags[2])
    _finish(second, peers.limit)


def _start(
    peers: Peers, group: dist.ProcessGroup, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int
) -> list[dist.Work]:
    """Send every other process its tensor, and fill those that come from it."""
    works = []
    for peer in peers.others:
        for speaks in (True, False) if peers.process < peer and not listens_first(group) else (False, True):
            tensor = (send if speaks else receive)[peer]
            if tensor.numel():
                works.append((group.send if speaks else group.recv)([tensor], peer, tag))
    return works


def listens_first(group: dist.ProcessGroup) -> bool:
    """Are all to be ready for the others' messages before they send their own, or is one of two to speak first?

    gloo sends when the peer has said that it is ready, and that word would travel behind the peer's own
    message: in half of all swaps over a slow link the two messages came one after the other. nccl does what two have
    with each other in the order in which it was started, and two that both listened first would wait for ever.
    """
    return isinstance(group, dist.ProcessGroupGloo)


def _finish(works: Sequence[dist.Work], limit: timedelta) -> None:
    for work in works:
        work.wait(limit)
