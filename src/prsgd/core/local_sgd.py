"""``LocalSGD``: what users call. The algorithm itself is ``loop.py``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import prsgd
from prsgd._check import function_of
from prsgd.averaging.base import Averaging
from prsgd.averaging.wires.base import Wire
from prsgd.clocks.trace import Trace
from prsgd.clocks.wall import WallClock
from prsgd.comm.base import Communicator
from prsgd.core.assemble import assemble
from prsgd.core.look import look
from prsgd.core.newcomers import Newcomers
from prsgd.core.overview import Overview, overview
from prsgd.core.resuming import check_setup, damage_named
from prsgd.core.start import alike, enter
from prsgd.errors import AverageTimeout, UsageError
from prsgd.records import Record, Totals
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.host import Host
from prsgd.schedules.base import Schedule

_runs: weakref.WeakSet[LocalSGD] = weakref.WeakSet()  # those that were started


class LocalSGD:
    """Train locally and average now and then, with the user's loop as it was.

    ``model`` is a module (this process is one worker) or a ``Fleet`` (it hosts several); ``optimizer`` one ordinary
    torch optimizer over its parameters, or a list in the order in which they step: the last one's step counts.

    - ``schedule``: when to average: ``every``, ``growing``, ``per_worker``, ``measured``, ``timed``, ``once``,
      ``post_local``, ``quadratic``, or ``auto``, which chooses its period itself.
    - ``averaging``: how: ``mean()`` unless given, or ``gossip``, ``quantized``, ``sparse``, ``easgd``, ``outer``.
    - ``overlap``: steps that hide the transfer; 0 averages right after a step, blocking; "auto" is as many as hide it.
    - ``optimizer_state`` at an average: "keep" each worker's own, "average" it too (overlap <= 1), or "reset" it. Or in
      every how many averages what is averaged, and the rest kept: ``{"exp_avg": 3, "exp_avg_sq": 6}`` (DES-LOC).
    - ``fragments``: of the model, each averaged once a round, one after the other, so that less travels at once: how
      many, or a pattern of parameters' names for each.
    - ``comm``: where the workers live; the running torch.distributed group unless given, or this process alone.
    - ``clock``: worker -> seconds, for rounds that end by the clock; or a ``prsgd.cluster.ClusterClock``.
    - ``timeout_seconds``: how long to wait for an average; 20 times the longest round so far unless given, within 120
      and 600. ``done_timeout_seconds``: how long a worker that has run out of data waits for the others' next one.
    - ``on_record``: called with each complete ``Record``, between two steps; it may evaluate and save as you may there.

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
        averaging: Averaging | Wire | None = None,
        overlap: int | Literal["auto"] = 0,
        optimizer_state: str | Mapping[str, int] = "keep",
        fragments: int | Sequence[str | Sequence[str]] = 1,
        comm: Communicator | None = None,
        clock: Callable[[int], float] | None = None,
        timeout_seconds: float | None = None,
        done_timeout_seconds: float = 3600.0,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        parts = assemble(
            model, optimizer, schedule=schedule, averaging=averaging, overlap=overlap, optimizer_state=optimizer_state,
            fragments=fragments, comm=comm, clock=clock, timeout_seconds=timeout_seconds,
            done_timeout_seconds=done_timeout_seconds, on_record=on_record, failed=self._failed,
        )  # fmt: skip
        self.model, self.optimizers = model, tuple(parts.hooks.optimizers)
        self._parts, self._comm, self._clock, self._host = parts, parts.comm, parts.clock, parts.host
        self._roll, self._hooks, self._lanes, self._ledger = parts.roll, parts.hooks, parts.lanes, parts.ledger
        self._phase, self._loaded, self._inherited = "new", False, False

    @property
    def step(self) -> int:
        """Steps taken: this process's worker's, or the most of its hosted workers'."""
        return max(pace.steps for pace in self._lanes.first.paces)

    @property
    def steps(self) -> tuple[int, ...]:
        """Steps taken by each hosted worker."""
        return tuple(pace.steps for pace in self._lanes.first.paces)

    @property
    def round(self) -> int:
        """Averages that have landed here."""
        return self._ledger.round

    @property
    def launched(self) -> int:
        """Averages launched here. Where it first reaches a number, all workers are between the same two averages,
        which is where their states fit together: save by it, and not by ``step``, unless all take the same steps."""
        return self.round + self._lanes.under_way

    @property
    def is_ending(self) -> bool:
        """Have some workers run out of data, and answer the averages of the others from inside ``epoch()`` or
        ``finish()``, where they save no state? What others save then fits to nothing. (Waits for an average that is
        under way; with neighbours only it is not known.)"""
        return self._lanes.is_ending

    @property
    def records(self) -> list[Record]:
        """One for each of the newest 10,000 averages; that of the newest comes with the next one, or with ``finish``.
        ``on_record`` gets every one, and ``totals`` counts all of them."""
        return list(self._ledger.records)

    def add_listener(self, on_record: Callable[[Record], None]) -> None:
        """Call it with each complete record too."""
        function_of("on_record", on_record, "a Record")
        self._ledger.listeners.append(on_record)

    @property
    def samples(self) -> int:
        """How many samples ``log`` was told of in this process so far, those before the state that it went on from
        among them. (``totals.samples`` are those of all processes, up to the newest complete record.)"""
        return self._lanes.first.books.samples

    @property
    def totals(self) -> Totals:
        """Rounds, bytes, samples and seconds of all averages whose records are complete."""
        return self._ledger.totals

    @property
    def comm(self) -> Communicator:
        """Where the workers live."""
        return self._comm

    @property
    def host(self) -> Host:
        """What this process hosts."""
        return self._host

    @property
    def trace(self) -> Trace:
        """What the hosted workers did when: the newest steps and averages."""
        return self._clock.trace

    def summary(self) -> Overview:
        """Where the run stands and what to change, as this process sees it: rounds, bytes, how much of the time is
        waited, drift, and an advice. It is no collective and waits for nothing; ``print`` shows it.

        >>> import torch, prsgd
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(8)).summary().advice
        'no average is complete yet'
        """
        records, totals, seconds = self._ledger.records, self._ledger.totals, self._clock.trace.seconds
        waited = seconds["blocked"] + seconds["wait"]
        on_the_wall = isinstance(self._clock, WallClock)  # where all hosted workers share a row of the trace
        rows = 1 if on_the_wall else len(self._comm.workers)
        return overview(
            records,
            totals,
            steps=self.step,
            workers=self._comm.num_workers,
            seconds=(seconds["step"] + waited) / rows,
            wait_seconds=waited / rows,
            travels=not on_the_wall or len(self._comm.workers) < self._comm.num_workers,
            chosen=self._parts.setup["overlap"] == "auto",
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is not training, such as writing a checkpoint: rounds that end by the clock do not count it."""
        with self._clock.paused():
            yield

    def start(self) -> LocalSGD:
        """Check that the workers fit together, start all from worker 0's model (unless a state was loaded), hook in."""
        if self._phase != "new":
            raise UsageError("this LocalSGD was started before: make a new one")
        self._hooks.require_free()
        self._hooks.check()
        self._phase = "running"
        _runs.add(self)
        with torch.inference_mode(False), self._guarded():  # what is made here outlives it
            self._enter()
        return self

    def finish(self) -> None:
        """End the run: answer the others' averages until all are done, and leave with the model that all have."""
        self._require_running("finish")
        with self._guarded():
            self._end()
            self._ledger.publish()
        self._phase = "over"
        self._hooks.unhook()
        if self._parts.own_comm:
            self._comm.close()

    def abandon(self) -> None:
        """After an error, instead of ``finish``: hooks off, no collective, and the other workers fail at once."""
        if self._phase in ("running", "in consensus"):
            self._phase = "failed"
            self._hooks.unhook()
            self._lanes.drop()
            self._comm.close()
            with suppress(Exception):  # of a listener, which would hide why the run ends
                self._ledger.publish()

    def __enter__(self) -> LocalSGD:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()
        elif self._phase != "over":  # the user may have finished; a failed run does not end in silence
            self.finish()

    @contextmanager
    def epoch(self) -> Iterator[None]:
        """Around a worker's batches of one epoch, of which each may have another number.

        A worker that is through answers the others' averages until all are; then all have the same model, by one more
        average, as at the end of a run, and go on. What follows (``consensus()``, a checkpoint, an lr scheduler's step)
        finds all workers at the same point (if periods differ and the overlap is as long as the shortest, then where
        ``launched`` is the same: an average may be under way). In a fleet, ``fleet.stop(worker)`` is for this epoch.
        """
        self._require_running("epoch")
        yield
        self._require_running("epoch")
        with self._guarded():
            self._end()
            self._host.reopen()
            self._roll.reopen()
            self._lanes.reopen()
            self._hooks.advance()

    def log(self, *, loss: float | Tensor | None = None, samples: int | Sequence[int] = 0) -> None:
        """Add a step's loss and number of samples to the round's record.

        For a fleet both may have one entry per hosted worker. Call it once a step, always before ``optimizer.step()``
        or always after it. (After it, and with an overlap of the whole period, a round's last step is counted in the
        next round's record: its own numbers have left by then.)
        """
        self._require_running("log")
        self._lanes.log(loss, samples, self._roll)

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """The average of all workers' models, to evaluate; afterwards each worker has its own model again.

        A collective: all workers call it between the same two averages, at the same step in the usual case, and where
        ``launched`` reaches the same number in every case. What is yielded is the user's own module (of a fleet the
        first hosted one) with other numbers in it.
        """
        self._require_running("consensus")
        self._hooks.check()
        with self._clock.paused():
            with self._guarded():
                gathered = lambda: self._clock.gathered(self.round + 1)  # noqa: E731
                shown = look(self._lanes, self._host, gathered, self._come_in)
            self._phase = "in consensus"
            self._hooks.refusal = "optimizer.step() inside consensus(): the step would be lost when it ends"
            try:
                yield shown.model
            finally:
                if self._phase == "in consensus":  # and not abandoned inside
                    self._phase = "running"
                self._hooks.refusal = None
                shown.give_back()
        if self._phase == "running":
            with self._guarded():
                self._ledger.publish()

    def state_dict(self) -> dict[str, Any]:
        """Where the run is: plain numbers and tensors, beside which the model and the optimizer are to be saved.

        Waits for an average in flight and stores it without landing it. Every process saves its own, all between the
        same two averages: at the same step where all take the same steps, and otherwise (skipped steps, rounds by the
        clock, periods that differ) where ``launched`` reaches the same number.
        """
        if self._phase in ("new", "in consensus"):
            raise UsageError(f"state_dict() {_WHEN[self._phase]}")
        return {
            "setup": self._parts.setup,
            "lanes": self._lanes.state_dict(),
            "rounds": self._lanes.rounds(),
            "waits": list(self._roll.waits),
            "ailing": [sorted(fragments) for fragments in self._roll.ailing],
            "clock": self._clock.state_dict(),
            "noise": self._hooks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``, between the constructor and ``start()``; load the model and the optimizer too.
        Another overlap, optimizer_state, averaging, model or kind of optimizer than the state's is a
        ``CheckpointError``; another schedule, or other numbers of the same averaging, go on with a warning.
        """
        if self._phase != "new":
            raise UsageError("load_state_dict() comes before start()")
        with damage_named():
            check_setup(state["setup"], self._parts.setup)
            self._lanes.check_state(state["lanes"])
            self._hooks.check_state(state["noise"])
            self._clock.load_state_dict(state["clock"])  # which the workers' rounds are measured by
            self._lanes.load_state_dict(state["lanes"])
            self._lanes.load_rounds(state["rounds"])
            self._hooks.load_state_dict(state["noise"])
            self._roll.waits = [bool(state["waits"][i]) for i in range(len(self._roll.ids))]
            self._roll.ailing = [set(map(int, state["ailing"][i])) for i in range(len(self._roll.ids))]
        self._loaded = True

    def inherit(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, one worker's of a run with another number of workers, between the constructor and
        ``start()``: after its rounds, with what its averaging and its schedule have learned. All workers begin at the
        model that worker 0 has then, which is best the mean of those workers' models (``prsgd.resumable`` sees to it).
        """
        if self._phase != "new":
            raise UsageError("inherit() comes before start()")
        with damage_named():
            check_setup(state["setup"], self._parts.setup, other_workers=True)
            self._lanes.inherit(state["lanes"])
        self._inherited = True

    def _enter(self) -> None:
        """Alg. 1 line 1: x_i^0 = y-bar."""
        words = [*self._parts.words, f"{self._comm.num_workers} workers"]
        # The version first: with another one all other lines may differ, too, and mean nothing.
        entries = [f"prsgd {prsgd.__version__}", *alike(self._host, self._lanes, words)]
        self._newcomers = Newcomers(entries, self._host, self._lanes, self._hooks)
        told = self._comm.join(self._host.rows.device, self.launched)
        if told is None:
            known = "a state" if self._loaded else "other workers' state" if self._inherited else ""
            state = f"{known} loaded after {self.launched} averages" if known else "no state loaded"
            enter(self._comm, self._host, self._lanes, [*entries, state], fresh=not self._loaded)
        self._hooks.hook(self._lanes)
        self._clock.begin()
        if told is None:
            self._hooks.advance()
        else:
            self._come_in(told)

    def _come_in(self, told: Mapping[str, Any]) -> None:
        """Begin where the others are: land the average in which they are, and open the next round."""
        self._newcomers.join(told)
        self._roll.dismiss()
        self._lanes.join()
        self._roll.reopen()
        self._lanes.reopen()
        self._hooks.advance()

    def _end(self) -> None:
        """Land what is in flight; then average, marked done, until all workers are."""
        self._roll.dismiss()
        self._lanes.end()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failed(error)
            raise

    def _failed(self, error: BaseException) -> None:
        """An error on the way abandons the run: what was half done must not be built on."""
        others = any(run is not self and run._phase == "running" for run in _runs)
        self.abandon()
        if others and isinstance(error, AverageTimeout):
            raise AverageTimeout(
                f"{error}; another LocalSGD runs in this process: runs that are trained in one loop end together, "
                "by `with prsgd.together(a, b):` or prsgd.finish(a, b), and their epochs by prsgd.epoch(a, b)"
            ) from None

    def _require_running(self, call: str) -> None:
        if self._phase != "running":
            raise UsageError(f"{call}() {_WHEN[self._phase]}")


def require_run(value: object) -> None:
    """Raise a ValueError unless it is a ``LocalSGD``, which the one for accelerate only holds.

    >>> require_run(8)
    Traceback (most recent call last):
    ValueError: local must be a prsgd.LocalSGD, got int
    """
    if not isinstance(value, LocalSGD):
        kind = type(value)
        same = kind.__name__ == LocalSGD.__name__
        what = f"{kind.__module__}.{kind.__name__}, whose .local is one" if same else kind.__name__
        raise ValueError(f"local must be a prsgd.LocalSGD, got {what}")


_WHEN = {
    "new": "needs start() first",
    "over": "after the run ended",
    "failed": "after the run failed",
    "in consensus": "inside consensus()",
}
