"""The parts of a run, checked and put together from what the user gave."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from prsgd._check import function_of, one_of, positive, whole_number, whole_number_or_auto
from prsgd.averaging.base import Averaging, Setting
from prsgd.averaging.mean import mean
from prsgd.averaging.wires.base import Wire
from prsgd.clocks.base import Timekeeper
from prsgd.clocks.wall import WallClock
from prsgd.comm.base import Communicator
from prsgd.comm.joining import current
from prsgd.core.books import Books, Ledger
from prsgd.core.fragments import Names, check_fragments, dealing, dealt, tied_names
from prsgd.core.hooks import Hooks, SkippedSteps
from prsgd.core.lane import Lane, Run
from prsgd.core.lanes import Lanes
from prsgd.core.noise import GradientNoise
from prsgd.core.patience import LONGEST
from prsgd.core.resuming import described, kinds
from prsgd.core.roll import Roll
from prsgd.core.start import host_of
from prsgd.records import Record
from prsgd.replicas.buffers import Buffers
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.host import Host
from prsgd.replicas.names import bare
from prsgd.replicas.optimizer_state import OptimizerState
from prsgd.replicas.optimizers import unwrapped
from prsgd.schedules.base import ByClock, Schedule


@dataclass(frozen=True)
class Parts:
    """What ``LocalSGD`` is made of."""

    averaging: Averaging
    comm: Communicator
    own_comm: bool
    """Was the communicator made for this run, so that it ends with it?"""
    clock: Timekeeper
    host: Host
    roll: Roll
    hooks: Hooks
    lanes: Lanes
    ledger: Ledger
    """The records that users see."""
    fragments: Sequence[Names]
    setup: dict[str, Any]
    """What a state belongs to."""

    @property
    def words(self) -> list[str]:
        """What must be alike on all workers beside the models."""
        kept, overlap = self.setup["optimizer_state"], self.setup["overlap"]
        words = [f"optimizer_state {kept!r}, overlap {overlap}", f"averaging {self.setup['averaging']}"]
        words += [f"fragment {k} of {', '.join(names)}" for k, names in enumerate(self.fragments)]
        return [*words, f"schedule {self.setup['schedule']}"] if self.hooks.noise is not None else words


def assemble(
    model: nn.Module | Fleet,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    schedule: Schedule,
    averaging: Averaging | Wire | None,
    overlap: int | Literal["auto"],
    optimizer_state: str | Mapping[str, int],
    fragments: int | Sequence[str | Sequence[str]],
    comm: Communicator | None,
    clock: Callable[[int], float] | None,
    timeout_seconds: float | None,
    done_timeout_seconds: float,
    on_record: Callable[[Record], None] | None,
    failed: Callable[[BaseException], None],
) -> Parts:
    """As ``LocalSGD`` takes them; a ValueError names what cannot be. ``failed`` is told of an error in a hook."""
    overlap = whole_number_or_auto("overlap", overlap, at_least=0)
    if isinstance(schedule, type) or not isinstance(schedule, Schedule):
        raise ValueError(f"schedule must be a schedule such as every(8), got {schedule!r}")
    if isinstance(averaging, Wire):
        averaging = mean(wire=averaging)
    if isinstance(averaging, type) or not isinstance(averaging, Averaging | None):
        raise ValueError(
            f"averaging must be one such as mean(), or of a class derived from prsgd.Averaging, got {averaging!r}"
        )
    mode, every = _kept(optimizer_state)
    if mode == "average" and overlap not in (0, 1):
        words = '"average"' if every is None else repr(every)
        raise ValueError(f"overlap must be 0 or 1 with optimizer_state={words}, got {overlap!r}")
    averaging = averaging or mean()
    limit = None if timeout_seconds is None else positive("timeout_seconds", timeout_seconds)
    positive("done_timeout_seconds", done_timeout_seconds)
    if on_record is not None:
        function_of("on_record", on_record, "a Record")
    own_comm = comm is None and not isinstance(model, Fleet)
    given = comm or (model.comm if isinstance(model, Fleet) else None)
    used = given or current(timeout_seconds=limit or LONGEST)
    workers, num_workers = used.workers, used.num_workers
    host = host_of(model, used)
    team = host.team
    shared = team.latest if isinstance(schedule, ByClock) and team.size > 1 else None
    timekeeper = clock if isinstance(clock, Timekeeper) else WallClock(workers, clock, shared)
    timekeeper.check(num_workers, workers)
    setting = Setting.of(schedule, num_workers, overlap, mode, elastic=used.is_elastic)
    if every is not None:
        _check_every(schedule, setting)
    setting = replace(setting, team=team.size, has_shards=team.has_shards)
    schedule.check(num_workers, setting.overlap)
    setting.require(averaging)
    parts = dealt(host.rows.workers[0], fragments, tied_names(bare(host.modules[0])))
    check_fragments(len(parts), schedule, averaging, setting)
    if limit is not None:
        team.comm.timeout_seconds = limit
    if limit is not None and (comm is None or used.is_elastic):
        used.timeout_seconds = limit
    optimizers = [unwrapped(o) for o in (optimizer if isinstance(optimizer, Sequence) else [optimizer])]
    roll = Roll(workers)
    # A fleet's workers step together; a lone one that skips a step has fewer averages than its neighbours.
    skipped = SkippedSteps() if averaging.hears_neighbours_only and not host.lies_in_rows else None
    ledger = Ledger(on_record, timekeeper.paused)
    hooks = Hooks(
        optimizers, host, roll, timekeeper,
        overlap=setting.overlap, failed=failed, publish=ledger.publish, skipped=skipped,
    )  # fmt: skip
    hooks.noise = GradientNoise(optimizers, host.rows) if setting.learns else None
    run = Run(
        comm=used,
        averaging=averaging,
        setting=setting,
        roll=roll,
        clock=timekeeper,
        lr=hooks.lr,
        set_lr=hooks.set_lr,
        check=hooks.check,
        skipped=None if skipped is None else skipped.taken,
        noise=hooks.noise,
        team=team,
        timeout_seconds=limit,
        done_timeout_seconds=done_timeout_seconds,
    )
    # The processes of a worker have each their own batches, and so their own statistics: all of them are pooled.
    here = range(workers.start * team.size + team.place, workers.stop * team.size)[:: team.size]
    speaks = workers.start == 0 and team.place == 0
    setup = {
        "workers": list(workers),
        "num_parameters": host.rows.width,
        "dtype": str(host.rows.dtype).removeprefix("torch."),
        "overlap": overlap,
        "optimizer_state": mode if every is None else dict(sorted(every.items())),
        "optimizers": kinds(optimizers),
        "fragments": dealing(parts),
        "schedule": described(schedule),
        "averaging": described(averaging),
    }
    lanes = []
    for k, names in enumerate(parts):
        rows = host.rows if len(parts) == 1 else host.rows.part(names)
        state = OptimizerState(optimizers, rows.workers, mode=mode, every=every)
        riding = host.modules if k == 0 else [nn.Module() for _ in workers]  # buffers travel once a round
        buffers = Buffers(riding, workers if team.size == 1 else here, num_workers * team.size)
        books = Books(len(workers), ledger, speaks=speaks, fragment=None if len(parts) == 1 else k)
        lanes.append(Lane(run, schedule, rows, state, buffers, books))
    return Parts(averaging, used, own_comm, timekeeper, host, roll, hooks, Lanes(lanes), ledger, parts, setup)


def _kept(optimizer_state: str | Mapping[str, int]) -> tuple[str, dict[str, int] | None]:
    """In a word what becomes of it at an average, and in every how many what travels, unless all does in each."""
    if not isinstance(optimizer_state, Mapping):
        return one_of("optimizer_state", optimizer_state, ("keep", "average", "reset")), None
    if not optimizer_state:
        raise ValueError('optimizer_state={} averages nothing: use optimizer_state="keep"')
    every = {name: whole_number(f"optimizer_state[{name!r}]", n, at_least=1) for name, n in optimizer_state.items()}
    return "average", every


def _check_every(schedule: Schedule, setting: Setting) -> None:
    """Raise a ValueError that says why state with periods of its own does not go with the other parts."""
    if setting.elastic:
        raise ValueError(
            "where workers come and go optimizer state cannot have periods of its own, since what is averaged would be "
            'another size each time: use optimizer_state="keep", "average" or "reset"'
        )
    if setting.learns:
        raise ValueError(
            f"{schedule!r} goes by momentum that is each worker's own or everybody's, and with periods of its own it "
            'is now one, now the other: use optimizer_state="keep" or "average", or a schedule such as every(8)'
        )
