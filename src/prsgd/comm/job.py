"""The job that this process belongs to, as torchrun tells it: the one place that reads its environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from prsgd._check import shown

_LOOPBACK = ("127.", "localhost", "::1")
_LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"


@dataclass(frozen=True)
class Job:
    """Who this process is among those that were started together."""

    rank: int
    size: int
    local_rank: int
    address: str
    port: int
    on_one_machine: bool
    has_store: bool
    """Is there a store that torchrun's agent serves?"""
    restarts: int = 0
    """How often torchrun has started all processes anew."""

    def environment(self) -> dict[str, str]:
        """The variables that tell a process of it.

        >>> job = Job(rank=1, size=2, local_rank=1, address="10.0.0.1", port=7, on_one_machine=False, has_store=True)
        >>> job.environment()["MASTER_ADDR"], job.environment()["LOCAL_WORLD_SIZE"]
        ('10.0.0.1', '1')
        """
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(self.size) if self.on_one_machine else "1",
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": str(self.has_store),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
        }


def find() -> Job | None:
    """The job of torchrun, or of whoever sets the same variables; None: this process is alone."""
    env = os.environ
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    size, address = _number("WORLD_SIZE", at_least=1), env.get("MASTER_ADDR", "127.0.0.1")
    return Job(
        rank=_number("RANK"),
        size=size,
        local_rank=_number("LOCAL_RANK", "0"),
        address=address,
        port=_number("MASTER_PORT", "29500"),
        on_one_machine=address.startswith(_LOOPBACK) or env.get("LOCAL_WORLD_SIZE") == str(size),
        has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restarts=_number("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(variable: str, usual: str = "", *, at_least: int = 0) -> int:
    """What the environment says, or a ValueError that names the variable."""
    text = os.environ.get(variable, usual)
    if not text.isascii() or not text.isdigit() or int(text) < at_least:
        raise ValueError(f"{variable} must be a whole number >= {at_least}, as torchrun sets it, got {shown(text)}")
    return int(text)


def lighthouse() -> str | None:
    """Where torchft's lighthouse listens, if somebody told."""
    return os.environ.get(_LIGHTHOUSE)


def elastic_environment(worker: int, num_workers: int, lighthouse: str) -> dict[str, str]:
    """The variables that tell a process which worker it is, of those that come and go."""
    return {"RANK": str(worker), "WORLD_SIZE": str(num_workers), _LIGHTHOUSE: lighthouse}


def is_first() -> bool:
    """Does this process speak for its job?"""
    try:
        job = find()
    except ValueError:  # which is an error of every process's own
        return True
    return job is None or job.rank == 0
