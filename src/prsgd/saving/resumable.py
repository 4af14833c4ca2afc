"""``resumable``: a user's own loop that can be killed and started again, with as many workers or with others."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from prsgd import files
from prsgd._check import whole_number
from prsgd._warn import warn
from prsgd.core.local_sgd import LocalSGD, require_run
from prsgd.core.resuming import check_optimizers, damage_named, kinds
from prsgd.errors import CheckpointError
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.optimizers import unwrapped
from prsgd.saving.finding import Found, find, forget_strangers, states_of
from prsgd.saving.inheriting import mean_of
from prsgd.saving.journal import Journal
from prsgd.saving.parts import check_names, check_parts, load_parts, state_of
from prsgd.saving.random_numbers import random_state, restore_random_state
from prsgd.saving.states import Packed


class resumable:  # noqa: N801 - a word in the user's sentence
    """Run ``local`` so that it goes on where it was when its processes are started again, as by ``torchrun
    --max-restarts=3``: in ``folder`` every worker saves its state at every ``every``-th average, in the background.

    The parts are what is to be saved beside ``local``: the model and its optimizers, and whatever else has a
    ``state_dict()``, or is a dict of plain values; a dict is updated in place when a state is found.

        with prsgd.resumable("states", local, model=model, optimizer=optimizer, scheduler=scheduler) as run:
            for x, y in itertools.islice(batches, run.step, None):
                ...
                optimizer.step()
                scheduler.step()
                run.tick()

    With the same number of workers the run goes on to the last bit (with torch's, numpy's and Python's random numbers),
    if the folder, which may be each machine's own, holds every worker's state. Worker 0 also keeps every record there,
    in records.jsonl. With another number all begin at the mean of the models that are found, with the mean of their
    optimizers' states (or fresh ones, with ``optimizer_state="reset"``), the averaging's memory and the round; a
    warning says so.

    >>> import tempfile, torch, prsgd
    >>> def train(folder, steps):
    ...     model = torch.nn.Linear(2, 1)
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2))
    ...     with prsgd.resumable(folder, local, every=3, model=model, optimizer=optimizer) as run:
    ...         for _ in range(run.step, steps):
    ...             optimizer.zero_grad()
    ...             model(torch.ones(1, 2)).sum().backward()
    ...             optimizer.step()
    ...             run.tick()
    ...     return run.step
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(folder, 10), train(folder, 10)
    (0, 6)
    """

    def __init__(self, folder: str | Path, local: LocalSGD, *, every: int = 50, **parts: Any) -> None:
        require_run(local)
        if not os.fspath(folder):
            raise ValueError("folder must be a path, got ''")  # it would be the folder that we are in
        self._folder, self._local, self._parts = Path(folder), local, parts
        self._every = whole_number("every", every, at_least=1)
        if local.comm.is_elastic:
            raise ValueError(
                "resumable is for workers that start together; where they come and go a worker is told the state by "
                "the others: save local.state_dict() yourself for the case that all of them end"
            )
        if local.host.team.size > 1 or local.host.team.has_shards:
            raise ValueError(
                "resumable is for workers that are one process with a whole model each, and not for models that are "
                "sharded or workers of several processes: use prsgd.save and prsgd.load"
            )
        _check_parts(local, parts)
        self.step = 0
        """Steps that this worker had taken when it was started again; samples of all that ``log`` was told of."""
        self.samples = 0
        self.round: int | None = None
        """The average after which it goes on; None: it begins."""
        self._writer: threading.Thread | None = None
        self._not_written: Exception | None = None
        self._journal: Journal | None = None
        self._launched, self._run = 0, ""
        self._states = states_of(self._folder, local.comm.workers.start)

    def __enter__(self) -> resumable:
        try:
            self._enter()
        except BaseException:
            self._local.abandon()
            self._local.comm.close()  # also before start(): the others fail at once, wherever they wait for this one
            raise
        return self

    def _enter(self) -> None:
        local, device = self._local, next(iter(self._local.model.parameters())).device
        found, self._run = find(self._folder, local.comm, device)
        if found is not None:
            self._go_on(found, device)
            self.round = found.round
            own = torch.tensor([local.samples], dtype=torch.int64, device=device)
            self.samples = int(local.comm.all_reduce(own).wait())  # before start(): it may launch some workers' average
        local.start()
        self.step, self._launched = local.step, local.launched
        if found is not None:
            found.forget_newer(self._folder)  # after start(), where all workers have met
        if local.comm.workers.start == 0:
            self._journal = Journal(self._folder / files.RECORDS, after=_recorded(local))
            local.add_listener(self._journal.write)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self._local.__exit__(kind, *rest)
        finally:
            if self._journal is not None:
                self._journal.close()
            self._await_writer()

    def tick(self) -> None:
        """To be called once between two steps: save, if it is time; after the epoch, if a worker is through with it."""
        launched = self._local.launched
        if launched // self._every > self._launched // self._every:
            if self._local.is_ending:
                return
            self._save(launched)
        self._launched = launched

    def _save(self, number: int) -> None:
        with self._local.paused():
            self._await_writer()
            packed = self._packed()
        self._writer = threading.Thread(target=self._write, args=(number, packed))
        self._writer.start()

    def _packed(self) -> Packed:
        """The state as it is now."""
        state = {
            "local": self._local.state_dict(),
            "parts": {name: state_of(part) for name, part in self._parts.items()},
            "random": random_state(),
        }
        return Packed.of(state)

    def _write(self, number: int, packed: Packed) -> None:
        comm = self._local.comm
        try:
            said = {"run": self._run, "num_workers": comm.num_workers, "hosted": len(comm.workers)}
            self._states.write(number, packed, **said)
            if comm.workers.start == 0:
                forget_strangers(self._folder, before=self._states.oldest or 0, num_workers=comm.num_workers)
        except Exception as error:
            self._not_written = error

    def _await_writer(self) -> None:
        """Until the last state is written, which mostly it is. A run does not end because a disk is full."""
        if self._writer is None:
            return
        self._writer.join()
        self._writer, error = None, self._not_written
        if error is not None:
            self._not_written = None
            if not isinstance(error, OSError):
                raise error
            warn(
                f"worker {self._local.comm.workers.start}: a state was not saved in {self._folder} ({error.strerror}); "
                "training goes on, and the one before it is kept",
                RuntimeWarning,
            )

    def _go_on(self, found: Found, device: torch.device) -> None:
        if found.exact:
            state = self._states.load(found.round)
            self._check_optimizers(state)
            self._load(state["parts"])
            self._local.load_state_dict(state["local"])
            restore_random_state(state["random"])
            return
        if isinstance(self._local.model, Fleet):
            raise CheckpointError(
                f"the states in {self._folder} are of {found.num_workers} workers in other processes: a Fleet goes on "
                "with as many workers in as many processes as it had"
            )
        if any(kept.stop - kept.start > 1 for kept in found.bearers):
            raise CheckpointError(
                f"the states in {self._folder} are of Fleets, and this model is none: go on with a Fleet of as many "
                "workers in as many processes, or load the model alone and begin anew"
            )
        state = mean_of(found, self._folder, self._local.comm, device)
        self._check_optimizers(state)
        self._load(state["parts"], fresh_optimizers=state["local"]["setup"]["optimizer_state"] == "reset")
        self._local.inherit(state["local"])
        if self._local.comm.workers.start == 0:
            warn(found.lost(self._local.comm.num_workers), RuntimeWarning)

    def _check_optimizers(self, state: Mapping[str, Any]) -> None:
        """Before anything has changed."""
        with damage_named():
            check_optimizers(state["local"]["setup"], kinds(self._local.optimizers))

    def _load(self, states: Mapping[str, Any], *, fresh_optimizers: bool = False) -> None:
        check_names(states, self._parts, self._folder)
        load_parts(states, self._parts, self._folder, fresh_optimizers=fresh_optimizers)


def _recorded(local: LocalSGD) -> int:
    """The round of the newest record."""
    return local.records[-1].round if local.records else 0


def _check_parts(local: LocalSGD, parts: Mapping[str, Any]) -> None:
    check_parts(parts)
    given = {id(unwrapped(part)) for part in parts.values()}
    if not {id(part) for part in (local.model, *local.optimizers)} <= given:
        raise ValueError("resumable must be given the model and all optimizers that local trains: model=, optimizer=")
