"""All workers in this process: a simulation, or a run of one worker."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from prsgd._check import one_of, whole_number
from prsgd._warn import warn
from prsgd.comm.base import Combine, Communicator, Done, Route, Work
from prsgd.comm.links import SHAPES, bytes_of_combination, bytes_of_sum


class InProcess(Communicator):
    """N workers that live here: nothing travels, and the bytes are counted as if it did, in the given shape.

    >>> InProcess(4).workers
    range(0, 4)
    """

    def __init__(self, num_workers: int = 1, *, shape: str = "all-reduce") -> None:
        self.shape = one_of("shape", shape, SHAPES)
        self.num_workers = whole_number("num_workers", num_workers, at_least=1)
        self.workers = range(self.num_workers)
        self.timeout_seconds = 600.0  # nobody waits here
        if num_workers > 1 and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            warn(
                f"InProcess keeps its {num_workers} workers to this process, which is one of {dist.get_world_size()} "
                f"of a job: TorchDistributed(num_workers={num_workers}) spreads them over all",
            )

    def __repr__(self) -> str:
        return f"InProcess({self.num_workers})"

    def all_reduce(self, flat: Tensor) -> Work[Tensor]:
        sent, by_server = bytes_of_sum(self.shape, self.num_workers, flat.numel() * flat.element_size())
        return Done(flat, bytes_sent=sent, server_bytes_sent=by_server)

    def all_gather(self, payload: Tensor) -> Work[Tensor]:
        row_bytes = payload[0].numel() * payload.element_size()
        others = self.num_workers - 1
        return Done(payload.clone(), bytes_sent=row_bytes * others, hops=others)

    def all_combine(self, lines: Tensor, beside: Tensor, combine: Combine, *, out: Tensor) -> Work[Tensor]:
        out.copy_(combine(lines, beside, self.workers))
        sent = bytes_of_combination(self.num_workers, lines[0].nbytes, out.nbytes, beside[0].nbytes)
        return Done(beside, bytes_sent=sent, hops=2 if self.num_workers > 1 else 0)

    def exchange(self, send: Mapping[Route, Tensor], receive: Mapping[Route, Tensor]) -> Work[None]:
        for route, tensor in receive.items():
            tensor.copy_(send[route])
        num_bytes = sum(t.numel() * t.element_size() for t in send.values())
        return Done(None, bytes_sent=num_bytes // self.num_workers, hops=1)

    def broadcast(self, flat: Tensor, worker: int = 0) -> Work[Tensor]:
        return Done(flat)

    def close(self) -> None:
        """Nothing to leave."""
