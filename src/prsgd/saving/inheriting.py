"""One state from those of several workers, for other workers to go on from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
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

    What a worker does not have (momentum, if its model was replaced just now) is the mean of the others'. A state with
    NaN, or that is infinite where another is not, does not count: its worker would have taken the others' mean. What is
    infinite for all, as a mask is, stays.
    """
    mine = [kept for kept, now in sorted(found.bearers.items()) if now == comm.workers.start]
    states = [states_of(folder, kept.start).load(found.round) for kept in mine]
    first = min(found.bearers)
    state = _shown(states[0] if first in mine else None, found.bearers[first], comm, device)
    kinds = [t.dtype for t in _numbers(state).values()]
    for each in (state, *states):
        _square(each, +1.0)
    wanted, own = _numbers(state), [_numbers(each) for each in states]
    unlike = any(path in one and one[path].shape != t.shape for one in own for path, t in wanted.items())
    rows = [] if unlike else [_row(one, wanted) for one in own]
    widths = [t.numel() for t in wanted.values()]
    samples = sum(int(_books(each)["samples"]) for each in states)
    told = torch.tensor([float(unlike), samples], dtype=torch.float64)
    told = torch.cat([told, sum((row.isfinite() for row, _ in rows), torch.zeros(sum(widths)))])
    told, known = comm.all_reduce(told.to(device)).wait().cpu().split([2, sum(widths)])
    if told[0]:
        raise CheckpointError(f"the workers' states of round {found.round} in {folder} are not alike")
    total = torch.zeros(1 + 2 * sum(widths), dtype=torch.float64)
    for row, has in rows:
        if not (row.isnan() | (row.isinf() & has & (known > 0))).any():
            total += torch.cat([torch.ones(1), row.isfinite(), torch.where(row.isfinite(), row, 0.0)])
    total = comm.all_reduce(total.to(device)).wait().cpu()
    if not total[0]:
        raise CheckpointError(f"no worker's state of round {found.round} in {folder} is finite")
    counts, sums = total[1:].split(sum(widths))
    _books(state)["samples"] = int(told[1])
    means = torch.where(counts > 0, sums / counts, _row(wanted, wanted)[0]).split(widths)
    _replace(state["parts"], means)
    _square(state, -1.0)
    _replace(state["parts"], [t.to(kind) for t, kind in zip(_numbers(state).values(), kinds)])
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


def _books(state: Any) -> Any:
    return state["local"]["lanes"][0]["books"]


Where = tuple[Any, ...]
"""The keys that lead to a tensor."""


def _row(numbers: Mapping[Where, Tensor], like: Mapping[Where, Tensor]) -> tuple[Tensor, Tensor]:
    """The numbers in one row, infinite where there are none; and where there are some."""
    parts = [(numbers[path] if path in numbers else torch.full_like(t, math.inf)).double() for path, t in like.items()]
    has = [torch.full((t.numel(),), path in numbers) for path, t in like.items()]
    return torch.cat([part.flatten() for part in parts]), torch.cat(has)


def _numbers(state: Any) -> dict[Where, Tensor]:
    """All tensors of real numbers in a state's parts, in order."""
    return {path: container[path[-1]] for path, container in _places(state["parts"])}


def _places(tree: Any, path: Where = ()) -> Iterator[tuple[Where, Any]]:
    """The way to each of them, and what it lies in."""
    entries = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(entries):
        if isinstance(value, Tensor):
            if value.is_floating_point():
                yield (*path, key), tree
        else:
            yield from _places(value, (*path, key))


def _replace(tree: Any, tensors: Iterable[Tensor]) -> None:
    for (path, container), tensor in zip(_places(tree), tensors):
        container[path[-1]] = tensor.view(container[path[-1]].shape)


def _square(state: Any, sign: float) -> None:
    """Variances to mean squares (+1), whose mean is that of all samples, and back (-1)."""
    for (*_, key), container in list(_places(state["parts"])):
        sibling = str(key).removesuffix(VARIANCE) + MEAN
        if str(key).endswith(VARIANCE) and sibling in container:
            container[key] = container[key].double() + sign * container[sibling].double().square()
