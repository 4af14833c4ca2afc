"""``overlap="auto"``: the rule by properties and by hand, and with every other part, in one process and in several."""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import prsgd
from prsgd.cli import main
from prsgd.clocks import wall
from prsgd.clocks.base import Sent
from prsgd.clocks.wall import WallClock
from prsgd.cluster.clock import ClusterClock
from prsgd.cluster.model import Cluster
from prsgd.comm.base import Work
from prsgd.core.hiding import CALM, Hiding
from prsgd.errors import MismatchError, UsageError
from prsgd.lab.config import Config
from prsgd.schedules.base import Round
from tests.problems import CHANGING, Told, train_fleet, train_model, walk
from tests.ranks import run_ranks, try_ranks
from tests.test_averagings import ALL
from tests.test_resume import run as stopped_run
from tests.test_resume import same

SCHEDULES: dict[str, prsgd.Schedule] = {
    "every": prsgd.every(4),
    "every step": prsgd.every(1),
    "per worker": prsgd.per_worker([5, 2]),
    "measured": prsgd.measured(3),
    "once": prsgd.once(),
    **CHANGING,
}


def itself_squared(out: Tensor, _: Tensor) -> Tensor:
    return out.square().sum()


def halved_square(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum() / 2


def cluster(transfer: float, *, step: float = 1.0, speeds: Sequence[float] = (1.0, 1.0), **more: Any) -> Cluster:
    """Two workers whose averages take so many seconds, whatever their size."""
    return Cluster("two", tuple(speeds), step, bytes_per_second=1e18, latency_seconds=transfer / 2, **more)


def overlaps(local: prsgd.LocalSGD) -> list[int]:
    """Of all averages that had a step."""
    return [record.overlap for record in local.records if record.period > 0]


# The rule


def chosen(transfers: Sequence[float]) -> list[int]:
    """The overlap after each of these transfers, in steps."""
    hiding, found = Hiding(), []
    for transfer in transfers:
        hiding.hear([transfer], [1.0])
        found.append(hiding.overlap)
    return found


TRANSFERS = st.floats(0.001, 50.0)


@given(transfer=TRANSFERS, step=st.floats(1e-4, 10.0), count=st.integers(1, 12))
def test_a_steady_link_is_hidden_by_the_smallest_overlap_from_the_first_number_on(
    transfer: float, step: float, count: int
) -> None:
    hiding = Hiding()
    for _ in range(count):
        hiding.hear([transfer], [step])
        assert hiding.overlap * step >= transfer - 0.02 * step
        assert hiding.overlap == 1 or (hiding.overlap - 1) * step < transfer


@given(transfer=TRANSFERS, noise=st.lists(st.floats(1.0, 1.08), min_size=1, max_size=40))
def test_a_little_noise_never_lowers_it(transfer: float, noise: list[float]) -> None:
    found = chosen([transfer * factor for factor in noise])
    assert found == sorted(found)


@given(transfer=TRANSFERS, slow=st.floats(2.0, 100.0), at=st.integers(1, 12))
def test_one_slow_transfer_changes_nothing(transfer: float, slow: float, at: int) -> None:
    """Unless it is the first, of which nobody can tell."""
    steady = [transfer] * 14
    assert chosen([*steady[:at], slow * transfer, *steady[at:]])[-1] == chosen(steady)[-1]
    assert len(set(chosen([*steady[:at], slow * transfer, *steady[at:]]))) == 1


@given(before=st.lists(TRANSFERS, max_size=8), after=TRANSFERS)
def test_it_follows_a_link_that_changes(before: list[float], after: float) -> None:
    """Up with the second number, down with the fifth and then at most a tenth above what hides it."""
    found = chosen([*before, *[after] * CALM])
    least = chosen([after])[0]
    assert all(overlap >= least for overlap in found[-CALM + 1 :])
    assert found[-1] <= chosen([1.1 * after])[0] or found[-1] == least


def test_up_and_down_by_hand() -> None:
    assert chosen([2.5, 2.5, 7.2, 7.2, 7.2]) == [3, 3, 3, 8, 8]
    assert chosen([7.2, 2.5, 2.5, 2.5, 2.5, 2.5]) == [8, 8, 8, 8, 8, 3]  # the first was slow, and has been forgotten
    assert chosen([7.2, 2.8, 2.8, 2.8, 2.8, 2.8])[-1] == 4  # 3 would do, without a tenth to spare
    assert chosen([3.0, 3.005, 2.99])[-1] == 3  # a hundredth of a step is not worth another one


@given(numbers=st.lists(st.tuples(TRANSFERS, st.floats(0.1, 5.0)), min_size=1, max_size=6), order=st.randoms())
def test_the_worker_that_launched_last_tells(numbers: list[tuple[float, float]], order: Any) -> None:
    flight, step = min(numbers)
    alone, all_of_them = Hiding(), Hiding()
    alone.hear([flight], [step])
    shuffled = [*numbers, (0.0, step), (flight, 0.0)]  # of whom nothing is known
    order.shuffle(shuffled)
    all_of_them.hear(*map(list, zip(*shuffled)))
    assert all_of_them == alone


@given(transfers=st.lists(TRANSFERS, max_size=12), at=st.integers(0, 12), steps=st.one_of(st.none(), st.integers(1, 9)))
def test_what_is_not_known_changes_nothing_and_a_stop_neither(
    transfers: list[float], at: int, steps: int | None
) -> None:
    hiding, other = Hiding(), Hiding()
    for number, transfer in enumerate(transfers):
        hiding.hear([transfer], [1.0])
        other.hear([transfer, 3.0], [1.0, 0.0])
        other.hear([0.0, 0.0], [1.0, 1.0])
        if number == at:
            fresh = Hiding()
            fresh.load_state_dict(json.loads(json.dumps(hiding.state_dict())))
            hiding = fresh
    assert hiding == other
    overlap, round = hiding.of(Round(steps=steps, reason="why not"), before=1)
    assert 1 <= overlap <= (steps or math.inf)
    assert (round.reason == "why not") == (overlap == 1)


# On a modelled cluster, by hand


@pytest.mark.parametrize(
    ("transfer", "overlap", "reason"),
    [
        (0.4, 1, ""),
        (1.0, 1, ""),
        (2.5, 3, "transfer 2.5 s, step 1 s: overlap 1 to 3"),
        (4.0, 4, "transfer 4 s, step 1 s: overlap 1 to 4"),
        (30.0, 4, "transfer 30 s, step 1 s, period 4: overlap 1 to 4"),
    ],
)
def test_every_by_hand(transfer: float, overlap: int, reason: str) -> None:
    """Average 2 brings what average 1 took; the rounds from 3 on are as long overlapped, and land where they did."""
    path, local = walk(
        [0.0, 8.0], schedule=prsgd.every(4), steps=24, overlap="auto", clock=ClusterClock(cluster(transfer))
    )
    landed = [record for record in local.records if record.period == 4]
    assert [record.step for record in landed] == [4, 8, 12, 16, 20, 24]
    assert [record.overlap for record in landed] == [1, 1, *[overlap] * 4]
    assert [record.reason for record in landed] == ["", "", reason, "", "", ""]
    assert landed[0].step_seconds == (1.0, 1.0)
    # From 0 towards 0 and 8 at lr 1/2, step by step; a snapshot after step 4 k - d lands in step 4 k.
    x, snap = [0.0, 0.0], [0.0, 0.0]
    closes = {3, 7, *(4 * round - overlap for round in range(3, 7))}
    for t in range(1, 25):
        gradients = [x[0] - 0.0, x[1] - 8.0]
        if t % 4 == 0:
            x = [x[i] + (sum(snap) / 2 - snap[i]) for i in range(2)]
        x = [x[i] - gradients[i] / 2 for i in range(2)]
        if t in closes:
            snap = x
        assert path[t - 1] == pytest.approx(x, abs=1e-13), t


@settings(max_examples=30)
@given(
    links=st.lists(st.floats(0.1, 9.0), min_size=1, max_size=4),
    speeds=st.tuples(st.sampled_from([1.0, 2.0, 4.0]), st.sampled_from([1.0, 3.0])),
    period=st.integers(1, 7),
)
def test_a_change_of_overlap_loses_nothing(links: list[float], speeds: tuple[float, float], period: int) -> None:
    """The mean of all models takes the same steps whatever the overlaps are: x <- x - lr (x - mean target)."""
    clock = ClusterClock(cluster(links[0], speeds=speeds))
    fleet = prsgd.Fleet(torch.nn.Linear(1, 1, bias=False).double(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.25)
    mean = fleet.rows.mean().item()
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(period), overlap="auto", clock=clock) as local:
        for t in range(40):
            clock.cluster = cluster(links[t * len(links) // 40], speeds=speeds)
            optimizer.zero_grad()
            targets = torch.tensor([[1.0], [-4.0]], dtype=torch.float64)
            fleet.backward(halved_square, torch.ones(2, 1, dtype=torch.float64), targets)
            optimizer.step()
            mean -= 0.25 * (mean + 1.5)
            assert fleet.rows.mean().item() == pytest.approx(mean, abs=1e-12)
    assert all(1 <= record.overlap <= period for record in local.records if record.period == period)


def test_it_follows_the_link_of_a_run() -> None:
    clock = ClusterClock(cluster(1.5))
    fleet = prsgd.Fleet(torch.nn.Linear(1, 1), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(8), overlap="auto", clock=clock) as local:
        for t in range(8 * 20):
            clock.cluster = cluster(1.5 if t < 40 or t >= 100 else 5.5)
            optimizer.zero_grad()
            fleet.backward(itself_squared, torch.tensor([[[1.0]], [[2.0]]]), torch.ones(2, 1))
            optimizer.step()
    assert [record.reason for record in local.records if record.reason] == [
        "transfer 1.5 s, step 1 s: overlap 1 to 2",
        "transfer 5.5 s, step 1 s: overlap 2 to 6",
        "transfer 1.5 s, step 1 s: overlap 6 to 2",
    ]
    # Rounds 6 to 12 land over the slow link. The numbers of 6 and 7 are known when round 9 opens, those of 13 to 17
    # when round 19 does.
    assert [record.overlap for record in local.records] == [1, 1, *[2] * 6, *[6] * 10, 2, 2, 0]


def test_a_straggler_does_not_raise_it() -> None:
    """The fast worker's averages are under way for 13 of its steps, 12 of which it waits for the slow one's launch."""
    _, local = walk(
        [0.0, 1.0],
        schedule=prsgd.every(4),
        steps=32,
        overlap="auto",
        clock=ClusterClock(cluster(0.9, speeds=(4.0, 1.0))),
    )
    assert set(overlaps(local)) == {1}


def test_workers_that_finish_together_are_all_hidden() -> None:
    """Algorithm 3: 16 steps of the fast worker beside 4 of the slow one. Three steps of the slow one hide the transfer,
    and the fast one, which is late by what it waits, asks for ten."""
    clock = ClusterClock(cluster(2.4, speeds=(4.0, 1.0)))
    _, local = walk([0.0, 1.0], schedule=prsgd.per_worker([16, 4]), steps=160, overlap="auto", clock=clock)
    assert local.records[-3].overlap == 10
    assert [(r.overlap, r.reason) for r in local.records if r.reason] == [
        (10, "transfer 2.4 s, step 0.25 s: overlap 1 to 10")  # of the worker whose overlap the record has
    ]
    late = [record.modelled for record in local.records[4:-2]]
    assert all(modelled is not None and sum(modelled.communicating) == 0 for modelled in late)


def test_rounds_by_the_clock() -> None:
    clock = ClusterClock(cluster(2.6, speeds=(2.0, 1.0)))
    _, local = walk([0.0, 1.0], schedule=prsgd.timed(8.0), steps=120, overlap="auto", clock=clock)
    found = overlaps(local)[:-2]
    assert found[:3] == [1, 1, 1]  # a round opens before the average of the one before is there
    assert set(found[3:]) == {6}
    assert local.records[3].reason == "transfer 2.6 s, step 0.5 s: overlap 1 to 6, or to the round's end"


def test_rounds_by_the_clock_that_are_shorter_than_the_transfer() -> None:
    """What is under way lands before the next launch, whatever was chosen."""
    clock = ClusterClock(cluster(30.0))
    _, local = walk([0.0, 1.0], schedule=prsgd.timed(4.0), steps=60, overlap="auto", clock=clock)
    assert overlaps(local)[:8] == [1, 1, 1, *[4] * 5]
    assert local.records[3].reason == "transfer 30 s, step 1 s: overlap 1 to 30, or to the round's end"


def test_an_epochs_end_tells_no_transfer_twice() -> None:
    """Its last handshake, in which nobody has anything new, brings the transfer before: that was told with it."""
    fleet = prsgd.Fleet(torch.nn.Linear(1, 1), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    clock = Told([0.5, 0.5, 0.5, 9.0, *[0.5] * 4], late=0.0)  # the fourth ends the second epoch
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), overlap="auto", clock=clock) as local:
        for _ in range(4):
            with local.epoch():
                for _ in range(7):
                    optimizer.zero_grad()
                    fleet.backward(itself_squared, torch.tensor([[[1.0]], [[2.0]]]), torch.ones(2, 1))
                    optimizer.step()
    assert [record.reason for record in local.records] == [""] * 8


def test_it_says_why_beside_the_schedule() -> None:
    _, local, _ = train_fleet([40, 40], schedule=CHANGING["auto"], overlap="auto", clock=ClusterClock(cluster(3.0)))
    both = [record.reason for record in local.records if "; " in record.reason]
    assert both
    assert all(
        "period" in first and first.startswith("drift") and second.startswith("transfer 3 s, step 1 s")
        for first, second in (reason.split("; ") for reason in both)
    )


# Limits that must be equal


def final(rows: Tensor, local: prsgd.LocalSGD, fleet: prsgd.Fleet) -> Any:
    buffers = [buffer.tolist() for module in fleet.modules for buffer in module.buffers()]
    return rows.tolist(), buffers, [(r.round, r.step, r.period, r.overlap, r.drift, r.loss) for r in local.records]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_where_nothing_travels_it_is_overlap_1(schedule: str) -> None:
    one, auto = (
        final(*train_fleet([9, 13], kind="batchnorm", schedule=SCHEDULES[schedule], overlap=overlap))
        for overlap in (1, "auto")
    )
    assert auto == one


@pytest.mark.parametrize("name", [*ALL, "steps"])
def test_every_averaging_as_it_is_with_that_overlap(name: str) -> None:
    """From the third round on the transfer is hidden by two steps; the first two rounds are made alike by a lr of 0
    (nothing moves, so that it is all the same when they close). Who hears neighbours only stays at 1."""
    averaging = ALL.get(name, prsgd.mean("steps"))

    def run(overlap: Any) -> Any:
        fleet = prsgd.Fleet(torch.nn.Linear(3, 2).double(), 3)
        with torch.no_grad():
            fleet.rows.copy_(torch.arange(8.0).expand(3, 8))
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.0)
        options = {"schedule": prsgd.every(3), "averaging": averaging, "overlap": overlap, "clock": Told([1.5])}
        with prsgd.LocalSGD(fleet, optimizer, **options) as local:
            for t in range(15):
                optimizer.param_groups[0]["lr"] = 0.1 * (t >= 6)
                optimizer.zero_grad()
                x = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
                fleet.backward(lambda out, _: out.square().mean(), x, x)
                optimizer.step()
        return fleet.rows.clone(), overlaps(local)

    expected = 1 if averaging in (prsgd.gossip("ring"), prsgd.gossip("exponential"), prsgd.gossip("complete")) else 2
    rows, found = run("auto")
    assert found == [1, 1, *[expected] * 3]
    if "steps" not in name:  # of which the third round has had fewer, so that its weights are rounded in another way
        assert torch.equal(rows, run(expected)[0])


# Several processes


def options(schedule: str, averaging: str = "mean", **more: Any) -> dict[str, Any]:
    return {
        "schedule": SCHEDULES[schedule],
        "averaging": {"mean": prsgd.mean(), **ALL}[averaging],
        "overlap": "auto",
        **more,
    }


TRANSFERS_OF_A_RUN = (1.5, 1.5, 3.5, 3.5, 0.5, 0.5, 0.5, 0.5, 0.5)
"""Steps that averages take: the overlap is raised, raised again, and lowered."""
CASES = [
    ("every", "mean", [25, 25]),
    ("every", "outer", [25, 14]),
    ("every", "4 bits", [25, 25]),
    ("per worker", "mean", [21, 21]),
    ("measured", "mean", [21, 0]),
    ("post-local", "easgd", [21, 15]),
    ("quadratic", "mean", [21, 21]),
    ("growing", "float16", [21, 21]),
    ("auto", "mean", [25, 21]),
    ("every", "complete", [21, 21]),
]


def said(local: prsgd.LocalSGD) -> list[tuple[Any, ...]]:
    return [(r.round, r.step, r.period, r.overlap, r.workers, r.bytes_sent, r.reason) for r in local.records]


def trained(num_steps: list[int], schedule: str, averaging: str) -> Any:
    rows, local, _ = train_fleet(num_steps, **options(schedule, averaging, clock=Told(TRANSFERS_OF_A_RUN)))
    return rows, said(local)


def trained_rank(rank: int) -> list[Any]:
    return [trained(num_steps, schedule, averaging) for schedule, averaging, num_steps in CASES]


def test_a_simulation_is_what_processes_do() -> None:
    ranks = run_ranks(trained_rank, 2)
    for number, (schedule, averaging, num_steps) in enumerate(CASES):
        rows, records = trained(num_steps, schedule, averaging)
        for rank in range(2):
            assert torch.equal(ranks[rank][number][0][0], rows[rank]), (schedule, averaging)
        for record, *own in zip(records, *(ranks[rank][number][1] for rank in range(2)), strict=True):
            name = f"{schedule}, {averaging}: {record}, {own}"
            assert [one[0] for one in own] == [record[0]] * 2, name
            assert tuple(map(max, zip(*(one[1:4] for one in own)))) == record[1:4], name
            assert [one[4:6] for one in own] == [record[4:6]] * 2, name
            assert record[6] in [one[6] for one in own], name
        used = {record[3] for record in records if record[2]}
        assert (max(used) == 1) == (averaging == "complete"), (schedule, averaging)
    assert {record[3] for record in ranks[0][0][1]} == {0, 1, 2, 4}


class Slow:
    """Work that is there no sooner than so many seconds after its start, and says so."""

    def __init__(self, work: Work[Any], seconds: float) -> None:
        self._work, self._seconds, self._until = work, seconds, time.monotonic() + seconds
        self.bytes_sent, self.server_bytes_sent, self.hops = work.bytes_sent, work.server_bytes_sent, work.hops

    def wait(self, timeout_seconds: float | None = None) -> Any:
        time.sleep(max(0.0, self._until - time.monotonic()))
        return self._work.wait(timeout_seconds)

    def flight_seconds(self) -> float:
        return self._seconds


class SlowLink(prsgd.TorchDistributed):
    """Every sum takes a while."""

    def all_reduce(self, flat: Tensor) -> Any:
        return Slow(super().all_reduce(flat), 0.02)


class Noting(WallClock):
    """Keeps what it says of every average."""

    def __init__(self, rank: int) -> None:
        super().__init__(range(rank, rank + 1))
        self.said: list[float] = []

    def arrived(self, sent: Sent, *, round: int, flight_seconds: float) -> Sequence[float]:
        found = super().arrived(sent, round=round, flight_seconds=flight_seconds)
        self.said += torch.tensor(found).tolist()  # as it travels
        return found


def slow_rank(rank: int) -> Any:
    with_link, clock = SlowLink(timeout_seconds=60.0), Noting(rank)
    row, local, _ = train_model(rank, 40, comm=with_link, clock=clock, **options("every"))
    return row, [(r.overlap, r.reason.split(":")[-1], r.step_seconds) for r in local.records], clock.said


def test_a_slow_link_between_processes() -> None:
    """What a step takes is measured, on a machine that may be busy: the rule, from what the records say of it."""
    (row, records, said), (other, theirs, also) = run_ranks(slow_rank, 2)
    assert torch.equal(row, other)
    assert records == theirs
    hiding, expected = Hiding(), [1]
    for (_, _, step_seconds), *flights in zip(records[:-1], said, also):
        expected.append(min(4, hiding.overlap))
        assert step_seconds is not None
        assert min(flights) > 0.0199
        hiding.hear(flights, step_seconds)  # they came with the average after that of the record
    closed_by_steps = [overlap for overlap, _, _ in records[:10]]
    assert closed_by_steps == expected[:10]
    for before, (now, reason, _) in itertools.pairwise([(1, "", None), *records[:10]]):
        assert reason == (f" overlap {before[0]} to {now}" if now != before[0] else "")


# On a machine whose time is ours


class Machine:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


class Travelling(Slow):
    """Work that takes its while by the machine's time."""

    def __init__(self, work: Work[Any], machine: Machine, seconds: float, waits: list[float]) -> None:
        super().__init__(work, seconds)
        self._machine, self._until, self._waits = machine, machine.now + seconds, waits

    def wait(self, timeout_seconds: float | None = None) -> Any:
        self._waits.append(max(0.0, self._until - self._machine.now))
        self._machine.pass_by(self._waits[-1])
        return self._work.wait(timeout_seconds)


class Linked(prsgd.InProcess):
    """Two workers here whose sums take so long."""

    def __init__(self, machine: Machine, seconds: float) -> None:
        super().__init__(2)
        self.machine, self.seconds, self.waits = machine, seconds, list[float]()

    def all_reduce(self, flat: Tensor) -> Any:
        return Travelling(super().all_reduce(flat), self.machine, self.seconds, self.waits)


def on_machine(
    monkeypatch: pytest.MonkeyPatch,
    *,
    gradient: Callable[[int], float],
    update: float,
    transfer: float,
    steps: int = 8 * 12,
    pause: float = 0.0,
) -> tuple[prsgd.LocalSGD, list[float]]:
    """``every(8)`` with seconds of a step's parts and of a sum, and a pause after every eighth step."""
    machine = Machine()
    monkeypatch.setattr(wall, "time", machine)
    comm = Linked(machine, transfer)
    fleet = prsgd.Fleet(torch.nn.Linear(1, 1), 2, comm=comm)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: machine.pass_by(update))  # before LocalSGD's own
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(8), overlap="auto") as local:
        for t in range(steps):
            optimizer.zero_grad()
            fleet.backward(itself_squared, torch.tensor([[[1.0]], [[2.0]]]), torch.ones(2, 1))
            machine.pass_by(gradient(t))
            optimizer.step()
            machine.pass_by(pause if t % 8 == 7 else 0.0)
        waits = list(comm.waits)
    return local, waits


def test_a_pause_between_steps_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation, a checkpoint, or other teams' turns in a race."""
    local, waits = on_machine(monkeypatch, gradient=lambda _: 0.3, update=0.0, transfer=0.85, pause=30.0)
    assert overlaps(local) == [1, 1, *[3] * 10]
    assert local.records[5].step_seconds == pytest.approx((0.3, 0.3))
    assert waits[-10:] == [0.0] * 10


def test_an_update_hides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a launch and a landing three steps later are three gradients and two updates: 0.8 s."""
    local, waits = on_machine(monkeypatch, gradient=lambda _: 0.2, update=0.1, transfer=0.85)
    assert overlaps(local) == [1, 1, *[4] * 10]
    assert waits[-10:] == [0.0] * 10


def test_it_follows_steps_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of hundreds of steps the newest count."""
    local, waits = on_machine(
        monkeypatch, gradient=lambda t: 0.4 if t < 800 else 0.2, update=0.0, transfer=0.75, steps=8 * 110
    )
    assert overlaps(local)[50] == 2
    assert set(overlaps(local)[-2:]) == {4}
    assert waits[-2:] == [0.0] * 2


def plain_rank(rank: int) -> Any:
    rows, local, _ = train_fleet([30, 30, 22], kind="batchnorm", **options("every"))
    with_looks = prsgd.Fleet(torch.nn.Linear(2, 1), 3)
    optimizer = torch.optim.SGD(with_looks.parameters(), lr=0.1)
    with prsgd.LocalSGD(with_looks, optimizer, **options("every")) as looking:
        for epoch in range(3):
            with looking.epoch():
                for t in range(6 + rank):
                    optimizer.zero_grad()
                    x = torch.randn(len(with_looks.workers), 2, 2, generator=torch.Generator().manual_seed(t + rank))
                    with_looks.backward(itself_squared, x, x)
                    optimizer.step()
                    if t < 6 and epoch != 1:
                        with looking.consensus():
                            pass
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where a step takes as long as a round
        by_clock, _, _ = train_fleet([30, 40, 22], schedule=prsgd.timed(0.01), overlap="auto")
    found = {r.round: r.overlap for r in local.records if r.period == 4}
    return rows, found, [with_looks.rows[0].tolist(), by_clock[0].tolist()]


def test_real_times_looks_epochs_and_rounds_by_the_clock() -> None:
    """Whatever the machine measures, all workers choose the same, meet where they look, and end with one model."""
    (rows, found, looked), (others, theirs, also) = run_ranks(plain_rank, 2)
    assert len(theirs) == 5  # of a worker that has 22 steps
    assert theirs == {round: found[round] for round in theirs}
    assert all(torch.equal(row, rows[0]) for row in [*rows, *others])
    assert looked == also


def mismatched_rank(rank: int) -> None:
    train_model(rank, 4, schedule=prsgd.every(4), overlap="auto" if rank else 1)


def test_one_worker_with_another_overlap_is_named() -> None:
    for kind, text in try_ranks(mismatched_rank, 2):
        assert kind == "error"
        assert text.startswith(MismatchError.__name__)
        assert "overlap auto" in text


# Stopping and going on


STOPPED = [
    *({"schedule": schedule} for schedule in (prsgd.every(4), prsgd.every(1), prsgd.per_worker([5, 2]))),
    *({"schedule": schedule} for schedule in CHANGING.values()),
    {"schedule": prsgd.every(4), "averaging": prsgd.outer()},
    {"schedule": prsgd.every(3), "averaging": prsgd.quantized(4)},
]


@pytest.mark.parametrize("given", STOPPED, ids=str)
def test_stop_anywhere(given: dict[str, Any]) -> None:
    given = {**given, "overlap": "auto", "clock": functools.partial(Told, TRANSFERS_OF_A_RUN)}
    unbroken = stopped_run(given, 26)
    for stop_at in range(1, 26, 2 if given["schedule"] == prsgd.every(4) else 5):
        same(stopped_run(given, 26, stop_at=stop_at), unbroken)


@pytest.mark.parametrize("schedule", [prsgd.timed(2.0), prsgd.every(4)], ids=str)
def test_stop_anywhere_on_a_cluster(schedule: prsgd.Schedule) -> None:
    two = cluster(1.2, speeds=(3.0, 1.0), jitter=0.3)
    given = {"schedule": schedule, "overlap": "auto", "clock": lambda: ClusterClock(two, seed=3)}
    unbroken = stopped_run(given, 60)
    assert max(record[2] for record in unbroken[2].values()) > 1
    for stop_at in (5, 11, 13, 22, 31, 48, 59):
        same(stopped_run(given, 60, stop_at=stop_at), unbroken)


def test_a_state_of_another_overlap_is_refused() -> None:
    net = torch.nn.Linear(1, 1)

    def new(overlap: Any) -> prsgd.LocalSGD:
        return prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.every(4), overlap=overlap)

    with new("auto") as local:
        state = local.state_dict()
    with pytest.raises(prsgd.CheckpointError, match="the state is of a run with overlap 'auto', this one has 1"):
        new(1).load_state_dict(state)
    state["lanes"][0]["hiding"] = {"overlap": 2}
    with pytest.raises(
        prsgd.CheckpointError, match="the state is damaged, or no state of LocalSGD: 'chosen_by' is missi"
    ):
        new("auto").load_state_dict(state)


# What does not go with it


def test_what_does_not_go_with_it() -> None:
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="overlap must be 0 or 1 with optimizer_state=\"average\", got 'auto'"):
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), overlap="auto", optimizer_state="average")
    with (
        pytest.raises(UsageError, match="takes its gradient after the average would land: use overlap=0"),
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), overlap="auto"),
    ):
        optimizer.step(lambda: net(torch.ones(1, 1)).sum())


# The lab


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overlap": "fast"}, "overlap must be a whole number >= 0, or \"auto\", got 'fast'"),
        ({"overlap": True}, 'overlap must be a whole number >= 0, or "auto", got True'),
        ({"overlap": "auto", "method": "pr-sgd-momentum"}, "overlap must be 0 or 1 with method pr-sgd-momentum, got"),
        (
            {"overlap": "auto", "method": "pr-sgd-timed", "cluster": "mixed", "workers": 4, "processes": 4},
            "overlap must be 0 with method pr-sgd-timed in several processes, got 'auto'",
        ),
        (
            {"overlap": "auto", "method": "pr-sgd-measured", "workers": 4, "processes": 4},
            "overlap must be below the period 8 with method pr-sgd-measured in several processes, got 'auto'",
        ),
    ],
)
def test_bad_configs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_dict(given).resolve()


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["train", "--overlap", "fast"])
    assert left.value.code == 2
    assert capsys.readouterr().err == (
        "prsgd train: error: argument --overlap: must be a whole number or auto, got 'fast'\n"
    )


def test_from_the_command_line_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "link.toml"
    place.write_text('step_time = "20ms"\nbandwidth = "1Gbit"\nlatency = "25ms"\n')  # two workers: 50 ms an average
    given = ["--workers", "2", "--cluster", str(place), "--epochs", "1", "--overlap", "0", "auto", "--period", "8"]
    assert main(["compare", *given, "--seeds", "1", "--jobs", "1", "--out", str(tmp_path / "both")]) == 0
    auto = tmp_path / "both" / "pr-sgd-period-8-overlap-auto-seed-0"
    config = Config.from_dict(json.loads((auto / "config.json").read_text()))
    assert config.overlap == "auto"
    assert config == config.resolve()
    lines = [json.loads(line) for line in (auto / "records.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["kind"] == "average"]
    assert [record["overlap"] for record in records if record["period"] == 8][:5] == [1, 1, 3, 3, 3]
    assert [record["reason"] for record in records if record["reason"]] == [
        "transfer 0.0502 s, step 0.02 s: overlap 1 to 3"
    ]
    seconds = {
        folder.name.split("-seed")[0]: json.loads((folder / "summary.json").read_text())["modelled_seconds"]
        for folder in (tmp_path / "both").glob("*-seed-0")
    }
    assert seconds["pr-sgd-period-8-overlap-auto"] < seconds["pr-sgd-period-8"]
    page = (tmp_path / "both" / "report.html").read_text()
    assert "overlap auto" in page
    assert "--overlap 0 auto" in page
    capsys.readouterr()
