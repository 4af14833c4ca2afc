"""A model that travels in two fragments, one after the other: against a transcription by hand, in one process and over
gloo; uneven and looked at."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import prsgd
from prsgd.cluster.clock import ClusterClock
from prsgd.cluster.model import Cluster
from prsgd.core.fragments import dealt
from tests.problems import CHANGING, batch, model
from tests.ranks import run_ranks

PERIOD, LR = 4, 0.25


class Halves(nn.Module):
    """Two numbers in each half; the gradient of ``half |x - target|^2`` is x - target."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.right = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, target: Tensor) -> Tensor:
        return (torch.cat([self.left, self.right]) - target).square().sum() / 2


def target(worker: int, step: int) -> Tensor:
    return torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) * (worker + 1) + 0.125 * step


def by_hand(workers: int, overlap: int, num_steps: int) -> list[Tensor]:
    """Algorithm 1 with each half on its own: the left lands at 2, 6, ..., the right at 4, 8, ..."""
    x = [torch.zeros(4, dtype=torch.float64) for _ in range(workers)]
    halves = {"left": (slice(0, 2), PERIOD // 2), "right": (slice(2, 4), PERIOD)}
    snaps: dict[str, list[Tensor]] = {}
    path = []
    for step in range(1, num_steps + 1):
        gradients = [x[i] - target(i, step) for i in range(workers)]
        for name, (part, first) in halves.items():
            if overlap and (step - first) % PERIOD == 0 and step >= first and name in snaps:
                snap = snaps.pop(name)
                mean = torch.stack(snap).sum(dim=0) / workers
                for i in range(workers):
                    # Nothing has moved it since where it was taken just before: the mean itself is written.
                    x[i][part] = mean if overlap == 1 else x[i][part] + (mean - snap[i])
        x = [x[i].add(gradients[i], alpha=-LR) for i in range(workers)]
        for name, (part, first) in halves.items():
            if (step + overlap - first) % PERIOD == 0 and step + overlap >= first:
                snap = [x[i][part].clone() for i in range(workers)]
                if overlap:
                    snaps[name] = snap
                else:
                    for i in range(workers):
                        x[i][part] = torch.stack(snap).sum(dim=0) / workers
        path.append(torch.stack(x))
    return path


def walked(hosted: Any, workers: range, overlap: int, num_steps: int, looks: bool = False) -> tuple[Tensor, Tensor]:
    optimizer = torch.optim.SGD(hosted.parameters(), lr=LR)
    modules: list[Any] = list(hosted.modules) if isinstance(hosted, prsgd.Fleet) else [hosted]
    path = []
    with prsgd.LocalSGD(
        hosted,
        optimizer,
        schedule=prsgd.every(PERIOD),
        overlap=overlap,
        fragments=["left", "right"],
        timeout_seconds=20,
    ) as local:
        for step in range(1, num_steps + 1):
            optimizer.zero_grad()
            for worker, module in zip(workers, modules):
                module(target(worker, step)).backward()
            optimizer.step()
            path.append(torch.stack([torch.cat([m.left, m.right]).detach() for m in modules]))
            if looks:
                with local.consensus() as averaged:
                    assert averaged is modules[0]
    return torch.stack(path), torch.stack([torch.cat([m.left, m.right]).detach() for m in modules])


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_in_one_process(overlap: int, looks: bool) -> None:
    expected = by_hand(3, overlap, 13)
    path, last = walked(prsgd.Fleet(Halves(), 3, mode="loop"), range(3), overlap, 13, looks)
    torch.testing.assert_close(path, torch.stack(expected), rtol=0, atol=1e-14)
    torch.testing.assert_close(last, expected[-1].mean(dim=0).expand(3, -1), rtol=0, atol=1e-13)
    assert torch.equal(last[0], last[1])
    assert torch.equal(last[0], last[2])


def a_rank(rank: int, lengths: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    return [walked(Halves(), range(rank, rank + 1), overlap, lengths[rank]) for overlap in (0, 1, 2)]


def test_over_gloo() -> None:
    one, other = run_ranks(a_rank, 2, (13, 13))
    for overlap in (0, 1, 2):
        expected = torch.stack(by_hand(2, overlap, 13))
        path = torch.cat([one[overlap][0], other[overlap][0]], dim=1)
        torch.testing.assert_close(path, expected, rtol=0, atol=1e-14)
        assert torch.equal(one[overlap][1], other[overlap][1])


def test_uneven_over_gloo() -> None:
    """A worker that is done answers each lane in its turn, until all are done on both."""
    one, other = run_ranks(a_rank, 2, (4, 13))
    for overlap in (0, 1, 2):
        assert torch.equal(one[overlap][1], other[overlap][1])
        assert bool(one[overlap][1].isfinite().all())


ELEMENTWISE = {
    "mean": prsgd.mean(),
    "bfloat16": prsgd.mean(wire=prsgd.half()),
    "outer": prsgd.outer(0.7, 0.9),
    "easgd": prsgd.easgd(0.3, 0.5),
}


def halves_of(fragments: Any, num_steps: int, schedule: prsgd.Schedule, **options: Any) -> tuple[Tensor, Tensor]:
    """Both halves of three workers after each step."""
    fleet = prsgd.Fleet(Halves(), 3, mode="loop")
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.05, momentum=0.9)
    path = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=schedule, fragments=fragments, **options):
        for step in range(1, num_steps + 1):
            optimizer.zero_grad()
            for worker, module in enumerate(fleet.modules):
                module(target(worker, step)).backward()
            optimizer.step()
            path.append(fleet.rows.clone())
    return torch.stack(path)[..., :2], torch.stack(path)[..., 2:]


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("state", ["keep", "reset", "average"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_the_last_fragment_is_averaged_as_the_whole_model_would_be(name: str, state: str, overlap: int) -> None:
    """The halves do not know of each other, so each is a run of its own; the right one's rounds are the schedule's."""
    options: Any = {"averaging": ELEMENTWISE[name], "optimizer_state": state, "overlap": overlap}
    _, whole = halves_of(1, 15, prsgd.every(4), **options)
    left, right = halves_of(["left", "right"], 15, prsgd.every(4), **options)
    assert torch.equal(right, whole)
    late, _ = halves_of(1, 17, prsgd.every(4), **options)
    assert not torch.equal(left, late[:15])


def test_the_reason_of_an_overlap_names_the_schedules_period() -> None:
    cluster = Cluster("two", (1.0,) * 3, 1.0, bytes_per_second=1e18, latency_seconds=15.0)
    local = trained(40, schedule=prsgd.every(8), fragments=2, overlap="auto", clock=ClusterClock(cluster))
    assert {record.overlap for record in local.records[4:-2]} == {4}  # with two fragments one is under way at a time
    reasons = {record.reason for record in local.records} - {""}
    assert reasons == {"transfer 60 s, step 1 s, period 8: overlap 1 to 4"}


@pytest.mark.parametrize("overlap", [0, 1])
def test_rounds_of_one_step_average_all_fragments_at_once(overlap: int) -> None:
    for schedule in (prsgd.every(1), prsgd.growing(lr_scale=0.01)) if not overlap else (prsgd.growing(lr_scale=0.01),):
        halves = (halves_of(parts, 6, schedule, overlap=overlap) for parts in (1, ["left", "right"]))
        one, two = (torch.cat(both, dim=2) for both in halves)
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", [name for name in CHANGING if name != "auto"])  # which takes whole models
def test_rounds_that_change_are_staggered(name: str) -> None:
    """The last fragment ends where the schedule's rounds do, the first in the middle of each, and nobody sooner."""
    whole, parts = landings(CHANGING[name], 1), landings(CHANGING[name], 2)
    assert [step for step, fragment in parts if fragment == 1] == [step for step, _ in whole]
    begins = [0, *(step for step, _ in whole)]
    middles = [begin - (begin - end) // 2 for begin, end in itertools.pairwise(begins)]
    assert [step for step, fragment in parts if fragment == 0] == middles
    assert [fragment for _, fragment in parts] == [0, 1] * len(whole)


def landings(schedule: prsgd.Schedule, fragments: int, **options: Any) -> list[tuple[int, int | None]]:
    """(step, fragment) of what landed in 40 steps, without the last average."""
    local = trained(schedule=schedule, fragments=fragments, steps=40, **options)
    return [(record.step, record.fragment) for record in local.records if record.period and record.step < 40]


def trained(steps: int = 12, module: nn.Module | None = None, workers: int = 3, **options: Any) -> prsgd.LocalSGD:
    fleet = prsgd.Fleet(model("mlp") if module is None else module, workers)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, **{"schedule": prsgd.every(4), **options}) as local:
        train(fleet, optimizer, local, steps)
    return local


def train(fleet: prsgd.Fleet, optimizer: torch.optim.Optimizer, local: prsgd.LocalSGD, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        pairs = [batch(worker, local.steps[worker]) for worker in range(fleet.num_workers)]
        loss = fleet.backward(cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
        local.log(loss=loss, samples=4)
        optimizer.step()


def test_records_say_which_fragment() -> None:
    whole, parts = trained(), trained(fragments=2)
    assert [(r.round, r.step, r.period, r.fragment) for r in parts.records] == [
        (1, 2, 2, 0), (2, 4, 4, 1), (3, 6, 4, 0), (4, 8, 4, 1), (5, 10, 4, 0), (6, 12, 4, 1), (7, 12, 2, 0),
    ]  # fmt: skip
    assert [r.fragment for r in whole.records] == [None, None, None]
    assert (parts.round, parts.totals.rounds, parts.launched) == (7, 7, 7)
    assert parts.totals.samples == whole.totals.samples == 12 * 3 * 4
    assert [r.samples for r in parts.records] == [24, 48, 48, 48, 48, 48, 24]
    sizes = {0: 6 * 5 + 5, 1: 5 * 3 + 3}
    for record in parts.records:
        header = whole.records[0].bytes_sent - 4 / 3 * 8 * sum(sizes.values())
        assert record.fragment is not None
        assert record.bytes_sent == pytest.approx(4 / 3 * 8 * sizes[record.fragment] + header, abs=1)
    assert all(r.drift is not None and r.drift > 0 for r in parts.records)


def test_the_drift_is_the_fragments() -> None:
    fleet = prsgd.Fleet(Halves(), 2, mode="loop")
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), fragments=["left", "right"]) as local:
        for _ in range(2):
            optimizer.zero_grad()
            for worker, module in enumerate(fleet.modules):
                module(torch.tensor([4.0, 0.0, 8.0, 0.0], dtype=torch.float64) * worker).backward()
            optimizer.step()
    # After one step the lefts are 0 and 2, 1 from their mean; after two the rights are 0 and 4 (1 - 1/4) * 2 = 6.
    assert [(r.fragment, r.drift) for r in local.records] == [(0, 1.0), (1, 9.0), (0, 1.0)]


def test_tied_weights_travel_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    parts = dealt({name: p for name, p in net.named_parameters() if p.requires_grad}, 2)
    assert parts == [["0.weight"], ["1.weight"]]
    with pytest.raises(ValueError, match="at most the number of layers that train, 2, got 3"):
        dealt(dict(net.named_parameters()), 3)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("fragments", [["head.*", "rest.*"], ["first.*", ["rest.*", "head.*"]]])
def test_a_pattern_of_tied_weights_is_told_by_which_name_they_travel(fragments: Any, compiled: bool) -> None:
    net = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("first", "rest", "head")})
    net["head"].weight = net["first"].weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given: Any = torch.compile(net, backend="eager") if compiled else net
    said = "fragments: 'head.*' matches 'head.weight', which is tied to 'first.weight' and travels as that, in its fr"
    with pytest.raises(ValueError, match=re.escape(said)):
        prsgd.LocalSGD(given, optimizer, schedule=prsgd.every(4), fragments=fragments)
    prsgd.LocalSGD(given, optimizer, schedule=prsgd.every(4), fragments=["first.*", "rest.*"])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 6))
def test_layers_are_dealt_evenly(sizes: list[int], fragments: int) -> None:
    named = {f"{k}.weight": nn.Parameter(torch.zeros(size)) for k, size in enumerate(sizes)}
    if fragments > len(sizes):
        with pytest.raises(ValueError, match="fragments must be at most"):
            dealt(named, fragments)
        return
    parts = dealt(named, fragments)
    assert sorted(name for names in parts for name in names) == sorted(named)
    assert all(parts)
    assert [names[0] for names in parts] == sorted((names[0] for names in parts), key=list(named).index)
    totals = [sum(named[name].numel() for name in names) for names in parts]
    assert max(totals) <= sum(sizes) / fragments + max(sizes)


def test_one_fragment_is_the_whole() -> None:
    shas = {fingerprint(trained(fragments=parts, overlap=1)) for parts in (1, ["*"], [["0.*", "2.*"]])}
    assert len(shas) == 1
    assert fingerprint(trained(fragments=2, overlap=1)) not in shas


def fingerprint(local: prsgd.LocalSGD) -> bytes:
    fleet = local.model
    assert isinstance(fleet, prsgd.Fleet)
    return fleet.rows.numpy().tobytes()


def four_layers() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh()))).double()


ALTERNATE = ["[04].*", "[26].*"]
"""Layers that do not lie together in a fleet's rows."""


def ranks_of_four_layers(rank: int) -> list[Tensor]:
    found = []
    for overlap, state in ((0, "keep"), (1, "average"), (2, "keep")):
        net = four_layers()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        options: Any = {"overlap": overlap, "optimizer_state": state, "fragments": ALTERNATE, "timeout_seconds": 30}
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), **options) as local:
            for step in range(11):
                x, y = batch(rank, step)
                optimizer.zero_grad()
                cross_entropy(net(x), y).backward()
                optimizer.step()
                if step == 6:
                    with local.consensus() as averaged:
                        found.append(torch.cat([p.detach().flatten() for p in averaged.parameters()]))
        found.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    return found


def test_layers_that_do_not_lie_together() -> None:
    """A fleet gathers them; ranks with a model of their own have the same bits."""
    one, other = run_ranks(ranks_of_four_layers, 2)
    expected = []
    for overlap, state in ((0, "keep"), (1, "average"), (2, "keep")):
        fleet = prsgd.Fleet(four_layers(), 2)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1, momentum=0.9)
        options: Any = {"overlap": overlap, "optimizer_state": state, "fragments": ALTERNATE}
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), **options) as local:
            train(fleet, optimizer, local, 7)
            with local.consensus() as averaged:
                expected.append(torch.cat([p.detach().flatten() for p in averaged.parameters()]))
            train(fleet, optimizer, local, 4)
        expected.append(fleet.rows[0].clone())
    for mine, theirs, both in zip(one, other, expected, strict=True):
        assert torch.equal(mine, both)
        assert torch.equal(theirs, both)


def test_a_models_tensors_may_be_replaced() -> None:
    net = four_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), fragments=2, comm=prsgd.InProcess(1)):
        for p in net.parameters():
            p.data = torch.ones_like(p)
        for step in range(4):
            x, y = batch(0, step)
            cross_entropy(net(x), y).backward()
            optimizer.step()
    assert all(bool((p == 1).all()) for p in net.parameters())


def test_an_epochs_end_staggers_anew() -> None:
    fleet = prsgd.Fleet(model("mlp"), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), fragments=2) as local:
        for _ in range(2):
            with local.epoch():
                train(fleet, optimizer, local, 7)
    # Fragment 1 was the next when the epoch ended, so it ends its rounds first in the next one.
    assert [(r.step, r.fragment) for r in local.records] == [
        (2, 0), (4, 1), (6, 0), (7, 1), (7, 0), (9, 1), (11, 0), (13, 1), (14, 0), (14, 1),
    ]  # fmt: skip


def test_a_state_of_other_fragments_is_refused() -> None:
    one, other = (
        prsgd.LocalSGD(
            fleet := prsgd.Fleet(model("mlp"), 2),
            torch.optim.SGD(fleet.parameters(), lr=0.1),
            schedule=prsgd.every(4),
            fragments=fragments,
        )
        for fragments in (2, 1)
    )
    one.start()
    with pytest.raises(
        prsgd.CheckpointError, match=r"the state is of a run with fragments '2 \(of deal \w+\)', this one has '1'"
    ):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fragments": 0}, "fragments must be a whole number >= 1, got 0"),
        ({"fragments": 3}, "fragments must be at most the number of layers that train, 2, got 3"),
        ({"fragments": 2.0}, "fragments must be a number, or a pattern of names for each, got 2.0"),
        ({"fragments": "0.*"}, "fragments must be a number, or a pattern of names for each, got '0.*'"),
        ({"fragments": [3]}, "fragments must be patterns of names, or lists of them, got 3 among them"),
        ({"fragments": ["0.*", None]}, "fragments must be patterns of names, or lists of them, got None among them"),
        ({"fragments": [["*", 4]]}, "fragments must be patterns of names, or lists of them, got ['*', 4] among them"),
        ({"fragments": []}, "fragments must have at least one pattern of names, got none"),
        ({"fragments": [[], ["*"]]}, "fragments: a list of patterns is empty"),
        (
            {"fragments": ["0.*", "1.*"]},
            "fragments: '1.*' matches no parameter that trains (they are called '0.weight'",
        ),
        ({"fragments": ["0.*", "*"]}, "fragments: parameter '0.weight' is matched by '0.*' and by '*'"),
        ({"fragments": ["*", "*"]}, "fragments: parameter '0.weight' is matched by '*' and by '*'"),
        ({"fragments": ["0.*"]}, "fragments leave out parameter '2.weight' and 1 more: every one that trains must be"),
        (
            {"fragments": 2, "overlap": 3},
            "2 fragments travel one after the other, each for 3 steps: overlap must be at most the period 4, got 6",
        ),
        (
            {"fragments": 2, "schedule": prsgd.timed(1.0)},
            "with timed(seconds=1.0) workers take different numbers of steps",
        ),
        ({"fragments": 2, "averaging": prsgd.gossip("ring")}, "hear their neighbours only, and 2 fragments"),
        ({"fragments": 2, "schedule": prsgd.auto()}, "weighs how far whole models drift apart, and with 2 fragments"),
    ],
)
def test_bad_input(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        trained(**options)


def disagreeing(rank: int) -> str:
    net = four_layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), fragments=[2, 4][rank], timeout_seconds=30).start()
    except prsgd.MismatchError as error:
        return str(error)
    return ""


def test_workers_must_have_the_same_fragments() -> None:
    for text in run_ranks(disagreeing, 2):
        assert "worker 1 has fragment 0 of 0.weight, 0.bias, worker 0 has fragment 0 of 0.weight, 0.bias, 6" in text


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_worker_that_is_not_finite_takes_no_step_until_all_its_fragments_are_replaced(overlap: int) -> None:
    """Its gradients would spoil again what was replaced."""
    fleet = prsgd.Fleet(four_layers(), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1, momentum=0.9)
    options: Any = {"overlap": overlap, "fragments": ALTERNATE}
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), **options)
    with pytest.warns(RuntimeWarning, match="worker 1: its model was not finite"):
        spoilt_and_mended(fleet, optimizer, local)
    assert sum(record.bad_workers for record in local.records) == 2


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("resumes", [False, True])
def test_batches_of_a_model_that_is_replaced_in_part_do_not_spoil_its_statistics(overlap: int, resumes: bool) -> None:
    """They would give the worker up once more, when the fragment comes round with which statistics travel."""
    options: Any = {"overlap": overlap, "fragments": ["[03].*", "[14].*"], "schedule": prsgd.every(4)}
    net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5), nn.Tanh(), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()

    def made() -> tuple[Any, ...]:
        fleet = prsgd.Fleet(net, 3)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        return fleet, optimizer, prsgd.LocalSGD(fleet, optimizer, **options)

    fleet, optimizer, local = made()
    local.start()
    train(fleet, optimizer, local, 5 - overlap)
    fleet.rows[1] = float("nan")
    with pytest.warns(RuntimeWarning, match="worker 1: its model was not finite"):
        train(fleet, optimizer, local, 2 + overlap)  # the first fragment was replaced in step 6
    assert not bool(fleet.modules[1][3].running_mean.isfinite().all())
    records = [record.bad_workers for record in local.records]
    if resumes:
        states = [part.state_dict() for part in (fleet, optimizer, local)]
        local.abandon()
        fleet, optimizer, local = made()
        for part, state in zip((fleet, optimizer, local), states):
            part.load_state_dict(state)
        local.start()
    with pytest.warns(RuntimeWarning, match="worker 1: its model was not finite"):
        train(fleet, optimizer, local, 1)
    assert all(bool(b.isfinite().all()) for module in fleet.modules for b in module.buffers())
    train(fleet, optimizer, local, 7)
    assert sum([*records, *(record.bad_workers for record in local.records)]) == 2
    means = [module[3].running_mean for module in fleet.modules]
    torch.testing.assert_close(means[1], means[0], rtol=0, atol=0.5)  # none of them began at 0 again
    local.finish()


def spoilt_and_mended(fleet: prsgd.Fleet, optimizer: torch.optim.Optimizer, local: prsgd.LocalSGD) -> None:
    with local:
        train(fleet, optimizer, local, 5)
        fleet.rows[1, 3] = float("nan")
        train(fleet, optimizer, local, 1)
        assert not bool(fleet.rows[1].isfinite().all())
        train(fleet, optimizer, local, 5)
        assert bool(fleet.rows[1].isfinite().all())
        before = fleet.rows[1].clone()
        train(fleet, optimizer, local, 1)
        assert not torch.equal(fleet.rows[1], before)


def test_a_schedule_is_asked_once_for_all_fragments() -> None:
    """quadratic() goes by the lr: had each fragment asked for itself, all would have landed together ever after."""

    def run(stop: int) -> list[tuple[int, int | None]]:
        fleet = prsgd.Fleet(model("mlp"), 2)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        found: list[tuple[int, int | None]] = []
        made: list[prsgd.LocalSGD] = []

        def begin() -> prsgd.LocalSGD:
            made.append(
                prsgd.LocalSGD(
                    fleet,
                    optimizer,
                    schedule=prsgd.quadratic(0.2, 4),
                    fragments=2,
                    on_record=lambda r: found.append((r.step, r.fragment)),
                )
            )
            return made[-1]

        local = begin().start()
        for step in range(60):
            if step == 19:
                optimizer.param_groups[0]["lr"] = 0.05
            if step == stop:
                state = local.state_dict()
                local.abandon()
                local = begin()
                local.load_state_dict(state)
                local.start()
            train(fleet, optimizer, local, 1)
        local.finish()
        return found

    expected = run(0)
    steps = [step for step, _ in expected if step < 60]
    assert [fragment for _, fragment in expected] == [0, 1] * (len(expected) // 2)
    assert all(before < after for before, after in itertools.pairwise(steps))
    assert steps == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 32, 40, 48, 56]  # rounds of 4, and of 16
    for stop in (18, 19, 20, 23, 30):
        assert run(stop) == expected


def test_a_state_of_another_deal_is_refused() -> None:
    def made(fragments: Any) -> prsgd.LocalSGD:
        fleet = prsgd.Fleet(four_layers(), 2)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        return prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4), fragments=fragments)

    one, other = made(ALTERNATE), made(["[02].*", "[46].*"])
    one.start()
    with pytest.raises(prsgd.CheckpointError, match="the state is of a run with fragments '2"):
        other.load_state_dict(one.state_dict())
