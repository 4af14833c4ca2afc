"""An all-reduce whose sum is the caller's, by messages between processes: lines to their owners, and back to all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from prsgd.comm.base import Combine, hosted_range


@dataclass(frozen=True)
class Peers:
    """The processes of a group, of which this one is number ``process``."""

    group: dist.ProcessGroup
    process: int
    blocks: Sequence[range]
    """The workers of each."""
    limit: timedelta
    """Of each transfer."""

    def others(self) -> Iterator[int]:
        """Those after this one first, so that not all speak to the same at the same time."""
        for k in range(1, len(self.blocks)):
            yield (self.process + k) % len(self.blocks)

    def exchange(self, send: Sequence[Tensor], receive: Sequence[Tensor], tag: int) -> None:
        """Send every other process its tensor, and fill what comes from it; blocks until all have come and gone."""
        works = []
        for peer in self.others():
            if receive[peer].numel():
                works.append(self.group.recv([receive[peer]], peer, tag))
            if send[peer].numel():
                works.append(self.group.send([send[peer]], peer, tag))
        for work in works:
            work.wait(self.limit)


@torch.no_grad()
def combined(
    peers: Peers, lines: Tensor, beside: Tensor, combine: Combine, tags: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """``Communicator.all_combine`` for one of several processes; it blocks. ``tags`` are three of its own."""
    blocks, num_workers = peers.blocks, peers.blocks[-1].stop
    owned = [_lines_of(block, lines.shape[1], num_workers) for block in blocks]
    here, mine = blocks[peers.process], owned[peers.process]
    numbers = beside.new_empty(num_workers, *beside.shape[1:])
    rows = lines.new_empty(num_workers, mine.stop - mine.start, *lines.shape[2:])
    numbers[here.start : here.stop], rows[here.start : here.stop] = beside, lines[:, mine]
    whose = [slice(block.start, block.stop) for block in blocks]
    peers.exchange([beside] * len(blocks), [numbers[part] for part in whose], tags[0])
    peers.exchange([lines[:, part].contiguous() for part in owned], [rows[part] for part in whose], tags[1])
    made = combine(rows, numbers, here)
    result = torch.empty_like(lines[0], memory_format=torch.contiguous_format)
    result[mine] = made
    peers.exchange([made] * len(blocks), [result[part] for part in owned], tags[2])
    return result, numbers


def _lines_of(workers: range, num_lines: int, num_workers: int) -> slice:
    """Those that the workers of a process own."""
    first, last = (hosted_range(num_lines, num_workers, worker) for worker in (workers[0], workers[-1]))
    return slice(first.start, last.stop)
