"""Communicators: where the workers live."""

from __future__ import annotations

import warnings

import torch.distributed as dist

from prsgd.comm.base import Communicator
from prsgd.comm.in_process import InProcess
from prsgd.comm.torch_distributed import TorchDistributed


def current(num_workers: int | None = None, *, timeout_seconds: float = 600.0) -> Communicator:
    """The communicator of the running process group, or of this process alone if there is none."""
    if dist.is_available() and dist.is_initialized():
        return TorchDistributed(num_workers=num_workers, timeout_seconds=timeout_seconds)
    if dist.is_available() and dist.is_torchelastic_launched():
        warnings.warn(
            "torchrun started this process but no process group is up, so it trains alone: call prsgd.init() first",
            RuntimeWarning,
            stacklevel=3,
        )
    return InProcess(1 if num_workers is None else num_workers)
