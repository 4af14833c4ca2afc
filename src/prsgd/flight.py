"""One average under way, and how the hosted workers board and leave it.

``Hangar`` owns the memory: the flat buffer that every collective reuses and, with overlap, a snapshot per hosted worker.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from prsgd.averaging.base import Header, Landing, Sums
from prsgd.comm.base import Done, Work
from prsgd.state import Extras, Rows, finite_rows, state_keys, subtract_from


@dataclass
class Flight:
    """An average that was launched."""

    work: Work[Landing]
    snap: Tensor
    """(n, P), as launched; with overlap it becomes target - snap, worker by worker, as they land."""
    counts: tuple[bool, ...]
    bad: tuple[bool, ...]
    to_land: set[int]
    """Hosted workers, by place, on which it has not landed."""
    landing: Landing | None = None
    """What came back, once somebody waited for it."""
    announced: bool = False
    """Its header was read."""
    step: int = 0
    period: int = 0
    overlap: int = 0
    wait_seconds: float = 0.0
    copy_seconds: float = 0.0
    flight_seconds: float = 0.0
    drift: float = 0.0
    drifts: int = 0

    def state_dict(self) -> dict[str, Any]:
        """Everything but the snapshots, which the Hangar saves; somebody has waited for it."""
        assert self.landing is not None
        header, target = self.landing.header, self.landing.target
        return {
            **{k: v for k, v in vars(self).items() if k not in ("work", "snap", "landing", "to_land")},
            "to_land": sorted(self.to_land),
            "target": None if target is None else target.clone(),
            "extras": header.extras.clone(),
            "slots": header.slots.clone(),
            "sums": list(header.sums),
            "bytes_sent": self.landing.bytes_sent,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any], snap: Tensor) -> Flight:
        fields = dict(state)
        header = Header(Sums(*fields.pop("sums")), fields.pop("slots").clone(), fields.pop("extras").clone())
        target = fields.pop("target")
        landing = Landing(None if target is None else target.clone(), header, fields.pop("bytes_sent"))
        fields["to_land"] = set(fields["to_land"])
        fields["counts"], fields["bad"] = tuple(fields["counts"]), tuple(fields["bad"])
        return Flight(work=Done(landing), snap=snap, landing=landing, **fields)


@dataclass
class Boarding:
    """What an averaging is given to launch."""

    snap: Tensor
    extras: Tensor
    flat: Tensor
    bad: tuple[bool, ...]


@dataclass
class Hangar:
    """The hosted workers' models, and the memory that averages of them need.

    Beyond the models: one row (the flat buffer) without overlap; one more per hosted worker with it.
    """

    models: Sequence[nn.Module]
    rows: Rows
    optimizers: Sequence[Optimizer]
    optimizer_state: str
    overlap: int
    num_workers: int
    workers: range
    extras: Extras = field(init=False)

    def __post_init__(self) -> None:
        self.extras = Extras(self.models, self._optimizer_slots())
        self._widths = [self.rows.width, self.extras.width]
        self.tail = len(Sums._fields) + self.num_workers * self.extras.num_counters
        self._flat: Tensor | None = None
        self._store: Tensor | None = None
        self._extras_store: Tensor | None = None

    def describe(self) -> list[str]:
        """What must be alike on all workers beside the models."""
        shapes = [f"optimizer state {key!r} {list(p.shape)}" for _, p, key in self._optimizer_slots()[0]]
        return [*shapes, f"rows of {self.rows.width} numbers summed in {str(self.rows.dtype).removeprefix('torch.')}"]

    def settle(self) -> None:
        """All workers have the same model now."""
        self.extras.settle(self.rows.dtype, self.rows.device)

    def capture(self, i: int) -> None:
        """Copy worker i's snapshot; with overlap its model moves on while the average travels."""
        row, extras = self._snapshots()[i].split(self._widths)
        self.rows.pack(i, row)
        self.extras.pack(i, extras)

    def board(self, *, capture: Sequence[int], consensus: bool) -> Boarding:
        """The snapshots of all hosted workers: those of ``capture`` taken now, the others when their rounds closed.

        Without overlap nothing is copied but a lone model's tensors, into their place in the flat buffer. A consensus
        with overlap may meet an average in flight, so it has memory of its own while it lasts.
        """
        n = len(self.models)
        if self.overlap and not consensus:
            for i in capture:
                self.capture(i)
            snap, extras = self._snapshots().split(self._widths, dim=1)
            flat = self._flat_buffer()
        else:
            flat = self._new_flat() if self.overlap else self._flat_buffer()
            snap, extras, _ = flat.unsqueeze(0).split([*self._widths, self.tail], dim=1)
            if self.rows.matrix is not None:
                snap = self.rows.matrix
            else:
                self.rows.pack(0, snap[0])
            if n > 1:
                if self._extras_store is None:
                    self._extras_store = self._new(n, self.extras.width)
                extras = self._extras_store
            for i in range(n):
                self.extras.pack(i, extras[i])
        finite = [a and b for a, b in zip(finite_rows(snap), finite_rows(extras))]
        if not consensus:
            for row in (r for ok, pair in zip(finite, zip(snap, extras)) if not ok for r in pair):
                row.zero_()
        return Boarding(snap, extras, flat, tuple(not ok for ok in finite))

    def slots(self) -> Tensor:
        """Each hosted worker's counters in its own place."""
        count = self.extras.num_counters
        slots = self._new(self.num_workers, count)
        for i, worker in enumerate(self.workers if count else ()):
            slots[worker] = self.extras.slot_values(i)
        return slots.view(-1)

    def land(self, i: int, flight: Flight, *, moved: bool, with_stats: bool) -> None:
        """Move worker i to its target: x_i += target_i - snap_i, or the target itself if it has not moved since."""
        landing = flight.landing
        assert landing is not None
        bad = flight.bad[i]
        if landing.target is not None:
            target = landing.target if landing.target.dim() == 1 else landing.target[i]
            if moved and not bad:
                distance = subtract_from(target, flight.snap[i])
                self.rows.add(i, flight.snap[i])
            else:
                distance = self.rows.replace(i, target)
            if flight.counts[i]:
                flight.drift += distance
                flight.drifts += 1
            if self.optimizer_state == "average":
                self.extras.write_optimizer_state(i, landing.header.extras)
        if with_stats or bad:
            known = landing.target is not None
            counters = self.extras.counters_from(landing.header.slots, self.num_workers) if known else None
            self.extras.write_stats(i, landing.header.extras if known else None)
            self.extras.write_counters(i, counters)
        if bad or (self.optimizer_state == "reset" and landing.target is not None):
            self._forget(i)
        if bad:
            warnings.warn(
                f"worker {self.workers[i]}: its model was not finite and was replaced by the other workers' mean",
                RuntimeWarning,
                stacklevel=2,
            )

    def adopt(self, landing: Landing) -> None:
        """All workers have taken over the statistics of ``landing``."""
        if landing.target is not None:
            counters = self.extras.counters_from(landing.header.slots, self.num_workers)
            self.extras.adopt(landing.header.extras, counters)

    def state_dict(self, flight: Flight | None, closed: Sequence[int]) -> dict[str, Any]:
        state: dict[str, Any] = {"extras": self.extras.state_dict()}
        if self._store is not None and (closed or flight is not None):
            state["snapshots"] = self._store.clone()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.extras.load_state_dict(state["extras"])
        if "snapshots" in state:
            self._snapshots().copy_(state["snapshots"])

    def snapshots(self) -> Tensor:
        """(n, P): where a flight's snapshots lie."""
        return self._snapshots()[:, : self.rows.width] if self.overlap else self._new(len(self.models), self.rows.width)

    def _snapshots(self) -> Tensor:
        if self._store is None:
            self._store = self._new(len(self.models), sum(self._widths))
        return self._store

    def _flat_buffer(self) -> Tensor:
        if self._flat is None:
            self._flat = self._new_flat()
        return self._flat

    def _new_flat(self) -> Tensor:
        return self._new(sum(self._widths) + self.tail)

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=self.rows.dtype, device=self.rows.device)

    def _forget(self, i: int) -> None:
        for p in self.rows.workers[i].values():
            for optimizer in self.optimizers:
                optimizer.state.pop(p, None)

    def _optimizer_slots(self) -> list[list[tuple[Optimizer, Parameter, str]]]:
        """For each hosted worker, where the optimizer state that is averaged lies."""
        if self.optimizer_state != "average":
            return [[] for _ in self.models]
        keys: dict[Parameter, list[tuple[Optimizer, str]]] = {}
        for optimizer in self.optimizers:
            for group, names in zip(optimizer.param_groups, state_keys(optimizer)):
                for p in group["params"]:
                    keys.setdefault(p, []).extend((optimizer, name) for name in names)
        return [[(o, p, k) for p in named.values() for o, k in keys.get(p, [])] for named in self.rows.workers]
