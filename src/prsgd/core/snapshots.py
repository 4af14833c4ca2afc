"""The hosted workers' models as an average takes them, and the memory for that.

Beyond the models: one row (the flat buffer that every collective reuses) without overlap; one more per hosted worker
with it.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prsgd.core.resuming import check_tensor
from prsgd.replicas.buffers import Buffers
from prsgd.replicas.optimizer_state import OptimizerState
from prsgd.replicas.rows import Rows, sums_of_parts


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
    """Per hosted worker: the sum of its parameters."""
    marks: tuple[float, ...]
    """Per hosted worker: a number that is the same for models that are alike to the last bit, and hardly ever for
    others: a hash of what their parts add up to. (The sum of all would not do: under a softmax a linear layer's never
    changes, and beside a huge number no other is seen.)"""


class Snapshots:
    """What travels of the hosted workers on one lane: parameters, optimizer state where asked, buffers."""

    def __init__(self, rows: Rows, state: OptimizerState, buffers: Buffers, *, overlap: int, tail: int) -> None:
        self.rows, self.state, self.buffers = rows, state, buffers
        self.overlap, self._hosted = overlap, len(rows.workers)
        self.number = 1
        """Of the average that is next, by which it is known what of the optimizer state travels with it."""
        self._widths = [rows.width, state.width, buffers.width]
        self._flat_width = rows.width + state.width + tail + buffers.sum_width
        # Made when first needed: the flat buffer, and the hosted workers' snapshots or what of them is not in place.
        self._sums = [torch.zeros(1)] * self._hosted  # of the snapshots' parts: not finite if a number is not
        self._capture_seconds = 0.0
        self.not_finite: dict[int, str | None] = {}
        """By hosted worker whose model was not finite: the buffer that was not, if it was one."""
        self._flat: Tensor | None = None
        self._lone: tuple[Tensor, Tensor, Tensor] | None = None  # the parts of the flat buffer that a lone model fills
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
        began = time.perf_counter()
        row, extras, buffers = self._snapshots()[i].split(self._widths)
        self._sums[i] = self.rows.pack(i, row)
        self._pack_beside(i, extras[: self._num_extras], buffers)
        self._capture_seconds += time.perf_counter() - began

    def take_seconds(self) -> float:
        """What capturing took since this was asked before."""
        seconds, self._capture_seconds = self._capture_seconds, 0.0
        return seconds

    def board(self, *, as_they_are: bool = False) -> Boarded:
        """The snapshots of all hosted workers, or their models as they are now."""
        if self.overlap and not as_they_are:
            snap, extras, buffers = self._split(self._snapshots())
            flat = self._flat_buffer()
        else:
            # With overlap an average may be in flight, so a look has memory of its own while it lasts.
            flat = self._new(self._flat_width) if self.overlap else self._flat_buffer()
            snap, extras, buffers = self._in_place(flat)
        flat = flat[: self._flat_width - self._widths[1] + extras.shape[1]]
        sums = [parts.cpu() for parts in self._sums]
        totals = tuple(float(parts.sum()) for parts in sums)
        bad = _not_finite(totals, snap, extras, buffers)
        for i in (i for i, is_bad in enumerate(bad) if is_bad):
            self.not_finite[i] = self.buffers.not_finite(i)
        marks = tuple(float(zlib.crc32(parts.view(torch.uint8).numpy().tobytes())) for parts in sums)
        return Boarded(snap, extras, buffers, flat, bad, totals, marks)

    def brought(self, i: int, snap: Tensor) -> Tensor:
        """What worker i brought to an average that was launched with ``snap`` and has not landed on it."""
        return snap[i] if self.overlap else self.row(i)

    def has_moved(self, i: int, snap: Tensor) -> bool:
        """Was worker i's model changed, by whatever means, since it was captured?"""
        return self.overlap > 0 and not self.rows.equal(i, snap[i])

    def _in_place(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Snapshots without copies: a fleet's rows as they lie, a lone model packed into its place in ``flat``."""
        if self.rows.matrix is None and self._hosted > 1:  # parts of a fleet's rows that do not lie together
            store = self._new(self._hosted, sum(self._widths)) if self.overlap else self._snapshots()
            snap, extras, buffers = self._split(store)
            for i in range(self._hosted):
                self._sums[i] = self.rows.pack(i, snap[i])
                self._pack_beside(i, extras[i], buffers[i])
            return snap, extras, buffers
        if self.rows.matrix is None:
            snap, extras, buffers = self._lone_parts(flat)
            self._sums[0] = self.rows.pack(0, snap)
            self._pack_beside(0, extras, buffers)
            return snap.unsqueeze(0), extras.unsqueeze(0), buffers.unsqueeze(0)
        snap = self.rows.matrix
        self._sums = list(sums_of_parts(snap))
        extras, buffers = self._new(self._hosted, self._num_extras), self._new(self._hosted, self._widths[2])
        for i in range(self._hosted):
            self._pack_beside(i, extras[i], buffers[i])
        return snap, extras, buffers

    @property
    def _num_extras(self) -> int:
        return self.state.width_of(self.number) if self._widths[1] else 0

    def _split(self, store: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Parameters, as much optimizer state as travels, and buffers."""
        snap, extras, buffers = store.split(self._widths, dim=1)
        return snap, extras[:, : self._num_extras], buffers

    def _lone_parts(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where a lone model's parameters and optimizer state lie in ``flat``, and a place for its buffers."""
        if flat is self._flat and self._lone is not None and self._lone[1].numel() == self._num_extras:
            return self._lone
        snap, extras = flat[: self._widths[0] + self._num_extras].split([self._widths[0], self._num_extras])
        lone = snap, extras, self._new(self._widths[2])
        if flat is self._flat:
            self._lone = lone
            self.rows.lands_from(snap)
        return lone

    def _pack_beside(self, i: int, extras: Tensor, buffers: Tensor) -> None:
        """What travels beside worker i's parameters."""
        if extras.numel():
            self.state.pack(i, extras, self.number)
        if self._widths[2]:
            self.buffers.pack(i, buffers)

    def state_dict(self, *, with_snapshots: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"buffers": self.buffers.state_dict(), "number": self.number}
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
        self.number = int(state["number"])
        if "snapshots" in state:
            self._snapshots().copy_(state["snapshots"])
            self._sums = list(sums_of_parts(self.captured()))

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


def _not_finite(totals: Sequence[float], snap: Tensor, extras: Tensor, buffers: Tensor) -> tuple[bool, ...]:
    """Per worker: is any of its numbers not finite? Sums tell at once, unless one overflows."""
    sums = [totals, *(part.sum(dim=1).tolist() for part in (extras, buffers) if part.numel())]
    suspects = [not math.isfinite(sum(of_worker)) for of_worker in zip(*sums)]
    if not any(suspects):
        return tuple(suspects)
    parts = snap, extras, buffers
    return tuple(
        suspect and not all(bool(torch.isfinite(part[i]).all()) for part in parts) for i, suspect in enumerate(suspects)
    )
