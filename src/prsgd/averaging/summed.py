"""One all-reduce of everything: the exact mean, and what other averagings are made from."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from prsgd.averaging.base import Header, Landing
from prsgd.comm.base import Communicator, Then, Work


def summed(comm: Communicator, snap: Tensor, header: Header, weights: Sequence[float] | None = None) -> Work[Landing]:
    """The weighted mean of the snapshots, extras and header in one flat buffer; by default of those that count."""
    weights = [float(c) for c in header.counts] if weights is None else weights
    header = header.weighing(sum(weights))
    num_params, num_extras = snap.shape[1], header.extras.shape[1]
    told, flat = header.tail(), header.flat
    if flat is None:  # called without the loop, which lends its own
        flat = torch.empty(num_params + num_extras + told.numel(), dtype=snap.dtype, device=snap.device)
    row, extras, tail = flat.split([num_params, num_extras, flat.numel() - num_params - num_extras])
    weighted_sum(snap, weights, out=row)
    if num_extras:
        weighted_sum(header.extras, weights, out=extras)
    tail.copy_(told)
    work = comm.all_reduce(flat)

    def landing(_: Tensor) -> Landing:
        began = time.perf_counter()
        landed = header.landed(extras, tail)
        weight = landed.sums.weight
        if weight not in (0, 1):
            flat[: num_params + num_extras].div_(weight)
        mean = row if weight else None
        return Landing(
            target=mean,
            exact=mean,
            header=landed,
            bytes_sent=work.bytes_sent,
            server_bytes_sent=work.server_bytes_sent,
            copy_seconds=time.perf_counter() - began,
        )

    return Then(work, landing)


def weighted_sum(rows: Tensor, weights: Sequence[float], out: Tensor) -> None:
    """out <- sum_i weights[i] rows[i]; rows of weight 0 are not read. A lone row may lie in ``out`` already."""
    if all(w == 1.0 for w in weights) and len(weights) > 1:
        torch.sum(rows, dim=0, dtype=out.dtype, out=out)
        return
    first = True
    for i, weight in enumerate(weights):
        if not weight:
            continue
        row = rows[i]
        if first:
            if row.data_ptr() != out.data_ptr():
                out.copy_(row)
            if weight != 1.0:
                out.mul_(weight)
        else:
            out.add_(row if weight == 1.0 else row * weight)  # rounded as it is where each worker has its own process
        first = False
    if first:
        out.zero_()
