"""One state from those of several workers, for other workers to go on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prsgd.comm.base import Communicator
from prsgd.errors import CheckpointError
from prsgd.saving.finding import Found, states_of
from prsgd.saving.states import Packed, unpacked

VARIANCE, MEAN = "running_var", "running_mean"


def mean_of(found: Found, folder: Path, comm: Communicator, device: torch.device) -> Any:
    """The first worker's state with the mean of all workers' in place of the numbers of its parts: models, momentum,
    statistics (the variances about the mean of all). A collective: each state is read by one worker, and brought by it.
    """
    mine = [kept for kept, now in sorted(found.bearers.items()) if now == comm.workers.start]
    states = [states_of(folder, kept.start).load(found.round) for kept in mine]
    first = min(found.bearers)
    state = _shown(states[0] if first in mine else None, found.bearers[first], comm, device)
    widths = [place.numel() for place in _numbers(state)]
    total = torch.zeros(1 + sum(widths), dtype=torch.float64)
    for own in states:
        shapes = [tuple(t.shape) for t in _numbers(own)]
        if shapes != [tuple(t.shape) for t in _numbers(state)]:
            raise CheckpointError(f"the workers' states of round {found.round} in {folder} are not alike")
        _square(own, +1.0)
        row = torch.cat([torch.ones(1, dtype=torch.float64), *(t.double().flatten() for t in _numbers(own))])
        if torch.isfinite(row).all():  # a worker whose model was not finite would have taken the others' mean
            total += row
    total = comm.all_reduce(total.to(device)).wait().cpu()
    if not total[0]:
        raise CheckpointError(f"no worker's state of round {found.round} in {folder} is finite")
    means = iter((total[1:] / total[0]).split(widths))
    dtypes = [tensor.dtype for tensor in _numbers(state)]
    _replace(state["parts"], lambda tensor: next(means).view(tensor.shape))
    _square(state, -1.0)
    kinds = iter(dtypes)
    _replace(state["parts"], lambda tensor: tensor.to(next(kinds)))
    return state


def _shown(state: Any, bearer: int, comm: Communicator, device: torch.device) -> Any:
    """The bearer's state, to all workers."""
    parts = Packed.of(state).content() if state is not None else (b"", b"")
    sizes = torch.tensor([len(part) for part in parts], device=device)
    comm.broadcast(sizes, worker=bearer).wait()
    flat = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
    if state is not None:
        flat = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
    content = bytes(comm.broadcast(flat.to(device), worker=bearer).wait().cpu().numpy())
    return unpacked(content[: int(sizes[0])], content[int(sizes[0]) :])


def _numbers(state: Any) -> list[Tensor]:
    """All tensors of real numbers in a state's parts, in order."""
    return [container[key] for container, key in _places(state["parts"])]


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield tree, key
        else:
            yield from _places(value)


def _replace(tree: Any, new: Any) -> None:
    for container, key in _places(tree):
        container[key] = new(container[key])


def _square(state: Any, sign: float) -> None:
    """Variances to mean squares (+1), whose mean is that of all samples, and back (-1)."""
    for container, key in list(_places(state["parts"])):
        sibling = str(key).removesuffix(VARIANCE) + MEAN
        if str(key).endswith(VARIANCE) and sibling in container:
            container[key] = container[key].double() + sign * container[sibling].double().square()
