"""The hosted workers' models as an average takes them, and the memory for that.

Beyond the models: one row (the flat buffer that every collective reuses) without overlap; one more per hosted worker
with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prsgd.core.resuming import check_tensor
from prsgd.replicas.buffers import Buffers
from prsgd.replicas.optimizer_state import OptimizerState
from prsgd.replicas.rows import Rows


@dataclass(frozen=True)
class Boarded:
    """What the hosted workers bring to an average."""

    snap: Tensor
    """(n, P) parameters"""
    extras: Tensor
    """(n, E) optimizer state"""
    buffers: Tensor
    """(n, B) BatchNorm statistics and other buffers, packed"""
    flat: Tensor
    """Room for one collective of all of it and ``tail`` more numbers."""
    bad: tuple[bool, ...]
    """Per hosted worker: is its model not finite?"""
    totals: tuple[float, ...]
    """Per hosted worker: the sum of its parameters, the same for models that are alike to the last bit."""


class Snapshots:
    """What travels of the hosted workers on one lane: parameters, optimizer state where asked, buffers."""

    def __init__(self, rows: Rows, state: OptimizerState, buffers: Buffers, *, overlap: int, tail: int) -> None:
        self.rows, self.state, self.buffers = rows, state, buffers
        self._overlap, self._hosted = overlap, len(rows.workers)
        self._widths = [rows.width, state.width, buffers.width]
        self._flat_width = rows.width + state.width + tail + buffers.sum_width
        # Made when first needed: the flat buffer, and the hosted workers' snapshots or what of them is not in place.
        self._sums = [torch.zeros(())] * self._hosted  # of the snapshots: not finite if a number is not
        self.not_finite: dict[int, str | None] = {}
        """By hosted worker whose model was not finite: the buffer that was not, if it was one."""
        self._flat: Tensor | None = None
        self._store: Tensor | None = None

    def describe(self) -> list[str]:
        """What must be alike on all workers beside the models."""
        dtype = str(self.rows.dtype).removeprefix("torch.")
        return [
            *self.state.describe(),
            f"sums in {dtype}, {self._flat_width} numbers in all",
            f"buffers of {self.buffers.width} numbers, {self.buffers.sum_width} as they travel",
        ]

    def row(self, i: int) -> Tensor:
        """A copy of worker i's parameters as they are."""
        row = self._new(self.rows.width)
        self.rows.pack(i, row)
        return row

    def capture(self, i: int) -> None:
        """Copy worker i's snapshot; with overlap its model moves on while the average travels."""
        row, extras, buffers = self._snapshots()[i].split(self._widths)
        self._sums[i] = self.rows.pack(i, row)
        self.state.pack(i, extras)
        self.buffers.pack(i, buffers)

    def board(self, *, as_they_are: bool = False) -> Boarded:
        """The snapshots of all hosted workers, or their models as they are now."""
        if self._overlap and not as_they_are:
            snap, extras, buffers = self._snapshots().split(self._widths, dim=1)
            flat = self._flat_buffer()
        else:
            # With overlap an average may be in flight, so a look has memory of its own while it lasts.
            flat = self._new(self._flat_width) if self._overlap else self._flat_buffer()
            snap, extras, buffers = self._in_place(flat)
        totals = tuple(map(float, self._sums))
        bad = tuple(not _finite(*parts) for parts in zip(totals, snap, extras, buffers))
        for i in (i for i, is_bad in enumerate(bad) if is_bad):
            self.not_finite[i] = self.buffers.not_finite(i)
        return Boarded(snap, extras, buffers, flat, bad, totals)

    def brought(self, i: int, snap: Tensor) -> Tensor:
        """What worker i brought to an average that was launched with ``snap`` and has not landed on it."""
        return snap[i] if self._overlap else self.row(i)

    def has_moved(self, i: int, snap: Tensor) -> bool:
        """Was worker i's model changed, by whatever means, since it was captured?"""
        return self._overlap > 0 and not self.rows.equal(i, snap[i])

    def _in_place(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Snapshots without copies: a fleet's rows as they lie, a lone model packed into its place in ``flat``."""
        n = self._hosted
        if self.rows.matrix is None:
            snap, extras = (part.unsqueeze(0) for part in flat[: sum(self._widths[:2])].split(self._widths[:2]))
            self._sums[0] = self.rows.pack(0, snap[0])
            buffers = torch.empty(n, self._widths[2], dtype=snap.dtype, device=snap.device)
        else:
            snap = self.rows.matrix
            self._sums = list(snap.sum(dim=1, dtype=self.rows.dtype))
            extras, buffers = self._new(n, sum(self._widths[1:])).split(self._widths[1:], dim=1)
        for i in range(n):
            self.state.pack(i, extras[i])
            self.buffers.pack(i, buffers[i])
        return snap, extras, buffers

    def state_dict(self, *, with_snapshots: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"buffers": self.buffers.state_dict()}
        if with_snapshots:
            state["snapshots"] = self._snapshots().clone()
        return state

    def check_state(self, state: Mapping[str, Any], *, with_snapshots: bool) -> None:
        """Raise an error unless ``load_state_dict`` can take it."""
        for name, (shape, dtype) in self.buffers.state_kinds(self.rows.dtype).items():
            check_tensor(f"buffers {name!r}", state["buffers"][name], shape, dtype)
        if with_snapshots or "snapshots" in state:
            check_tensor("snapshots", state["snapshots"], (self._hosted, sum(self._widths)), self.rows.dtype)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffers.load_state_dict(state["buffers"])
        if "snapshots" in state:
            self._snapshots().copy_(state["snapshots"])
            self._sums = list(self.captured().sum(dim=1))

    def captured(self) -> Tensor:
        """(n, P): where the captured parameters lie."""
        return self._snapshots()[:, : self.rows.width]

    def _snapshots(self) -> Tensor:
        if self._store is None:
            self._store = self._new(self._hosted, sum(self._widths))
        return self._store

    def _flat_buffer(self) -> Tensor:
        if self._flat is None:
            self._flat = self._new(self._flat_width)
        return self._flat

    def _new(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # it outlives an evaluation during which it may be made
            return torch.zeros(*shape, dtype=self.rows.dtype, device=self.rows.device)


def _finite(total: float, row: Tensor, extras: Tensor, buffers: Tensor) -> bool:
    """Are all numbers finite? The sum tells at once, unless it overflows."""
    beside = [part for part in (extras, buffers) if part.numel()]
    if math.isfinite(sum(float(part.sum()) for part in beside) + total):
        return True
    return all(bool(torch.isfinite(part).all()) for part in (row, *beside))
