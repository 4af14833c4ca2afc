"""The processes that are one worker together, and what has to be one number of all of them.

A worker mostly is one process. One whose model is sharded (FSDP2), or whose batches are shared (by
DistributedDataParallel over a group of its own), is several. They take their steps together, but each sees only its
part: is a shard finite, how far has it moved, how long took its steps. What follows from such a number must be the same
in all of them, or one closes a round and another does not. So they tell each other their numbers, once an average, and
all add them up in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from prsgd.comm.base import Communicator
from prsgd.comm.in_process import InProcess
from prsgd.comm.torch_distributed import TorchDistributed
from prsgd.errors import AverageTimeout, PeerError

Numbers = list[float]


class Team(Protocol):
    """The processes of one worker."""

    place: int
    """This process's among them."""
    size: int
    has_shards: bool
    """Has each of them a part of the model? Else each has all of it."""
    comm: Communicator
    """By which they hear from each other."""
    group: dist.ProcessGroup | None
    """Of torch's, if there are several."""

    def agree(
        self, *, parts: Sequence[float] = (), sums: Sequence[float] = (), largest: Sequence[float] = ()
    ) -> tuple[Numbers, Numbers, Numbers]:
        """What the worker tells, the same in all its processes: ``parts`` are of the model, and each process has those
        of its part; ``sums`` are of what each process does; of ``largest`` the largest counts. All call it alike."""
        ...

    def sum(self, tensor: Tensor) -> Tensor:
        """Over the processes; ``tensor`` may be changed."""
        ...

    def latest(self, seconds: float) -> float:
        """What the clock says that is furthest on."""
        return self.agree(largest=[seconds])[2][0]

    def close(self) -> None:
        """Leave, so that whoever still waits for this process fails at once."""
        ...


class Lone(Team):
    """A worker that is one process: its numbers are the worker's.

    >>> Lone().agree(parts=[0.5], sums=[2], largest=[0.25])
    ([0.5], [2], [0.25])
    """

    place, size, has_shards = 0, 1, False

    def __init__(self) -> None:
        self.comm, self.group = InProcess(), None

    def agree(
        self, *, parts: Sequence[float] = (), sums: Sequence[float] = (), largest: Sequence[float] = ()
    ) -> tuple[Numbers, Numbers, Numbers]:
        return list(parts), list(sums), list(largest)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def close(self) -> None:
        """There is nobody to leave."""


class Several(Team):
    """The processes of ``group``, of which each has a shard of the model or, unless ``has_shards``, all of it.

    Numbers travel as float64 on the CPU, over connections of our own, so that they are exact, nobody waits for a
    device, and closing them touches nobody's group.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, has_shards: bool) -> None:
        self.comm: TorchDistributed = _Siblings(group)
        self.place, self.size = self.comm.workers.start, self.comm.num_workers
        self.has_shards, self.group = has_shards, group

    def agree(
        self, *, parts: Sequence[float] = (), sums: Sequence[float] = (), largest: Sequence[float] = ()
    ) -> tuple[Numbers, Numbers, Numbers]:
        mine = torch.tensor([[*parts, *sums, *largest]], dtype=torch.float64)
        rows = _named(lambda: self.comm.all_gather(mine).wait()).tolist()
        widths = len(parts), len(sums)
        columns = list(zip(*rows))
        own, each, most = columns[: widths[0]], columns[widths[0] : sum(widths)], columns[sum(widths) :]
        return (
            [sum(column) if self.has_shards else column[0] for column in own],
            [sum(column) for column in each],
            [max(column) for column in most],
        )

    def sum(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        flat = tensor.cpu()
        return _named(lambda: self.comm.all_reduce(flat).wait()).to(tensor.device)

    def close(self) -> None:
        self.comm.close()


class _Siblings(TorchDistributed):
    """Between the processes of one worker."""

    def absent(self, transfer: int) -> str:
        return super().absent(transfer).replace("worker", "process")


def _named(call: Callable[[], Tensor]) -> Tensor:
    """Errors tell that it is a process of this very worker that did not come."""
    try:
        return call()
    except AverageTimeout as error:
        raise AverageTimeout(f"of the processes of this worker, {error}") from None
    except PeerError as error:
        raise PeerError(f"of the processes of this worker, {error}") from None
