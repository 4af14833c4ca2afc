"""One average under way, and how the hosted workers board and leave it.

``Hangar`` owns the memory: the flat buffer that every collective reuses and, with overlap, a snapshot per worker.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prsgd.averaging.base import SUMS_WIDTH, Header, Landing, Sums
from prsgd.comm.base import Communicator, Done, Work
from prsgd.core.resuming import check_shape
from prsgd.core.worker import Worker
from prsgd.errors import DivergedError
from prsgd.records import Modelled, Record
from prsgd.replicas.buffers import Buffers
from prsgd.replicas.optimizer_state import OptimizerState
from prsgd.replicas.rows import Rows, subtract_from


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
    pooled: tuple[Tensor, Tensor] | None = None
    """All workers' buffers, once somebody needed them."""

    def record(self, *, round: int, lr: float, modelled: Modelled | None) -> Record:
        """What is known of it here; the numbers of all processes come with the next one."""
        assert self.landing is not None
        sums = self.landing.header.sums
        return Record(
            round=round,
            step=self.step,
            period=self.period,
            overlap=self.overlap,
            workers=int(sums.workers),
            bad_workers=int(sums.bad),
            bytes_sent=self.landing.bytes_sent,
            server_bytes_sent=self.landing.server_bytes_sent,
            hops=self.landing.hops,
            wait_seconds=self.wait_seconds,
            copy_seconds=self.copy_seconds,
            flight_seconds=self.flight_seconds,
            lr=lr,
            drift=None,
            loss=None,
            samples=0,
            modelled=modelled,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything but the snapshots, which the Hangar saves; somebody has waited for it."""
        assert self.landing is not None
        header, landing = self.landing.header, self.landing
        tensors = {"target": landing.target, "mean": landing.mean}
        if landing.exact is not landing.target:
            tensors["exact_mean"] = landing.exact
        return {
            **{k: v for k, v in vars(self).items() if k not in ("work", "snap", "landing", "to_land", "pooled")},
            "to_land": sorted(self.to_land),
            **{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()},
            "memory": None if landing.memory is None else saved(landing.memory),
            "extras": header.extras.clone(),
            "exact": header.exact.clone(),
            "sums": list(header.sums),
            "step_seconds": list(header.step_seconds),
            "bytes_sent": [self.landing.bytes_sent, self.landing.server_bytes_sent],
            "hops": self.landing.hops,
            "shared": self.landing.shared,
        }

    @staticmethod
    def from_state(state: Mapping[str, Any], snap: Tensor) -> Flight:
        fields = dict(state)
        header = Header(
            Sums(*fields.pop("sums")),
            fields.pop("exact").clone(),
            fields.pop("extras").clone(),
            step_seconds=tuple(fields.pop("step_seconds")),
        )
        found = {name: fields.pop(name, None) for name in ("mean", "target")}
        tensors = {name: None if tensor is None else tensor.clone() for name, tensor in found.items()}
        exact = fields.pop("exact_mean") if "exact_mean" in fields else tensors["target"]
        memory = fields.pop("memory")
        bytes_sent, server_bytes_sent = fields.pop("bytes_sent")
        landing = Landing(
            target=tensors["target"],
            mean=tensors["mean"],
            exact=exact,  # the target itself where it is that
            header=header,
            bytes_sent=bytes_sent,
            server_bytes_sent=server_bytes_sent,
            hops=fields.pop("hops"),
            shared=fields.pop("shared"),
            memory=None if memory is None else saved(memory),
        )
        fields["to_land"] = set(fields["to_land"])
        fields["counts"], fields["bad"] = tuple(fields["counts"]), tuple(fields["bad"])
        return Flight(work=Done(landing), snap=snap, landing=landing, **fields)


@dataclass
class Boarding:
    """What the hosted workers bring to an average."""

    snap: Tensor
    """(n, P) parameters"""
    extras: Tensor
    """(n, E) optimizer state"""
    buffers: Tensor
    """(n, B) BatchNorm statistics and other buffers, packed"""
    flat: Tensor
    bad: tuple[bool, ...]


class Hangar:
    """The hosted workers' models, and the memory that averages of them need.

    Beyond the models: one row (the flat buffer) without overlap; one more per hosted worker with it.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        rows: Rows,
        optimizers: Sequence[Optimizer],
        *,
        optimizer_state: str,
        overlap: int,
        comm: Communicator,
        shares_speed: bool = False,
    ) -> None:
        self.rows = rows
        self._num_times = comm.num_workers if shares_speed else 0
        self.buffers = Buffers(models, comm.workers, comm.num_workers)
        self._state = OptimizerState(optimizers, rows.workers, travels=optimizer_state == "average")
        self.optimizer_state, self._overlap, self._workers = optimizer_state, overlap, comm.workers
        self._widths = [rows.width, self._state.width, self.buffers.width]
        self._flat_width = sum((rows.width, self._state.width, SUMS_WIDTH, self._num_times, self.buffers.sum_width))
        # Made when first needed: the flat buffer, and the hosted workers' snapshots or what of them is not in place.
        self._sums = [torch.zeros(())] * len(models)  # of the snapshots: not finite if a number is not
        self._found: dict[int, str | None] = {}
        """By hosted worker whose model was not finite: the buffer that was not, if it was one."""
        self._flat: Tensor | None = None
        self._store: Tensor | None = None

    def describe(self) -> list[str]:
        """What must be alike on all workers beside the models."""
        dtype = str(self.rows.dtype).removeprefix("torch.")
        return [
            *self._state.describe(),
            f"optimizer_state {self.optimizer_state!r}, overlap {self._overlap}, sums in {dtype}",
            f"{self._num_times} step times in the header",
            f"buffers of {self.buffers.width} numbers, {self.buffers.sum_width} as they travel",
        ]

    def settle(self) -> None:
        """All workers have the same model now."""
        self.buffers.settle(self.rows.dtype, self.rows.device)

    def row(self, i: int) -> Tensor:
        """A copy of worker i's parameters as they are."""
        row = self._new(self.rows.width)
        self.rows.pack(i, row)
        return row

    def capture(self, i: int) -> None:
        """Copy worker i's snapshot; with overlap its model moves on while the average travels."""
        row, extras, buffers = self._snapshots()[i].split(self._widths)
        self._sums[i] = self.rows.pack(i, row)
        self._state.pack(i, extras)
        self.buffers.pack(i, buffers)

    def board(self, *, capture: Sequence[int], consensus: bool) -> Boarding:
        """The snapshots of all hosted workers: those of ``capture`` taken now, the others when their rounds closed."""
        if self._overlap and not consensus:
            for i in capture:
                self.capture(i)
            snap, extras, buffers = self._snapshots().split(self._widths, dim=1)
            flat = self._flat_buffer()
        else:
            # With overlap an average may be in flight, so a consensus has memory of its own while it lasts.
            flat = self._new(self._flat_width) if self._overlap else self._flat_buffer()
            snap, extras, buffers = self._in_place(flat)
        bad = tuple(not self._finite(i, *parts) for i, parts in enumerate(zip(snap, extras, buffers)))
        for i in (i for i, is_bad in enumerate(bad) if is_bad):
            self._found[i] = self.buffers.not_finite(i)
        return Boarding(snap, extras, buffers, flat, bad)

    def _finite(self, i: int, row: Tensor, extras: Tensor, buffers: Tensor) -> bool:
        beside = [part for part in (extras, buffers) if part.numel()]
        if math.isfinite(sum(float(part.sum()) for part in beside) + float(self._sums[i])):
            return True
        return all(bool(torch.isfinite(part).all()) for part in (row, *beside))

    def header(
        self,
        boarding: Boarding,
        workers: Sequence[Worker],
        numbers: Sums,
        *,
        step_seconds: Callable[[int], float],
        lr: float,
        consensus: bool,
        everybody: bool = False,
        passes: tuple[int, ...] = (),
    ) -> Header:
        """What travels beside the rows. A worker counts if its model is finite and, once it is done, has news;
        ``everybody``: with news or without. Its statistics count if they have news and its model does, or did in the
        newest average that has landed on it.
        """
        at = [(w.steps, w.samples) if consensus else (w.snapped_at, w.snapped_samples) for w in workers]
        steps = tuple(step - w.seen for (step, _), w in zip(at, workers))
        counts = tuple(
            not bad and (not w.answers or new > 0 or everybody) for bad, w, new in zip(boarding.bad, workers, steps)
        )
        pools = [
            not bad and step > w.pooled and (count or w.counted)
            for bad, count, (step, _), w in zip(boarding.bad, counts, at, workers)
        ]
        return Header(
            sums=numbers._replace(
                workers=sum(counts),
                done=0 if consensus else sum(w.answers for w in workers),
                bad=sum(boarding.bad),
                consensus=len(workers) if consensus else 0,
                lr=lr * sum(not w.answers for w in workers),
            ),
            exact=self.buffers.sums(boarding.buffers, pools),
            extras=boarding.extras,
            counts=counts,
            bad=boarding.bad,
            steps=steps,
            samples=tuple(samples - w.seen_samples for (_, samples), w in zip(at, workers)),
            step_seconds=self._step_seconds(step_seconds),
            passes=passes,
            flat=boarding.flat,
        )

    def _step_seconds(self, of: Callable[[int], float]) -> tuple[float, ...]:
        found = [0.0] * self._num_times
        if found:
            for i, worker in enumerate(self._workers):
                found[worker] = of(i)
        return tuple(found)

    def land(self, i: int, flight: Flight, *, moved: bool, with_buffers: bool) -> None:
        """Move worker i to its target: x_i += target_i - snap_i, or the target itself if it has not moved since."""
        landing = flight.landing
        assert landing is not None
        bad = flight.bad[i]
        if bad and landing.target is None:
            raise DivergedError(
                f"worker {self._workers[i]}: its model is not finite, and the average brought none to restart from; "
                "lower the lr, or clip gradients"
            )
        if landing.target is not None:
            target = landing.target if landing.target.dim() == 1 else landing.target[i]
            mean = landing.mean if landing.exact is None else landing.exact
            apart = None
            if flight.counts[i] and mean is not None and mean is not landing.target:  # from what it brought
                brought = flight.snap[i] if self._overlap else self.row(i)
                apart = float((brought - mean).double().square().sum())
            # What was done to its model since the snapshot stays, be it a step or an edit of the user's (a mask, a
            # clamp): x_i += target - snap_i, which in floating point is not the target itself where x_i is snap_i.
            if not bad and (moved or (self._overlap and not self.rows.equal(i, flight.snap[i]))):
                distance = subtract_from(target, flight.snap[i])
                self.rows.add(i, flight.snap[i])
            else:
                distance = self.rows.replace(i, target)
            if flight.counts[i] and mean is not None:
                flight.drift += distance if apart is None else apart
                flight.drifts += 1
            if self.optimizer_state == "average":
                self._state.write(i, landing.header.extras)
            elif self.optimizer_state == "reset":
                self._state.forget(i)
        if with_buffers or bad:
            if flight.pooled is None:
                sums = landing.header.exact
                flight.pooled = self.buffers.pooled(sums if landing.shared else torch.zeros_like(sums))
            self.buffers.write(i, flight.pooled)
        if bad:
            self._state.forget(i)
            where = f" (buffer {self._found[i]!r})" if self._found.get(i) else ""
            warnings.warn(
                f"worker {self._workers[i]}: its model was not finite{where} and was replaced by the other workers' "
                "mean",
                RuntimeWarning,
                stacklevel=2,
            )

    def state_dict(self, *, with_snapshots: bool) -> dict[str, Any]:
        state: dict[str, Any] = {"buffers": self.buffers.state_dict()}
        if with_snapshots:
            state["snapshots"] = self._snapshots().clone()
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error unless ``load_state_dict`` can take it."""
        for name, shape in self.buffers.state_shapes().items():
            check_shape(f"buffers {name!r}", state["buffers"][name], shape)
        if "snapshots" in state:
            check_shape("snapshots", state["snapshots"], (len(self._workers), sum(self._widths)))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.buffers.load_state_dict(state["buffers"])
        if "snapshots" in state:
            self._snapshots().copy_(state["snapshots"])
            self._sums = list(self.snapshots().sum(dim=1))

    def snapshots(self) -> Tensor:
        """(n, P): where a flight's snapshots lie."""
        return self._snapshots()[:, : self.rows.width]

    def _in_place(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Snapshots without copies: a fleet's rows as they lie, a lone model packed into its place in ``flat``."""
        n = len(self._workers)
        if self.rows.matrix is None:
            snap, extras = (part.unsqueeze(0) for part in flat[: sum(self._widths[:2])].split(self._widths[:2]))
            self._sums[0] = self.rows.pack(0, snap[0])
            buffers = torch.empty(n, self._widths[2], dtype=snap.dtype, device=snap.device)
        else:
            snap = self.rows.matrix
            self._sums = list(snap.sum(dim=1, dtype=self.rows.dtype))
            extras, buffers = self._new(n, sum(self._widths[1:])).split(self._widths[1:], dim=1)
        for i in range(n):
            self._state.pack(i, extras[i])
            self.buffers.pack(i, buffers[i])
        return snap, extras, buffers

    def _snapshots(self) -> Tensor:
        if self._store is None:
            self._store = self._new(len(self._workers), sum(self._widths))
        return self._store

    def _flat_buffer(self) -> Tensor:
        if self._flat is None:
            self._flat = self._new(self._flat_width)
        return self._flat

    def _new(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # it outlives an evaluation during which it may be made
            return torch.zeros(*shape, dtype=self.rows.dtype, device=self.rows.device)


def saved(memory: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of what an averaging remembers."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in memory.items()}
