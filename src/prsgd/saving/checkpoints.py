"""``save`` and ``load``: a run's state in a folder, whatever its workers are, and a plain file of the averaged model.

A worker that is one process writes what ``resumable`` does. One of several processes (FSDP2, DDP) has a folder of its
own, in which torch.distributed.checkpoint keeps its tensors and can cut them anew (``split.py``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from prsgd import files
from prsgd.core.local_sgd import LocalSGD, require_run
from prsgd.errors import CheckpointError
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.optimizers import unwrapped
from prsgd.saving import split
from prsgd.saving.finding import find, gathered
from prsgd.saving.parts import check_parts
from prsgd.saving.resumable import resumable
from prsgd.saving.states import write


def save(
    local: LocalSGD,
    model: nn.Module | Fleet,
    optimizer: Optimizer | Sequence[Optimizer],
    folder: str | Path,
    **others: Any,
) -> None:
    """Write the run's state into ``folder``: models, optimizers, ``local`` and random numbers, to go on from by
    ``load``, and model.safetensors, the average of all workers' models, which is all that inference needs.

    ``others``, such as ``scheduler=scheduler``: what else has a ``state_dict()``, or is a dict of plain values.

    A collective, while the run lasts: all processes of all workers call it between the same two averages, as they do
    ``consensus()``. They share the folder, or each worker has its own. A state is whole or is not there; the newest
    three are kept.

    >>> import tempfile, torch, prsgd
    >>> def parts():
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     return model, optimizer, prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model, optimizer, local = parts()
    ...     with local:
    ...         for _ in range(3):
    ...             model(torch.ones(1, 2)).sum().backward()
    ...             optimizer.step()
    ...         prsgd.save(local, model, optimizer, folder)
    ...     model, optimizer, local = parts()
    ...     prsgd.load(local, model, optimizer, folder)
    ...     local.step
    3
    """
    optimizers, folder = _given(local, model, optimizer), Path(folder)
    _check_others(others, model, optimizers)
    with local.consensus() as averaged:
        _write_model(local, averaged, folder)
    run = _name(local)
    with local.paused():
        if _is_split(local):
            problem = split.save(local, optimizers, others, folder, run)
        else:
            saver = resumable(folder, local, **_parts(model, optimizers), **others)
            saver._run = run
            saver._write(local.launched, saver._packed())
            problem = saver._not_written
        _agree(local, problem, folder)
        if _is_split(local):
            split.tidy(local, folder)


def load(
    local: LocalSGD,
    model: nn.Module | Fleet,
    optimizer: Optimizer | Sequence[Optimizer],
    folder: str | Path,
    **others: Any,
) -> None:
    """Go on from the newest state in ``folder``, between the constructor of ``local`` and ``start()``; with the same
    ``others`` as it was saved with.

    With as many workers of as many processes it is the same run to the last bit. Workers whose models were sharded may
    have another number of shards now, or none; those that were one process each may be another number of workers, which
    begin at the mean (as with ``resumable``). A state of another model is a ``CheckpointError``.

    >>> import tempfile, torch, prsgd
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4))
    >>> prsgd.load(local, model, optimizer, tempfile.mkdtemp())
    Traceback (most recent call last):
    prsgd.errors.CheckpointError: ... holds no state that prsgd.save has written
    """
    optimizers, folder = _given(local, model, optimizer), Path(folder)
    _check_others(others, model, optimizers)
    device = local.host.rows.device
    with torch.no_grad():
        found, _ = find(folder, local.comm, device, loads=True)
        whole = -1 if found is None or not found.is_all else found.round
        whole, cut = (
            max(gathered(json.dumps(whole).encode(), local.host.team.comm, split.CPU)),
            split.newest(local, folder),
        )
        # The newest that all workers have, whatever they were; of two that are as new, the one of workers as these are.
        if cut > whole or (cut == whole and _is_split(local)) or (found is None and cut == -1):
            split.load(local, optimizers, others, folder)
            return
        if found is None:
            raise CheckpointError(f"{folder} holds no state that prsgd.save has written")
        if _is_split(local):
            raise CheckpointError(
                f"the states in {folder} are of workers that were one process with a whole model each, and these are "
                f"not: load its {files.MODEL} into the model before it is sharded or wrapped, and begin anew in "
                "another folder, or go on with whole models"
            )
        resumable(folder, local, **_parts(model, optimizers), **others)._go_on(found, device)


def _is_split(local: LocalSGD) -> bool:
    """Is a worker several processes, or its model cut into shards, be it into one?"""
    return local.host.team.size > 1 or local.host.team.has_shards


def _given(
    local: LocalSGD, model: nn.Module | Fleet, optimizer: Optimizer | Sequence[Optimizer]
) -> Sequence[Optimizer]:
    require_run(local)
    optimizers = [unwrapped(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    if model is not local.model or list(map(id, optimizers)) != list(map(id, local.optimizers)):
        raise ValueError("model and optimizer must be those that local trains, in the same order")
    if local.comm.is_elastic:
        raise ValueError("save and load are for workers that start together, not for comm=TorchFT()")
    return optimizers


def _parts(model: nn.Module | Fleet, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    return {"model": model, **{f"optimizer{n or ''}": optimizer for n, optimizer in enumerate(optimizers)}}


def _check_others(others: Mapping[str, Any], model: nn.Module | Fleet, optimizers: Sequence[Optimizer]) -> None:
    taken = {"every", *_parts(model, optimizers)} & set(others)
    if taken:
        raise ValueError(
            f"what is saved beside the model cannot be called {min(taken)!r}, which has another meaning here"
        )
    check_parts(others)


def _name(local: LocalSGD) -> str:
    """What this state is called, the same in all processes: states of one name fit together."""
    drawn = torch.tensor(list(os.urandom(8)), dtype=torch.uint8, device=local.host.rows.device)
    ours = local.host.team.comm.broadcast(drawn.cpu()).wait().to(drawn.device)
    return bytes(local.comm.broadcast(ours).wait().cpu().tolist()).hex()


def _write_model(local: LocalSGD, averaged: nn.Module, folder: Path) -> None:
    """In one plain file, by the first process of worker 0."""
    if local.comm.workers.start:
        return
    whole = split.whole_tensors(averaged)
    if local.host.team.place == 0:
        from safetensors.torch import save as content_of

        folder.mkdir(parents=True, exist_ok=True)
        write(folder / files.MODEL, content_of(whole))


def _agree(local: LocalSGD, problem: Exception | None, folder: Path) -> None:
    """All have written theirs, or all get an error."""
    mine = json.dumps(None if problem is None else f"{type(problem).__name__}: {problem}").encode()
    said = gathered(mine, local.host.team.comm, split.CPU)
    first = next((line for line in said if line is not None), None)
    said = gathered(json.dumps(first).encode(), local.comm, local.host.rows.device)
    for worker, line in enumerate(said):
        if line is not None:
            raise CheckpointError(f"worker {worker}: its state was not saved in {folder}: {line}") from problem
