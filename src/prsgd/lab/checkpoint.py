"""The checkpoints of a run's folder: every process of a job keeps its own; they continue from the newest that all have.

checkpoints/step-00000440/rank-0.safetensors, rank-0.json, manifest-0.json (``prsgd.saving.states``)
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from prsgd import files
from prsgd.errors import CheckpointError
from prsgd.replicas.fleet import Fleet
from prsgd.saving.states import States

ANEW = "begin anew with --overwrite"


class Checkpoints(States):
    """The checkpoints of one process of a run, by the step."""

    def __init__(self, folder: Path, *, rank: int = 0) -> None:
        super().__init__(folder / files.CHECKPOINTS, numbered="step", owner=("rank", rank), remedy=ANEW)

    def settle_on(self, fleet: Fleet) -> int | None:
        """The newest step of which every process of the fleet has a whole checkpoint; this process forgets the others.

        A collective, unless the whole fleet lives here. Checkpoints older than that one are kept.
        """
        steps = self.whole()
        alone = len(fleet.workers) == fleet.num_workers
        common = newest_common([steps] if alone else _everyones(steps, fleet), self.folder.parent)
        self.forget_all_but([step for step in steps if common is not None and step <= common])
        return common


def newest_common(steps: Sequence[Collection[int]], folder: Path) -> int | None:
    """The newest step of which every process has a whole checkpoint; None if some process has none at all.

    (A run that was stopped while it wrote its first one begins anew. That all have some and none in common is damage.)
    """
    common = set.intersection(*map(set, steps))
    if not common and all(steps):
        raise CheckpointError(f"the processes' checkpoints in {folder} have no step in common: {ANEW}")
    return max(common, default=None)


def _everyones(steps: Sequence[int], fleet: Fleet) -> list[set[int]]:
    """The newest steps that each worker's process has a checkpoint of."""
    newest = torch.full((8,), -1, dtype=torch.int64)
    kept = steps[-len(newest) :]
    newest[: len(kept)] = torch.tensor(kept, dtype=torch.int64)
    device = next(fleet.modules[0].parameters()).device
    everyones = fleet.comm.all_gather(newest.expand(len(fleet.workers), -1).to(device, copy=True)).wait()
    return [{step for step in part.tolist() if step >= 0} for part in everyones]


def any_in(folder: Path) -> bool:
    """Is there a finished checkpoint, of this run or of one that is compared here?"""
    return any(folder.glob("**/manifest-*.json"))


def fingerprint(tensors: list[Tensor]) -> str:
    """SHA-256 over the numbers, to compare two models to the last bit."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
