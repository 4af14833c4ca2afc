"""Joining a job: the one place that reads torchrun's environment."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in torch's own export list

from prsgd import comm as communicators
from prsgd.comm.base import Communicator

_LOOPBACK = ("127.", "localhost", "::1")


def init(*, backend: str | None = None, timeout_seconds: float = 600.0) -> Communicator:
    """Join the torchrun job that this process belongs to; without one it is a job of its own.

    Returns a communicator with one worker per process: ``comm.workers.start`` is this worker's id and
    ``comm.num_workers`` their number. ``LocalSGD`` and ``Fleet`` find the group by themselves.

    When all processes are on one machine, nothing that is opened here listens beyond loopback.

    >>> import prsgd
    >>> prsgd.init().num_workers  # no torchrun
    1
    """
    if dist.is_available() and not dist.is_initialized() and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
        one_machine = address.startswith(_LOOPBACK) or os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        if one_machine:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo reads it when it opens its sockets
        if backend is None:
            backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        limit = timedelta(seconds=timeout_seconds)
        store = _store(address, port, size, serve=serve, loopback=one_machine, timeout=limit)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    return communicators.current(timeout_seconds=timeout_seconds)


def _store(address: str, port: int, size: int, *, serve: bool, loopback: bool, timeout: timedelta) -> TCPStore:
    if not (serve and loopback):
        return TCPStore(address, port, size, serve, timeout, wait_for_workers=False)
    return loopback_store(port, size, timeout=timeout)


def loopback_store(port: int, size: int, *, timeout: timedelta) -> TCPStore:
    """Serve a store that only this machine reaches; port 0 takes a free one, which is ``store.port`` then.

    TCPStore listens on every interface whatever address it is given, unless it is handed a socket.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(1024)
        port = listener.getsockname()[1]
        return TCPStore(
            "127.0.0.1", port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
