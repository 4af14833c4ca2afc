"""Joining a job: the process group that torchrun's processes make, and the communicator over it."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public, but not in torch's own export list

from prsgd._warn import warn
from prsgd.comm import job
from prsgd.comm.base import Communicator
from prsgd.comm.in_process import InProcess
from prsgd.comm.torch_distributed import TorchDistributed
from prsgd.errors import PeerError


def current(num_workers: int | None = None, *, timeout_seconds: float = 600.0) -> Communicator:
    """The communicator of the running process group, or of this process alone if there is none."""
    if dist.is_available() and dist.is_initialized():
        return TorchDistributed(num_workers=num_workers, timeout_seconds=timeout_seconds)
    if dist.is_available() and dist.is_torchelastic_launched():
        warn(
            "torchrun started this process but no process group is up, so it trains alone: call prsgd.init() first",
            RuntimeWarning,
        )
    return InProcess(1 if num_workers is None else num_workers)


def init(*, backend: str | None = None, timeout_seconds: float = 600.0) -> Communicator:
    """Join the torchrun job that this process belongs to; without one it is a job of its own.

    Returns a communicator with one worker per process: ``comm.workers.start`` is this worker's id and
    ``comm.num_workers`` their number. ``LocalSGD`` and ``Fleet`` find the group by themselves.

    When all processes are on one machine, nothing that is opened here listens beyond loopback.

    >>> import prsgd
    >>> prsgd.init().num_workers  # no torchrun
    1
    """
    ours = job.find()
    if dist.is_available() and not dist.is_initialized() and ours is not None:
        limit = timedelta(seconds=timeout_seconds)
        join(ours, store_of(ours, timeout=limit), backend=backend, timeout=limit)
    return current(timeout_seconds=timeout_seconds)


def join(ours: job.Job, store: Store, *, backend: str | None, timeout: timedelta) -> None:
    """Make torch's process group of the job whose processes meet in ``store``."""
    stay_inside(ours)
    if backend is None:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(ours.local_rank)
    dist.init_process_group(backend, store=store, rank=ours.rank, world_size=ours.size, timeout=timeout)


def stay_inside(ours: job.Job) -> None:
    """Let gloo listen on loopback alone, if all processes are on this machine and it was not told otherwise."""
    if ours.on_one_machine:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo reads it when it opens its sockets


def store_of(ours: job.Job, *, timeout: timedelta) -> Store:
    """Where the job's processes meet."""
    return _fresh(_store(ours, timeout=timeout), ours)


def serves(ours: job.Job) -> bool:
    """Is the store, in which the job's processes meet, this process's?"""
    return ours.rank == 0 and not ours.has_store


def _store(ours: job.Job, *, timeout: timedelta) -> TCPStore:
    if ours.rank >= ours.size:
        raise ValueError(f"RANK must be below WORLD_SIZE {ours.size}, got {ours.rank}")
    if not serves(ours):
        return TCPStore(ours.address, ours.port, ours.size, False, timeout, wait_for_workers=False)
    try:
        if ours.on_one_machine:
            return loopback_store(ours.port, ours.size, timeout=timeout)
        return TCPStore(ours.address, ours.port, ours.size, True, timeout, wait_for_workers=False)
    except (OSError, RuntimeError, dist.DistError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error).splitlines()[0]
        raise PeerError(
            f"rank 0 cannot listen at port {ours.port} (MASTER_PORT), where the others look for it: {why}"
        ) from None


def _fresh(store: TCPStore, ours: job.Job) -> Store:
    """A part of the store that is this start's: torchrun's agent keeps one store over all restarts, in which the last
    start's addresses would be found."""
    return PrefixStore(f"prsgd/start-{ours.restarts}", store) if ours.has_store else store


def open_store(address: str, *, timeout: timedelta) -> TCPStore:
    """Serve a store of one process's own, on a free port, which others reach at ``address``."""
    return TCPStore(address, 0, None, True, timeout, wait_for_workers=False)


def loopback_store(port: int, size: int, *, timeout: timedelta) -> TCPStore:
    """Serve a store that only this machine reaches."""
    return store_at("127.0.0.1", port, size, timeout=timeout)


def store_at(address: str, port: int, size: int, *, timeout: timedelta) -> TCPStore:
    """Serve a store that listens on one address; port 0 takes a free one, which is ``store.port`` then.

    TCPStore listens on every interface whatever address it is given, unless it is handed a socket.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())
