"""Parallel Restarted SGD: the algorithm.

Read beside the paper (Yu, Yang, Zhu, AAAI 2019). Its Algorithms 1-3 are one loop here. Each worker takes local steps
(Alg. 1 line 8, Alg. 2 line 6, Alg. 3 line 5: the user's own ``optimizer.step()``); a round *closes*, and its average
is launched; the average *lands*, and the worker restarts from it (Alg. 1 lines 5-6, Alg. 2 and 3 line 4). With

    d = overlap: how many of a worker's steps begin while an average travels,

d = 0 lands right after the closing step's update, and the worker restarts at the mean itself: Algorithms 2 and 3 as
printed. d >= 1 lands in the d-th step after closing, between its gradient and its update, as
x_i <- x_i + (mean_j snap_j - snap_i): d = 1 is Algorithm 1 as printed, whose gradient at x_i^{t-1} is taken while the
average of the x^{t-1} is computed.

The optimizer's hooks are the only way in: ``_before_step`` lands, ``_after_step`` counts, closes and launches.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prsgd._check import one_of, positive, whole_number
from prsgd.averaging.base import Averaging, Landing, Setting
from prsgd.averaging.mean import mean
from prsgd.clocks.base import Timekeeper
from prsgd.clocks.trace import Trace
from prsgd.clocks.wall import WallClock
from prsgd.comm.base import Communicator
from prsgd.comm.joining import current
from prsgd.core.books import Ledger
from prsgd.core.flight import Flight, Hangar, saved
from prsgd.core.resuming import check_memory, check_setup, check_shape, damage_named, described
from prsgd.core.start import agree, describe, hosted, owners, start_from_worker_0, unwrapped
from prsgd.core.tower import Tower
from prsgd.core.worker import Worker
from prsgd.errors import AverageTimeout, UsageError
from prsgd.records import Record, Totals
from prsgd.replicas.fleet import Fleet
from prsgd.schedules.base import Now, Schedule

_in_use: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that some LocalSGD hooks: two would average twice."""
_runs: weakref.WeakSet[LocalSGD] = weakref.WeakSet()
"""Those that were started."""


class LocalSGD:
    """Train locally and average now and then, with the user's loop as it was.

    ``model`` is a module (this process is one worker) or a ``Fleet`` (it hosts several); ``optimizer`` one ordinary
    torch optimizer over its parameters, or a list in the order in which they step: the last one's step counts.

    - ``schedule``: when to average: ``every``, ``growing``, ``per_worker``, ``measured``, ``timed``, ``once``.
    - ``averaging``: how: ``mean()`` unless given, or ``gossip``, ``quantized``, ``sparse``, ``easgd``, ``outer``.
    - ``overlap``: steps that hide the transfer; 0 averages right after a step, blocking.
    - ``optimizer_state`` at an average: "keep" each worker's own, "average" it too (overlap <= 1), or "reset" it.
    - ``comm``: where the workers live; the running torch.distributed group unless given, or this process alone.
    - ``clock``: worker -> seconds, for rounds that end by the clock; or a ``prsgd.cluster.ClusterClock``.
    - ``timeout_seconds``: how long to wait for an average; ``done_timeout_seconds``: how long a worker that has run
      out of data waits for the others' next one.
    - ``on_record``: called with each complete ``Record``.

    Nothing is communicated before ``start()`` (or ``with``). Leaving the ``with`` block ends the run with one more
    average, so that all workers have the same model, also if they had different numbers of batches.

    >>> import torch, prsgd
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(8), overlap=1) as local:
    ...     for _ in range(20):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(2, 4)).square().mean().backward()
    ...         optimizer.step()
    >>> local.step, local.round
    (20, 3)
    """

    def __init__(
        self,
        model: nn.Module | Fleet,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        schedule: Schedule,
        averaging: Averaging | None = None,
        overlap: int = 0,
        optimizer_state: str = "keep",
        comm: Communicator | None = None,
        clock: Callable[[int], float] | None = None,
        timeout_seconds: float = 600.0,
        done_timeout_seconds: float = 3600.0,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        self._overlap = whole_number("overlap", overlap, at_least=0)
        if isinstance(schedule, type) or not isinstance(schedule, Schedule):
            raise ValueError(f"schedule must be a schedule such as every(8), got {schedule!r}")
        if isinstance(averaging, type) or not isinstance(averaging, Averaging | None):
            raise ValueError(
                f"averaging must be one such as mean(), or of a class derived from prsgd.Averaging, got {averaging!r}"
            )
        if one_of("optimizer_state", optimizer_state, ("keep", "average", "reset")) == "average" and overlap > 1:
            raise ValueError(f'overlap must be 0 or 1 with optimizer_state="average", got {overlap}')
        self._fleet = model if isinstance(model, Fleet) else None
        self._own_comm = comm is None and self._fleet is None
        self._comm = comm or (self._fleet.comm if self._fleet else current(timeout_seconds=timeout_seconds))
        self._schedule, self._averaging = schedule, averaging or mean()
        self._clock = clock if isinstance(clock, Timekeeper) else WallClock(self._comm.workers, clock)
        self._clock.check(self._comm.num_workers, self._comm.workers)
        schedule.check(self._comm.num_workers, self._overlap)
        setting = Setting.of(schedule, self._comm.num_workers, self._overlap, optimizer_state)
        self._averaging.check(setting)
        self._models, rows = hosted(model, self._comm)
        if comm is None:
            self._comm.timeout_seconds = positive("timeout_seconds", timeout_seconds)
        self._optimizers = [unwrapped(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
        self._workers = [Worker(id) for id in self._comm.workers]
        self._require_free()
        self._owners = owners(self._optimizers, rows)
        # With several optimizers a step is over when the last of those that own the worker has stepped.
        self._closers = [
            next(o for o in reversed(self._optimizers) if i in self._owners[o]) for i in range(len(rows.workers))
        ]
        self._known = self._parameters()
        self._hangar = Hangar(
            self._models,
            rows,
            self._optimizers,
            optimizer_state=optimizer_state,
            overlap=overlap,
            comm=self._comm,
            shares_speed=setting.shares_speed,
        )
        self._flight: Flight | None = None
        self._ledger = Ledger(self._workers, on_record)
        self._tower = Tower(
            self._comm,
            self._averaging,
            self._hangar,
            self._ledger,
            self._workers,
            self._clock,
            self._lr,
            timeout_seconds=positive("timeout_seconds", timeout_seconds),
            done_timeout_seconds=positive("done_timeout_seconds", done_timeout_seconds),
        )
        self._handles: list[Any] = []
        self._phase = "new"
        self._loaded = False

    # What the user calls

    @property
    def step(self) -> int:
        """Steps taken: this process's worker's, or the most of its hosted workers'."""
        return max(w.steps for w in self._workers)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps taken by each hosted worker."""
        return tuple(w.steps for w in self._workers)

    @property
    def round(self) -> int:
        """Averages that have landed here."""
        return self._ledger.round

    @property
    def launched(self) -> int:
        """Averages launched here. Where it first reaches a number, all workers are between the same two averages,
        which is where their states fit together: save by it, and not by ``step``, unless all take the same steps."""
        return self.round + (self._flight is not None)

    @property
    def records(self) -> list[Record]:
        """One for each of the newest 10,000 averages; that of the newest comes with the next one, or with ``finish``.

        ``on_record`` gets every one, and ``totals`` counts all of them.
        """
        return list(self._ledger.records)

    @property
    def totals(self) -> Totals:
        """Rounds, bytes, samples and seconds of all averages whose records are complete."""
        return self._ledger.totals

    @property
    def comm(self) -> Communicator:
        """Where the workers live."""
        return self._comm

    @property
    def trace(self) -> Trace:
        """What the hosted workers did when: the newest steps and averages."""
        return self._clock.trace

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training, such as writing a checkpoint: rounds that end by the clock do not count it."""
        with self._clock.paused():
            yield

    def start(self) -> LocalSGD:
        """Check that the workers fit together, start all from worker 0's model (unless a state was loaded), hook in."""
        if self._phase != "new":
            raise UsageError("this LocalSGD was started before: make a new one")
        self._require_free()
        self._check_rows()
        self._phase = "running"
        _runs.add(self)
        with self._guarded():
            self._enter()
        return self

    def finish(self) -> None:
        """End the run: answer the others' averages until all are done, and leave with the model that all have."""
        self._require_running("finish")
        with self._guarded():
            self._end()
        self._unhook("over")
        if self._own_comm:
            self._comm.close()

    def abandon(self) -> None:
        """After an error, instead of ``finish``: hooks off, no collective, and the other workers fail at once."""
        if self._phase in ("running", "in consensus"):
            self._abandon()

    def __enter__(self) -> LocalSGD:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
        elif self._phase != "over":  # the user may have finished; a failed run does not end in silence
            self.finish()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Around a worker's batches of one epoch, of which each may have another number.

        A worker that is through answers the others' averages until all are; then all have the same model, by one more
        average, as at the end of a run, and go on. What follows (``consensus()``, a checkpoint, an lr scheduler's step)
        finds all workers at the same point. In a fleet, ``fleet.stop(worker)`` is for this epoch alone.
        """
        self._require_running("epoch")
        yield
        self._require_running("epoch")
        with self._guarded():
            self._end()
            for w in self._workers:
                w.done = w.waits = False
            if self._fleet is not None:
                self._fleet.stopped = set()
            self._advance()

    def log(self, *, loss: float | Tensor | None = None, samples: int | Sequence[int] = 0) -> None:
        """Add a step's loss and number of samples to the round's record.

        For a fleet both may have one entry per hosted worker. Call it once a step, always before ``optimizer.step()``
        or always after it. (After it, and with an overlap of the whole period, a round's last step is counted in the
        next round's record: its own numbers have left by then.)
        """
        self._require_running("log")
        self._ledger.log(loss, samples)

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """The average of all workers' models, to evaluate; afterwards each worker has its own model again.

        A collective: all workers call it in the same round, at the same step in the usual case. What is yielded is
        the user's own module (of a fleet the first hosted one) with other numbers in it.
        """
        self._require_running("consensus")
        with self._clock.paused():
            yield from self._consensus()

    def _consensus(self) -> Iterator[nn.Module]:
        self._check_rows()
        model, rows, buffers = self._models[0], self._hangar.rows, self._hangar.buffers
        modes = [(m, m.training) for m in model.modules()]
        # What is made here may outlive an inference mode in which the user looks.
        with torch.inference_mode(False), torch.no_grad(), self._guarded():
            if self._flight is not None:  # workers that are done have landed it, and count as they do after that
                self._land(())
            landing = self._tower.consensus()
            self._clock.gathered(self.round + 1)
            own = self._hangar.row(0)
            own_buffers = [(tensor, tensor.clone()) for tensor in buffers.tensors(0)]
            if landing.target is not None:
                rows.replace(0, landing.target)
            buffers.write(0, buffers.pooled(landing.header.exact))
        self._phase = "in consensus"
        try:
            yield model
        finally:
            self._phase = "running"
            with torch.inference_mode(False), torch.no_grad():
                rows.replace(0, own)
                for tensor, value in own_buffers:
                    tensor.copy_(value)
            for module, training in modes:
                module.training = training

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: plain numbers and tensors, beside which the model and the optimizer are to be saved.

        Waits for an average in flight and stores it without landing it. Every process saves its own, all between the
        same two averages: at the same step where all take the same steps, and otherwise (skipped steps, rounds by the
        clock, periods that differ) where ``launched`` reaches the same number.
        """
        if self._phase in ("new", "in consensus"):
            raise UsageError(f"state_dict() {_WHEN[self._phase]}")
        flight = self._flight
        if flight is not None:
            self._tower.wait(flight)
        self._ledger.saved = True
        return {
            "setup": self._setup(),
            "workers": [w.state_dict(self._clock) for w in self._workers],
            "ledger": self._ledger.state_dict(),
            "averaging": saved(self._tower.memory),
            "apart": self._tower.apart,
            "clock": self._clock.state_dict(),
            "memory": self._hangar.state_dict(
                with_snapshots=bool(self._overlap) and (flight is not None or any(w.closed for w in self._workers))
            ),
            "flight": None if flight is None else flight.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, between the constructor and ``start()``; load the model and the optimizer too.

        Another overlap, optimizer_state, averaging or model than the state's is a ``CheckpointError``; another
        schedule, or other numbers of the same averaging, go on with a warning.
        """
        if self._phase != "new":
            raise UsageError("load_state_dict() comes before start()")
        with damage_named():
            check_setup(state["setup"], self._setup())
            memory, kept = saved(state["averaging"]), state["memory"]
            check_memory(self._averaging, memory, self._averaging.init(self._hangar.row(0), len(self._workers)))
            self._hangar.check_state(kept)
            if state["flight"] is not None and state["flight"]["target"] is not None:
                width = self._hangar.rows.width
                check_shape("an average's target", state["flight"]["target"].view(-1, width)[0], (width,))
            self._clock.load_state_dict(state["clock"])  # which the workers' rounds are measured by
            workers = [Worker.from_state(w, self._clock) for w in state["workers"]]
            flight = None if state["flight"] is None else Flight.from_state(state["flight"], self._hangar.snapshots())
            apart = bool(state["apart"])
            self._ledger.load_state_dict(state["ledger"])
            self._hangar.load_state_dict(kept)
        self._tower.memory, self._tower.apart, self._flight = memory, apart, flight
        self._workers[:] = workers
        self._loaded = True

    # The algorithm

    def _enter(self) -> None:
        state = f"a state loaded after {self.launched} averages" if self._loaded else "no state loaded"
        lines = describe(self._models[0], as_it_lies=self._fleet is not None)
        entries = [*lines, *self._hangar.describe(), f"averaging {described(self._averaging)}", state]
        agree(self._comm, entries, self._hangar.rows.device)
        if not self._loaded:
            start_from_worker_0(self._comm, self._models)  # Alg. 1 line 1: x_i^0 = y-bar
            self._hangar.settle()
            self._tower.memory = self._averaging.init(self._hangar.row(0), len(self._workers))
        _in_use.update(self._optimizers)
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))
        if self._fleet is not None:
            self._fleet.on_stop = self._guarded_advance
        elif self._averaging.hears_neighbours_only:
            newest = list(self._hangar.rows.workers[0].values())[-1]
            self._handles.append(newest.register_post_accumulate_grad_hook(self._count_pass))
        self._count_passes()
        self._clock.begin()
        self._advance()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Between a step's gradient and its update: land what is due (Alg. 1 lines 5-6)."""
        if self._phase == "in consensus":
            raise UsageError("optimizer.step() inside consensus(): the step would be lost when it ends")
        if self._overlap and (kwargs.get("closure") is not None or (len(args) > 1 and args[1] is not None)):
            raise UsageError(
                "optimizer.step(closure) takes its gradient after the average would land: use overlap=0, or call "
                "backward() before optimizer.step()"
            )
        if self._fleet is not None and (self._fleet.idle or self._fleet.stopped):
            for i in self._owners[optimizer]:
                if not self._takes_part(i):
                    self._drop_gradient(i)
        if _skipped(optimizer):
            return
        for i in self._owners[optimizer]:  # asked now: a hook of somebody else may drop the gradients
            self._workers[i].takes_part = not self._workers[i].skips and self._takes_part(i)
        taking = [i for i in self._owners[optimizer] if not self._workers[i].in_step and self._workers[i].takes_part]
        for i in taking:
            self._workers[i].in_step = True
        if taking:
            self._clock.computed(taking)
        if self._flight is not None:
            with self._guarded():
                self._land_in_step(self._owners[optimizer])

    def _land_in_step(self, places: Sequence[int]) -> None:
        flight = self._flight
        assert flight is not None
        for i in places:
            w = self._workers[i]
            if w.lands_at == w.steps + 1 and not w.closed and w.takes_part:
                w.skips = flight.bad[i]
                self._land([i], in_step=not w.skips)
                if w.skips:  # the gradient was taken at a model that is not finite: no step
                    w.takes_part = False
                    self._drop_gradient(i)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """After a step's update: count it, close and launch (Alg. 2 and 3: the end of the inner loop)."""
        if _skipped(optimizer):
            for i in self._owners[optimizer]:
                self._workers[i].in_step &= optimizer is not self._closers[i]
            return
        stepped = False
        for i in self._owners[optimizer]:
            w = self._workers[i]
            w.moved |= w.takes_part
            if optimizer is self._closers[i] and (w.takes_part or w.skips):
                w.steps += w.takes_part
                w.skips = w.in_step = False
                stepped = True
        if stepped:
            self._clock.stepped(self.step)
        if stepped and (self._fleet is not None or self._is_boundary(self._workers[0])):
            self._guarded_advance()

    def _is_boundary(self, w: Worker) -> bool:
        """Has a lone worker to open or close a round? Most steps are over here."""
        return w.round is None or self._closing(w) is not None

    def _advance(self) -> None:
        """At a step boundary: open and close rounds, and launch an average whenever all hosted workers have closed."""
        if self._fleet is not None:
            for w in self._workers:
                w.done = w.id in self._fleet.stopped
            if self._flight is not None and any(self._workers[i].done for i in self._flight.to_land):
                self._land(())
        while True:
            running = [i for i, w in enumerate(self._workers) if not w.done]
            for i in running:
                self._turn(i)
            if not any(w.closed for w in self._workers) or not all(self._workers[i].closed for i in running):
                break
            self._launch()
        if self._fleet is not None:
            self._fleet.idle = {w.id for w in self._workers if w.waits and not w.done}

    def _turn(self, i: int) -> None:
        w = self._workers[i]
        if w.round is None and w.lands_at is None:
            self._open(w)
        overlap = self._closing(w)
        if overlap is not None and not w.closed:
            if w.lands_at is not None:  # rounds by the clock can be shorter than the overlap
                self._land([i])
            self._close(i, overlap)
        w.waits = w.closed and (overlap is not None or (w.lands_at is not None and w.steps + 1 >= w.lands_at))

    def _open(self, w: Worker) -> None:
        """Alg. 2 line 4: set the round's length K^s and lr gamma^s. Alg. 3: I_i."""
        now = Now(
            worker=w.id,
            num_workers=self._comm.num_workers,
            round=w.rounds + 1,
            step=w.steps,
            lr=self._lr(),
            last=self._ledger.last,
        )
        w.round = self._schedule.open(now)
        w.rounds += 1
        w.opened_seconds = self._clock(w.id)
        w.end_round()
        if w.round.lr is not None:
            for group in (g for optimizer in self._optimizers for g in optimizer.param_groups):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(w.round.lr)
                else:
                    group["lr"] = w.round.lr

    def _closing(self, w: Worker) -> int | None:
        """The overlap with which the open round closes now; None: not yet."""
        if w.round is None:
            return None
        taken = w.steps - w.opened_at
        if w.round.steps is not None and taken >= w.round.steps - min(self._overlap, w.round.steps):
            return min(self._overlap, w.round.steps)  # so early that landings fall on the multiples
        if w.round.seconds is not None and taken and self._clock(w.id) - w.opened_seconds >= w.round.seconds:
            return self._overlap
        return None

    def _close(self, i: int, overlap: int) -> None:
        w = self._workers[i]
        assert w.round is not None
        taken = w.steps - w.opened_at
        by_clock = w.round.steps is None or taken + overlap < w.round.steps
        w.period = taken if by_clock else None
        w.closed, w.round, w.lands_at = True, None, w.steps + overlap
        w.snap()
        self._clock.closed(i)
        if self._overlap:
            self._hangar.capture(i)
            if by_clock:
                self._open(w)  # time goes on; rounds of known length open when the average has landed

    def _launch(self) -> Flight:
        """Start the average of all hosted workers' snapshots, and land it on those that do not overlap it."""
        self._check_rows()
        flight = self._flight = self._tower.launch()
        for w in self._workers:
            w.closed, w.last_sent = False, True
        self._ledger.saved = False
        self._count_passes()
        blocking = [i for i, w in enumerate(self._workers) if w.lands_at == w.steps]
        if blocking or all(w.done for w in self._workers):
            self._land(blocking)
        return flight

    def _land(self, places: Sequence[int], *, in_step: bool = False) -> None:
        """Alg. 1 line 6, Alg. 2 and 3 line 4: these workers, and those that are done, restart from the average."""
        flight = self._flight
        assert flight is not None
        began = {i: self._clock(self._workers[i].id) for i in places}
        landing = self._tower.arrive(flight)
        for i in sorted(flight.to_land):
            if i in places or self._workers[i].done:
                self._touch_down(i, flight, in_step=in_step and not self._workers[i].done)
        for i, seconds in began.items():  # waiting for the last average is no part of the round that is open by now
            self._workers[i].opened_seconds += self._clock(self._workers[i].id) - seconds
        if not flight.to_land:
            self._complete(flight, landing)

    def _touch_down(self, i: int, flight: Flight, *, in_step: bool = False) -> None:
        began = time.perf_counter()
        w = self._workers[i]
        landing = flight.landing
        assert landing is not None
        self._hangar.land(i, flight, moved=w.moved, with_buffers=self._pools(landing))
        flight.to_land.discard(i)
        step = w.steps + in_step
        flight.step = max(flight.step, step)
        flight.overlap = max(flight.overlap, step - w.snapped_at)
        flight.period = max(flight.period, step - w.opened_at if w.period is None else w.period)
        w.seen, w.seen_samples, w.lands_at = w.snapped_at, w.snapped_samples, None
        w.counted = flight.counts[i]
        if w.done and w.round is None:
            w.end_round()
        flight.copy_seconds += time.perf_counter() - began
        if landing.target is not None and landing.header.sums.workers:
            self._clock.landed(i, self.round + 1)

    def _complete(self, flight: Flight, landing: Landing) -> None:
        """It has landed on all hosted workers."""
        self._flight = None
        sums = landing.header.sums
        if self._pools(landing) and not sums.consensus:
            self._hangar.buffers.adopt(flight.pooled or self._hangar.buffers.pooled(landing.header.exact))
            for w in self._workers:
                w.pooled = w.snapped_at
        if not sums.workers or sums.consensus:  # nobody had anything new, or it was a consensus that we answered
            return
        record = flight.record(round=self.round + 1, lr=self._lr(), modelled=self._clock.completed())
        self._ledger.enter(record, flight.drift, flight.drifts, (sum(flight.counts), sum(flight.bad)))

    def _pools(self, landing: Landing) -> bool:
        """Do buffers ride with it? Not in flight, where a delta could make a variance negative; the last one pools."""
        return landing.shared and (not self._overlap or landing.header.sums.done == self._comm.num_workers)

    def _end(self) -> None:
        """Land what is in flight; then average, marked done, until all workers are."""
        for w in self._workers:
            w.done = True
        if self._flight is not None:
            self._land(())
        if any(w.closed for w in self._workers):  # a fleet's workers that waited for others of it
            self._launch()
            if self._flight is not None:
                self._land(())
        for w in self._workers:
            w.lands_at = None
        while True:
            last = self._tower.arrive(self._launch())
            if last.header.sums.done == self._comm.num_workers:
                break
        self._tower.end()

    # Smaller parts

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """An error on the way abandons the run: what was half done must not be built on."""
        try:
            yield
        except BaseException as error:
            others = any(run is not self and run._phase == "running" for run in _runs)
            self._abandon()
            if others and isinstance(error, AverageTimeout):
                raise AverageTimeout(
                    f"{error}; another LocalSGD runs in this process: runs that are trained in one loop end together, "
                    "by `with prsgd.together(a, b):` or prsgd.finish(a, b)"
                ) from None
            raise

    def _guarded_advance(self) -> None:
        with self._guarded():
            self._advance()

    def _setup(self) -> dict[str, Any]:
        """What a state belongs to."""
        return {
            "workers": list(self._comm.workers),
            "num_parameters": self._hangar.rows.width,
            "overlap": self._overlap,
            "optimizer_state": self._hangar.optimizer_state,
            "schedule": described(self._schedule),
            "averaging": described(self._averaging),
        }

    def _count_pass(self, _: Tensor) -> None:
        self._tower.passes = tuple(passes + 1 for passes in self._tower.passes)

    def _count_passes(self) -> None:
        """From 0, for averagings whose workers must have the same number of averages: a skipped step shows here."""
        self._tower.passes = (0,) * len(self._workers)

    def _parameters(self) -> list[int]:
        return [id(p) for o in self._optimizers for g in o.param_groups for p in g["params"] if p.requires_grad]

    def _takes_part(self, i: int) -> bool:
        """Is the hosted worker i part of this optimizer.step()? In a fleet: does it run, and has it a gradient?"""
        w = self._workers[i]
        if w.done or w.waits:
            return False
        return self._fleet is None or any(p.grad is not None for p in self._hangar.rows.workers[i].values())

    def _drop_gradient(self, i: int) -> None:
        """Let the optimizer pass over worker i: a zero gradient would still move momentum and weight decay."""
        for p in self._hangar.rows.workers[i].values():
            p.grad = None

    def _lr(self) -> float:
        return float(self._optimizers[0].param_groups[0]["lr"])

    def _check_rows(self) -> None:
        if self._fleet is not None:
            self._fleet.check_rows()
        if self._parameters() != self._known:
            raise UsageError("the optimizer's parameters changed during the run: start a new LocalSGD with them")
        self._hangar.rows.refresh()

    def _require_running(self, call: str) -> None:
        if self._phase != "running":
            raise UsageError(f"{call}() {_WHEN[self._phase]}")

    def _require_free(self) -> None:
        for optimizer in self._optimizers:
            if optimizer in _in_use:
                raise UsageError(f"{type(optimizer).__name__} is hooked by another LocalSGD: finish that one first")

    def _unhook(self, phase: str) -> None:
        self._phase = phase
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for optimizer in self._optimizers:
            _in_use.discard(optimizer)
        if self._fleet is not None:
            self._fleet.on_stop, self._fleet.idle, self._fleet.stopped = None, set(), set()

    def _abandon(self) -> None:
        """After an error: hooks off, no collective, the connections closed so that the peers fail at once."""
        self._unhook("failed")
        self._flight = None
        self._comm.close()


_WHEN = {
    "new": "needs start() first",
    "over": "after the run ended",
    "failed": "after the run failed",
    "in consensus": "inside consensus()",
}


def _skipped(optimizer: Optimizer) -> bool:
    """Does GradScaler skip this step? It calls a fused optimizer's step() all the same, with ``found_inf`` set."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
