"""A lane: what of the models travels together, with a timetable, a memory and an average under way of its own.

A run has one lane, the whole model, or several: parts of the model that are averaged one after the other. Buffers and
the records that users see ride with the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prsgd.averaging.base import NOISE_WIDTH, SUMS_WIDTH, Averaging, Header, Landing, Setting, Sums
from prsgd.clocks.base import Timekeeper
from prsgd.comm.base import Communicator, Done
from prsgd.comm.team import Lone, Team
from prsgd.core.average import Average, Averages
from prsgd.core.books import Books
from prsgd.core.header import Headers
from prsgd.core.hiding import Hiding
from prsgd.core.loop import Loop
from prsgd.core.noise import GradientNoise
from prsgd.core.pace import Pace
from prsgd.core.patience import Patience
from prsgd.core.resuming import check_memory, check_tensor, inherited, saved
from prsgd.core.roll import Account, Roll
from prsgd.core.snapshots import Snapshots
from prsgd.replicas.buffers import Buffers
from prsgd.replicas.optimizer_state import OptimizerState
from prsgd.replicas.rows import Rows
from prsgd.schedules.base import OWN_MOMENTUM, Learns, Schedule

_PLAIN = (
    "number", "members", "who", "announced", "missed", "step", "period", "overlap", "wait_seconds", "copy_seconds",
    "flight_seconds", "drift", "drifts", "reason", "outliers",
)  # fmt: skip
"""Of an ``Average``, as it is."""


@dataclass(frozen=True)
class Run:
    """What the lanes of a run share."""

    comm: Communicator
    averaging: Averaging
    setting: Setting
    roll: Roll
    clock: Timekeeper
    lr: Callable[[], float]
    set_lr: Callable[[float], None]
    check: Callable[[], None]
    """Raises an error if models or optimizers are no longer what they were."""
    timeout_seconds: float | None
    done_timeout_seconds: float
    skipped: Callable[[], int] | None = None
    """Steps that the hosted worker skipped since this was last asked, where the averaging has to know."""
    noise: GradientNoise | None = None
    """How much the hosted workers' gradients scatter, where the schedule has to know."""
    team: Team = field(default_factory=Lone)
    """The processes that are a hosted worker together."""


class Lane:
    """The hosted workers' ``rows`` on their way: the loop over them, and what is saved of it."""

    def __init__(
        self, run: Run, schedule: Schedule, rows: Rows, state: OptimizerState, buffers: Buffers, books: Books
    ) -> None:
        hosted, setting = len(run.comm.workers), run.setting
        hides = setting.hides and not run.averaging.hears_neighbours_only  # which would not choose alike: it stays at 1
        by_worker = (setting.shares_speed or hides) + hides + run.averaging.tells
        self.snapshots = Snapshots(
            rows,
            state,
            buffers,
            overlap=setting.overlap,
            tail=SUMS_WIDTH + run.comm.num_workers * by_worker + NOISE_WIDTH * setting.learns,
        )
        self.books = books
        paces, accounts = [Pace(setting.overlap) for _ in range(hosted)], [Account() for _ in range(hosted)]
        self.averages = Averages(
            comm=run.comm,
            averaging=run.averaging,
            snapshots=self.snapshots,
            optimizer_state=setting.optimizer_state,
            paces=paces,
            accounts=accounts,
            roll=run.roll,
            books=books,
            clock=run.clock,
            headers=Headers(
                comm=run.comm,
                averaging=run.averaging,
                buffers=buffers,
                paces=paces,
                accounts=accounts,
                roll=run.roll,
                books=books,
                clock=run.clock,
                lr=run.lr,
                shares_speed=setting.shares_speed,
                hides=hides,
                skipped=run.skipped,
                noise=run.noise,
                team=run.team,
            ),
            patience=Patience(run.timeout_seconds),
            done_timeout_seconds=run.done_timeout_seconds,
            memory={},
            learns=schedule if isinstance(schedule, Learns) else None,
            learned=_known(run) if setting.learns else {},
            hiding=Hiding() if hides else None,
        )
        self.loop = Loop(schedule, self.averages, run.clock, check=run.check, lr=run.lr, set_lr=run.set_lr)
        self._clock, self._ids, self._known = run.clock, run.roll.ids, dict(self.averages.learned)
        self._inherited: Mapping[str, Any] = {}
        """What the averaging remembered over other workers."""

    @property
    def paces(self) -> Sequence[Pace]:
        return self.averages.paces

    @property
    def is_ending(self) -> bool:
        """Had some workers run out of data, and others not, at the newest average? Waits for one in flight."""
        averages, average = self.averages, self.loop.average
        done = averages.done if average is None else averages.wait(average).header.sums.done
        return 0 < done < len(averages.comm.members)

    def begin(self) -> None:
        """All workers have the same model now."""
        rows = self.snapshots.rows
        self.snapshots.buffers.settle(rows.dtype, rows.device)
        averaging, point = self.averages.averaging, self.snapshots.row(0)
        self.averages.memory = averaging.init(point, len(self.paces))
        if self._inherited:
            remembered = inherited(self._inherited, self.averages.memory, rows.width)
            self.averages.memory, self._inherited = averaging.met(remembered, point), {}

    def inherit(self, state: Mapping[str, Any]) -> None:
        """Go on where other workers were, all from one model: after their rounds, with what they have learned. Who was
        where in the open round, and what was in flight, is forgotten."""
        averages, flight = self.averages, state["flight"]
        # A round in flight is one as well: the state is that after its launch. A look may have read its header.
        self.books.inherit(state["books"], in_flight=flight is not None)
        self.loop.launches = self.books.round
        self.snapshots.number = int(state["memory"]["number"]) + (flight is not None and not flight["announced"])
        steps = max(int(pace["steps"]) for pace in state["paces"])
        for pace, account in zip(self.paces, averages.accounts):
            pace.steps = pace.opened_at = account.seen = account.pooled = steps
            pace.rounds = self.books.round
        if averages.hiding is not None and state["hiding"] is not None:
            averages.hiding.load_state_dict(state["hiding"])
        averages.learned = self._learned(state["learned"])
        averages.mean_lr, self._inherited = float(state["mean_lr"]), dict(state["averaging"])

    def show(self, landing: Landing) -> Callable[[], None]:
        """Give the first hosted worker what a look has found; the call that is returned gives back its own."""
        rows, buffers = self.snapshots.rows, self.snapshots.buffers
        own, own_buffers = self.snapshots.row(0), [(tensor, tensor.clone()) for tensor in buffers.tensors(0)]
        if landing.target is not None:
            rows.replace(0, landing.target)
        buffers.write(0, buffers.pooled(landing.header.exact))

        def give_back() -> None:
            rows.replace(0, own)
            for tensor, value in own_buffers:
                tensor.copy_(value)

        return give_back

    def state_dict(self) -> dict[str, Any]:
        """Waits for an average in flight, and keeps it without landing it."""
        averages, average = self.averages, self.loop.average
        if average is not None:
            averages.wait(average)
        taken = average is not None or any(pace.boards for pace in self.paces)
        self.books.saves += 1
        return {
            "paces": [pace.state_dict(self._clock(id)) for pace, id in zip(self.paces, self._ids)],
            "accounts": [account.state_dict() for account in averages.accounts],
            "launches": self.loop.launches,
            "place": self.loop.place,
            "averaging": saved(averages.memory),
            "apart": averages.apart,
            "told": list(averages.headers.told),
            "flights": list(averages.headers.flights),
            "hiding": None if averages.hiding is None else averages.hiding.state_dict(),
            "learned": dict(averages.learned),
            "mean_lr": averages.mean_lr,
            "given": [[i, *(tensor.clone() for tensor in pooled)] for i, pooled in averages.given.items()],
            "memory": self.snapshots.state_dict(with_snapshots=taken and self.paces[0].overlap > 0),
            "flight": None if average is None else _average_state(average),
            "books": self.books.state_dict(),
        }

    def common(self) -> dict[str, Any]:
        """What all workers know alike at the launch of an average."""
        averages = self.averages
        return {
            "averaging": dict(averages.memory),
            "apart": averages.apart,
            "told": list(averages.headers.told),
            "hiding": None if averages.hiding is None else averages.hiding.state_dict(),
            "learned": dict(averages.learned),
            "mean_lr": averages.mean_lr,
            "buffers": self.snapshots.buffers.state_dict(),
            "books": self.books.common(),
        }

    def take_over(self, common: Mapping[str, Any]) -> None:
        """Know what another worker does, wherever this one was."""
        averages, rows = self.averages, self.snapshots.rows
        fresh = averages.averaging.init(self.snapshots.row(0), len(self.paces))
        check_memory(averages.averaging, common["averaging"], fresh, rows.width)
        self.snapshots.check_state({"buffers": common["buffers"]}, with_snapshots=False)
        self._know(common)
        averages.memory = {name: _beside(value, rows.device) for name, value in common["averaging"].items()}
        self.snapshots.buffers.load_state_dict({n: t.to(rows.device) for n, t in common["buffers"].items()})
        before = self.books.round
        self.books.take_over(common["books"])
        for pace in self.paces:
            pace.rounds += self.books.round - before

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error unless ``load_state_dict`` can take it."""
        hosted, rows, averaging = len(self.paces), self.snapshots.rows, self.averages.averaging
        for name in ("paces", "accounts"):
            _check_length(name, state[name], hosted)
        fresh = averaging.init(self.snapshots.row(0), hosted)
        check_memory(averaging, state["averaging"], fresh, rows.width)
        flight = state["flight"]
        boards = any(pace["snap"] is not None and not pace["snap"]["launched"] for pace in state["paces"])
        overlaps = self.paces[0].overlap > 0
        self.snapshots.check_state(state["memory"], with_snapshots=overlaps and (boards or flight is not None))
        if flight is None:
            return
        for name in ("counts", "bad"):
            _check_length(name, flight[name], hosted)
        if not flight["to_land"] or not set(flight["to_land"]) <= set(range(hosted)):
            raise ValueError(f"the state's average is to land on {flight['to_land']} of {hosted} workers")
        for name in ("target", "mean", "exact_mean"):
            tensor = flight.get(name)
            if tensor is not None:
                shape = (hosted, rows.width) if name == "target" and tensor.dim() == 2 else (rows.width,)
                check_tensor(f"an average's {name}", tensor, shape, rows.dtype)
        if flight["memory"] is not None:
            check_memory(averaging, flight["memory"], fresh, rows.width)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        averages = self.averages
        self.books.load_state_dict(state["books"])
        for pace, own, id in zip(self.paces, state["paces"], self._ids):
            pace.load_state_dict(own, self._clock(id))
        for account, kept in zip(averages.accounts, state["accounts"]):
            account.load_state_dict(kept)
        self.snapshots.load_state_dict(state["memory"])
        self._know(state)
        averages.memory, averages.headers.flights = saved(state["averaging"]), tuple(state["flights"])
        averages.given = {int(i): (stats.clone(), integers.clone()) for i, stats, integers in state["given"]}
        flight = state["flight"]
        self.loop.average = None if flight is None else _average_from(flight, self.snapshots.captured())
        self.loop.launches, self.loop.place = int(state["launches"]), int(state["place"])

    def _know(self, state: Mapping[str, Any]) -> None:
        averages = self.averages
        averages.apart, averages.headers.told = bool(state["apart"]), tuple(state["told"])
        if averages.hiding is not None:
            averages.hiding.load_state_dict(state["hiding"])
        averages.learned = self._learned(state["learned"])
        averages.mean_lr = float(state["mean_lr"])

    def _learned(self, told: Mapping[str, Any]) -> dict[str, float]:
        """What another run, or this one before, has learned, and what is known of this one, whatever held there."""
        learned = {str(name): float(value) for name, value in told.items() if name != OWN_MOMENTUM}
        return {**learned, **self._known}


def _beside(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _known(run: Run) -> dict[str, float]:
    """What a schedule that learns may go by from the beginning."""
    return {OWN_MOMENTUM: float(run.setting.optimizer_state == "keep")} if run.averaging.parts_evenly else {}


def _check_length(name: str, values: Any, hosted: int) -> None:
    if len(values) != hosted:
        raise ValueError(f"the state has {len(values)} {name} for {hosted} workers")


def _average_state(average: Average) -> dict[str, Any]:
    """Everything but the snapshots, which are kept beside; somebody has waited for it."""
    landing = average.arrived
    header = landing.header
    tensors = {"target": landing.target, "mean": landing.mean}
    if landing.exact is not landing.target:
        tensors["exact_mean"] = landing.exact
    return {
        **{name: getattr(average, name) for name in _PLAIN},
        "counts": list(average.counts),
        "bad": list(average.bad),
        "to_land": sorted(average.to_land),
        **{name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()},
        "memory": None if landing.memory is None else saved(landing.memory),
        "extras": header.extras.clone(),
        "exact": header.exact.clone(),
        "sums": list(header.sums),
        "own": list(average.own),
        "step_seconds": list(header.step_seconds),
        "flights": list(header.flights),
        "noise": list(header.noise),
        "tells": list(header.tells),
        "bytes_sent": [landing.bytes_sent, landing.server_bytes_sent],
        "hops": landing.hops,
        "shared": landing.shared,
    }


def _average_from(state: Mapping[str, Any], snap: Tensor) -> Average:
    header = Header(
        Sums(*state["sums"]),
        state["exact"].clone(),
        state["extras"].clone(),
        step_seconds=tuple(state["step_seconds"]),
        flights=tuple(state["flights"]),
        noise=tuple(state["noise"]),
        tells=tuple(state["tells"]),
    )
    target, mean = (None if state[name] is None else state[name].clone() for name in ("target", "mean"))
    bytes_sent, server_bytes_sent = state["bytes_sent"]
    landing = Landing(
        target=target,
        mean=mean,
        exact=state.get("exact_mean", target),  # the target itself where it is that
        header=header,
        bytes_sent=bytes_sent,
        server_bytes_sent=server_bytes_sent,
        hops=state["hops"],
        shared=state["shared"],
        memory=None if state["memory"] is None else saved(state["memory"]),
    )
    return Average(
        work=Done(landing),
        again=lambda: Done(landing),
        own=Sums(*state["own"]),
        snap=snap,
        counts=tuple(state["counts"]),
        bad=tuple(state["bad"]),
        to_land=set(state["to_land"]),
        landing=landing,
        **{name: state[name] for name in _PLAIN},
    )
