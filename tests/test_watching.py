"""Watching a run: the numbers are the records', looking changes nothing, and the advice goes by the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import prsgd
from prsgd.cluster.clock import ClusterClock
from prsgd.cluster.model import Cluster
from tests.problems import model, take_step, train_fleet, walk
from tests.ranks import run_ranks

Values = dict[str, float]


class Seen:
    """What a function for values and steps is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Values]] = []
        self.lines: list[str] = []

    def __call__(self, values: Values, step: int) -> None:
        self.told.append((step, values))


def watched(steps: int, watch: bool, **options: Any) -> tuple[torch.Tensor, prsgd.LocalSGD, Seen]:
    """Two workers in a fleet, with two looks at the consensus on the way."""
    fleet, seen = prsgd.Fleet(model("batchnorm"), 2), Seen()
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9)
    local, taken = prsgd.LocalSGD(fleet, optimizer, **options), dict.fromkeys(fleet.workers, 0)
    if watch:
        prsgd.watch(local, seen, lines=seen.lines.append)
    with local:
        for step in range(steps):
            take_step(fleet, optimizer, local, taken)
            if watch:
                assert str(local.summary())
            if step % 5 == 2:
                with local.consensus():
                    pass
    return fleet.rows.clone(), local, seen


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": prsgd.every(4)},
        {"schedule": prsgd.every(4), "overlap": 3},
        {"schedule": prsgd.every(3), "overlap": "auto"},
        {"schedule": prsgd.every(4), "fragments": 2, "overlap": 1},
        {"schedule": prsgd.auto(), "optimizer_state": "average"},
    ],
    ids=str,
)
def test_looking_changes_nothing_in_a_fleet(options: dict[str, Any]) -> None:
    rows, local, seen = watched(14, True, **options)
    assert torch.equal(rows, watched(14, False, **options)[0])
    assert [step for step, _ in seen.told] == [record.step for record in local.records]
    assert len(seen.lines) == len(local.records)
    assert max(map(len, seen.lines)) <= 120
    for (_, values), record in zip(seen.told, local.records):
        drift = "prsgd/drift" if record.fragment is None else f"prsgd/drift/fragment-{record.fragment}"
        assert (values[drift], values["prsgd/period"], values["prsgd/lr"]) == (record.drift, record.period, record.lr)
        assert values.get("prsgd/loss") == record.loss
    assert seen.told[-1][1]["prsgd/bytes_sent"] == local.totals.bytes_sent
    assert seen.told[-1][1]["prsgd/rounds"] == local.summary().rounds == len(local.records)


def train_watched(rank: int, watch: bool) -> tuple[torch.Tensor, Seen, list[int], str]:
    """One of two ranks, with an overlap."""
    fleet, seen = prsgd.Fleet(model(), 2), Seen()
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9)
    local, taken = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), overlap=2), dict.fromkeys(fleet.workers, 0)
    if watch:
        prsgd.watch(local, seen, lines=seen.lines.append)
    with local:
        for step in range(11):
            take_step(fleet, optimizer, local, taken)
            if watch:
                local.summary()
            if step == 6:
                with local.consensus():
                    pass
    return fleet.rows.clone(), seen, [record.step for record in local.records], local.summary().advice


def test_looking_changes_nothing_over_two_ranks_and_the_first_tells() -> None:
    (one, seen, steps, advice), (other, silent, _, _) = run_ranks(train_watched, 2, True)
    plain, unseen = (rows for rows, *_ in run_ranks(train_watched, 2, False))
    assert torch.equal(one, plain)
    assert torch.equal(other, unseen)
    assert [step for step, _ in seen.told] == steps
    assert steps[:2] == [4, 8]
    assert (silent.told, silent.lines) == ([], [])
    assert advice.startswith("you wait ")


def test_numbers_by_hand() -> None:
    """Two points that are pulled to 0 and 4 with lr 1/2: after two steps they are at 0 and 3, 1.5 from their mean."""
    seen = Seen()
    _, local = walk([0.0, 4.0], schedule=prsgd.every(2), steps=2)
    assert local.summary().drift == 2.25
    fleet = prsgd.Fleet(torch.nn.Linear(1, 1), 2)
    run = prsgd.LocalSGD(fleet, torch.optim.SGD(fleet.parameters(), lr=0.1), schedule=prsgd.every(2))
    prsgd.watch(run, seen)
    assert run.summary().advice == "no average is complete yet"
    assert str(run.summary()).startswith("0 rounds in 0 steps, 2 workers\n0 MB sent by each worker; drift not known\n")
    assert seen.told == []


def test_going_on_counts_on() -> None:
    def build() -> tuple[Any, prsgd.LocalSGD, Seen]:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        local, seen = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)), Seen()
        prsgd.watch(local, seen)
        return (net, optimizer), local, seen

    def steps(parts: Any, count: int) -> None:
        for _ in range(count):
            parts[1].zero_grad()
            parts[0](torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            parts[1].step()

    parts, local, seen = build()
    local.start()
    steps(parts, 5)
    state = local.state_dict()
    again, more, seen_again = build()
    more.load_state_dict(state)
    with more:
        steps(again, 3)
    told = [*seen.told, *seen_again.told]
    assert [(step, values["prsgd/rounds"]) for step, values in told] == [(2, 1), (4, 2), (6, 3), (8, 4)]


def on_a_cluster(overlap: int, megabytes_a_second: float = 1e6, **options: Any) -> prsgd.LocalSGD:
    """A worker that takes half a second for a step, and one that takes one; a ring of two sends 8 bytes each."""
    two = Cluster("two", speeds=(2.0, 1.0), step_seconds=1.0, bytes_per_second=megabytes_a_second * 1e6)
    clock = ClusterClock(two)
    return walk([0.0, 4.0], schedule=prsgd.every(4), steps=8, overlap=overlap, clock=clock, **options)[1]


def test_the_share_of_waiting_by_hand() -> None:
    """In each of two rounds the fast one computes for 2 s and waits for 2, the slow one computes for 4."""
    found = on_a_cluster(0).summary()
    assert found.seconds == pytest.approx(8.0, abs=1e-6)
    assert found.wait_seconds == pytest.approx(2.0, abs=1e-6)
    assert found.waiting == pytest.approx(0.25, abs=1e-6)
    assert found.advice == (
        "you wait 25 % of the time: raise the period or the overlap; for others that are slower, take measured()"
    )
    assert str(found) == (
        "2 rounds in 8 steps, 2 workers; the last period 4, overlap 0\n"
        "0.000272 MB sent by each worker; drift 3.516\n"
        "waited 2 of 8 s; you wait 25 % of the time: raise the period or the overlap; for\n"
        "others that are slower, take measured()"
    )


def test_what_is_advised() -> None:
    whole = on_a_cluster(4, megabytes_a_second=1e-6).summary()  # 8 s for an average: four steps do not hide it
    assert (whole.overlap, whole.period) == (4, 4)
    assert "raise the period; for others" in whole.advice
    local = train_fleet([8, 8], schedule=prsgd.every(4))[1]
    assert local.summary().advice.endswith(
        ("for copies within this process: raise the period", "there is nothing to gain by averaging more rarely")
    )


def test_tensorboard_shows_the_same(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2))
    with SummaryWriter(str(tmp_path)) as writer, local:
        prsgd.watch(local, writer)
        for _ in range(5):
            optimizer.zero_grad()
            net(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            optimizer.step()
    events = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("prsgd/period")] == [(2, 2), (4, 2), (5, 1)]
    assert [event.value for event in events.Scalars("prsgd/drift")] == [0, 0, 0]


def test_a_run_does_not_end_because_its_watcher_fails() -> None:
    told = []

    def full(values: Values, step: int) -> None:
        told.append(step)
        raise OSError("the disk\nis full")

    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2))
    prsgd.watch(local, full)
    local.start()
    for _ in range(3):
        optimizer.zero_grad()
        net(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(RuntimeWarning, match=r"watch\(\) ends with round 1: OSError: the disk is full"):
        optimizer.step()
    local.finish()
    assert told == [2]
    assert local.round == 2


class NoWriter:
    pass


@pytest.mark.parametrize(
    ("to", "lines", "message"),
    [
        (None, None, "watch must be given where to tell: a writer or a function as to, or lines=print"),
        (NoWriter, None, r"to must be a writer or a function, got the class NoWriter: make one, NoWriter\(\)"),
        (NoWriter(), None, "to must be a SummaryWriter, or a function of values by name and the step, got NoWriter"),
        (None, "print", "lines must be a function of a text, got str"),
        (lambda _: None, None, "to must take two arguments, the values by name and the step"),
        (lambda _, *, step: step, None, "to must take two arguments"),
        (None, lambda: None, "lines must take one argument, a text"),
    ],
)
def test_bad_arguments(to: Any, lines: Any, message: str) -> None:
    net = model()
    local = prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.1), schedule=prsgd.every(2))
    with pytest.raises(ValueError, match=message):
        prsgd.watch(local, to, lines=lines)
    with pytest.raises(ValueError, match=r"local must be a prsgd\.LocalSGD, got Sequential"):
        prsgd.watch(net, print)  # type: ignore[arg-type]


def test_lines_are_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)) as watched:
        prsgd.watch(watched, lines=print)
        for _ in range(2):
            optimizer.zero_grad()
            net(torch.ones(1, 6, dtype=torch.float64)).sum().backward()
            watched.log(loss=0.25, samples=1)
            optimizer.step()
    said = capsys.readouterr().out
    assert said.startswith("round 1, step 2: loss 0.25, drift 0, period 2, ")
    assert len(said) <= 80
