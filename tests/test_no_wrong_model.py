"""Ways that led to a wrong model, an abort or a hang, each closed: what is said here was once not so."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd.averaging.base import SUMS_WIDTH, Sums
from prsgd.core.books import KEPT
from tests.problems import Point, batch, itself, model, take_step
from tests.ranks import run_ranks, try_ranks
from tests.test_averagings import ALL

cross_entropy = nn.functional.cross_entropy
EVERY: dict[str, Any] = {
    **ALL,
    "mean": prsgd.mean(),
    "mean by steps": prsgd.mean("steps"),
    "slowmo": prsgd.outer(1.0, 0.7, False, True),
}
NAN = float("nan")


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def step_of(net: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    x, y = batch(worker, step)
    optimizer.zero_grad()
    cross_entropy(net(x), y).backward()
    optimizer.step()


def rank_all(rank: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """One case after another in the same processes, which take long to start."""
    return [function(rank, *case) for case in cases]


# Looking changes nothing


def looked_at(name: str, overlap: int, num_steps: list[int], looks: set[int]) -> Tensor:
    fleet = prsgd.Fleet(model("batchnorm"), len(num_steps))
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9)
    taken = dict.fromkeys(fleet.workers, 0)
    averaging = copy.deepcopy(EVERY[name])
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), overlap=overlap, averaging=averaging) as local:
        for tick in range(max(num_steps)):
            for worker in take_step(fleet, optimizer, local, taken):
                if taken[worker] == num_steps[worker]:
                    fleet.stop(worker)
            if tick in looks:
                with local.consensus():
                    pass
    buffers = [b.double().flatten() for module in fleet.modules for b in module.buffers()]
    return torch.cat([fleet.rows.flatten(), *buffers])


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("name", EVERY)
def test_looking_never_changes_a_run(name: str, overlap: int) -> None:
    for seed in range(3):
        dice = random.Random(f"{name} {overlap} {seed}")
        even = isinstance(EVERY[name], prsgd.gossip)
        num_steps = [7] * 3 if even else [dice.randint(1, 9) for _ in range(3)]
        looks = {tick for tick in range(9) if dice.random() < 0.5}
        assert torch.equal(looked_at(name, overlap, num_steps, looks), looked_at(name, overlap, num_steps, set()))


def answered(rank: int, name: str, looks: int) -> tuple[Tensor, int]:
    """Worker 0 is done after one step; worker 1 looks."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    averaging = copy.deepcopy(EVERY[name])
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), averaging=averaging, timeout_seconds=60) as local:
        for step in range(1 if rank == 0 else 7):
            step_of(net, optimizer, rank, step)
            for _ in range(looks if step == 4 else 0):
                with local.consensus():
                    pass
    return flat(net), local.round


def test_those_that_answer_a_look_end_with_the_same_model() -> None:
    names = ["outer", "slowmo", "easgd", "mean"]
    cases = list(product(names, (0, 2)))
    one, other = run_ranks(rank_all, 2, answered, cases)
    found = dict(zip(cases, zip(one, other)))
    for name in names:
        first, *rest = (row for looks in (0, 2) for row, _ in found[(name, looks)])
        assert all(torch.equal(row, first) for row in rest), name


# Models that are not finite


def last_one_is_lost(rank: int, name: str, overlap: int) -> Tensor:
    """Worker 0 has no data. Worker 1 turns NaN and runs out of data with that average in flight."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaging = copy.deepcopy(EVERY[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with prsgd.LocalSGD(
            net, optimizer, schedule=prsgd.every(2), overlap=overlap, averaging=averaging, timeout_seconds=60,
            done_timeout_seconds=60,
        ):  # fmt: skip
            for step in range(0 if rank == 0 else 5):
                step_of(net, optimizer, rank, step)
                if step == 2:
                    next(net.parameters()).data.fill_(NAN)
    return flat(net)


def test_a_rescue_at_the_end_of_a_run() -> None:
    cases = list(product(["mean", "outer", "4 bits", "sparse", "bfloat16", "mean by steps"], [1, 2]))
    one, other = run_ranks(rank_all, 2, last_one_is_lost, cases)
    for case, mine, theirs in zip(cases, one, other):
        assert bool(mine.isfinite().all()), case
        assert torch.equal(mine, theirs), case


def rescued(weights: str) -> list[Tensor]:
    """In a fleet: worker 0 has left with nothing new, worker 1 turns NaN."""
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    taken = dict.fromkeys(fleet.workers, 0)
    rows = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2), averaging=prsgd.mean(weights)) as local:
        for _ in range(2):
            take_step(fleet, optimizer, local, taken)
        fleet.stop(0)
        rows.append(fleet.rows[0].clone())
        fleet.rows[1].fill_(NAN)
        take_step(fleet, optimizer, local, taken)
        with pytest.warns(RuntimeWarning, match="replaced by the other workers' mean"):
            take_step(fleet, optimizer, local, taken)
        rows.append(fleet.rows[1].clone())
    return rows


@pytest.mark.parametrize("weights", ["uniform", "steps", "samples"])
def test_a_rescue_whatever_the_weights(weights: str) -> None:
    """Nobody who counts has a finite model: it takes over that of the worker that has left, and not zeros."""
    left, replaced = rescued(weights)
    assert torch.equal(left, replaced)
    assert float(left.abs().sum()) > 0


def test_a_bad_worker_without_a_target_is_an_error() -> None:
    class silent(prsgd.Averaging):
        def launch(self, memory: Any, comm: Any, snap: Tensor, header: prsgd.Header) -> prsgd.Work[prsgd.Landing]:
            sums = header.sums._replace(bad=0.0)
            return prsgd.Done(prsgd.Landing(None, prsgd.Header(sums, header.exact, header.extras), 0))

    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    taken = dict.fromkeys(fleet.workers, 0)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=silent()).start()
    fleet.rows[1].fill_(NAN)
    with pytest.raises(prsgd.DivergedError, match="worker 1: its model is not finite, and the average brought none"):
        take_step(fleet, optimizer, local, taken)
    assert bool(fleet.rows[1].isnan().all())  # as it was, and not zeros


def test_a_look_where_the_next_average_would_rescue() -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    taken = dict.fromkeys(fleet.workers, 0)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4)) as local:
        for _ in range(4):
            take_step(fleet, optimizer, local, taken)
        fleet.stop(0)
        good = fleet.rows[0].clone()
        fleet.rows[1].fill_(NAN)
        with local.consensus() as averaged:
            assert torch.equal(flat(averaged), good)
        assert bool(fleet.rows[1].isnan().all())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fleet.stop(1)
            local.finish()


def test_all_lost_is_an_error_of_a_look_too() -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4)).start()
    fleet.rows.fill_(NAN)
    with pytest.raises(prsgd.DivergedError, match="no worker has a finite model left"), local.consensus():
        pass


def test_an_lr_of_0_leaves_the_outer_momentum_alone() -> None:
    """Warm-up from 0: the first rounds close with lr 0, and nothing becomes NaN."""
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.0)
    averaging = prsgd.outer(lr=1.0, momentum=0.5, nesterov=False, by_inner_lr=True)
    path = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=averaging):
        for lr in (0.0, 0.5, 0.0, 0.5):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
            optimizer.step()
            path.append(fleet.rows[0, 0].item())
    # lr 1/2: (0, 2), mean 1, u = -2, x = 1. lr 0: as it is. lr 1/2: gradients 1 and -3: (1/2, 5/2), mean 3/2, change
    # / lr = -1, u = -1 - 1 = -2, x = 1 + 1/2 * 2 = 2.
    assert path == [0.0, 1.0, 1.0, 2.0]


# Updates and edits that no hook sees


def unseen(rank: int) -> str:
    """An optimizer that updates by methods of its own, as SAM does."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    try:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), timeout_seconds=60):
            for step in range(4):
                x, y = batch(rank, step)
                optimizer.zero_grad()
                cross_entropy(net(x), y).backward()
                with torch.no_grad():
                    for p in net.parameters():
                        p.sub_(0.1 * p.grad)
    except prsgd.UsageError as error:
        return str(error)
    return "nothing was said"


def test_updates_without_a_step_are_an_error() -> None:
    for said in run_ranks(unseen, 2):
        assert said.startswith("the models were changed, but no optimizer.step() was seen, so nothing was averaged")


def test_a_hook_that_drops_gradients_does_not_hide_a_step() -> None:
    """A fleet's step is told by its gradients: they are looked at before the step."""
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    optimizer.register_step_post_hook(lambda opt, *_: opt.zero_grad())
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
        for _ in range(4):
            fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
            optimizer.step()
    assert (local.steps, local.round) == ((4, 4), 2)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("period", "overlap"), [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2)])
def test_edits_between_steps_stay(period: int, overlap: int, in_place: bool) -> None:
    """A mask that is laid on the weights after each step, as pruning does, is on the final model."""
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9)
    taken = dict.fromkeys(fleet.workers, 0)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(period), overlap=overlap) as local:
        for _ in range(6):
            take_step(fleet, optimizer, local, taken)
            for module in fleet.modules:
                weight = module[0].weight
                if in_place:
                    with torch.no_grad():
                        weight[::2] = 0.0
                else:
                    weight.data[::2] = 0.0  # which no version of the tensor tells of
    assert torch.equal(fleet.rows[0], fleet.rows[1])
    weight = fleet.modules[0][0].weight.detach()
    assert float(weight[::2].abs().max()) < 1e-15
    assert float(weight[1::2].abs().min()) > 0


def edited_last(rank: int) -> Tensor:
    """Each worker changes its model in its own way after the last average."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), timeout_seconds=60):
        for step in range(4):
            step_of(net, optimizer, rank, step)
        next(net.parameters()).data.fill_(float(rank))
    return flat(net)


def test_a_run_ends_with_one_model_whatever_was_done_to_it() -> None:
    one, other = run_ranks(edited_last, 2)
    assert torch.equal(one, other)
    assert one[0].item() == 0.5


def alike(rank: int, same: bool) -> list[str]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)):
            for step in range(10):
                step_of(net, optimizer, 0 if same else rank, step)
    return [str(w.message) for w in seen if "alike" in str(w.message)]


def test_workers_that_are_alike_at_every_average_are_said_to_be() -> None:
    """As they are where DistributedDataParallel is left on; said once, by worker 0."""
    (same, different), (nothing, _) = run_ranks(rank_all, 2, alike, [(True,), (False,)])
    assert len(same) == 1
    assert same[0].startswith("rounds 1 and 2: all workers' models were alike to the last bit")
    assert not different
    assert not nothing


@pytest.mark.parametrize(
    ("schedule", "fragments", "steps", "where"),
    [
        (prsgd.every(2), 2, 12, "rounds 1 and 3: "),  # of each fragment in turn
        (prsgd.once(), 1, 16, "round 1: "),
        (prsgd.once(), 1, 15, ""),
        (prsgd.every(32), 1, 64, "round 1: "),
    ],
)
def test_it_is_said_once_and_after_one_long_round(
    schedule: prsgd.Schedule, fragments: int, steps: int, where: str
) -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    x = torch.randn(1, 5, 6, dtype=torch.float64).expand(2, 5, 6)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with prsgd.LocalSGD(fleet, optimizer, schedule=schedule, fragments=fragments):
            for _ in range(steps):
                optimizer.zero_grad()
                fleet.backward(lambda out, y: (out - y).square().mean(), x, torch.zeros(2, 5, 1))
                optimizer.step()
    said = [str(w.message).partition("all workers")[0] for w in seen]
    assert said == ([where] if where else [])


# Several runs, epochs, looking in inference mode


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = model(), nn.Linear(6, 6).double()


def adversaries(rank: int, how: str) -> tuple[list[Tensor], list[int]]:
    """Two networks with an optimizer and a period each, and workers with unequal numbers of batches."""
    torch.manual_seed(3)
    pair = Pair()
    nets = [pair.critic, pair.generator]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    limits: dict[str, Any] = {"timeout_seconds": 60.0, "done_timeout_seconds": 60.0}
    runs = [prsgd.LocalSGD(n, o, schedule=prsgd.every(k), **limits) for n, o, k in zip(nets, optimizers, (2, 3))]

    def train() -> None:
        for step in range(4 + 5 * rank):
            x, y = batch(rank, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            cross_entropy(pair.critic(pair.generator(x)), y).backward()
            for optimizer in optimizers:
                optimizer.step()

    if how == "together":
        with prsgd.together(*runs):
            train()
    else:
        for run in runs:
            run.start()
        train()
        prsgd.finish(*runs)
    return [flat(net) for net in nets], [run.round for run in runs]


def test_two_runs_in_one_loop_end_together() -> None:
    one, other = run_ranks(rank_all, 2, adversaries, [("together",), ("finish",)])
    for (mine, rounds), (theirs, same) in zip(one, other):
        assert rounds == same == [5, 3]
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs))


def test_runs_that_end_together_need_communicators_of_their_own() -> None:
    with pytest.raises(ValueError, match=r"finish\(\) takes runs of LocalSGD, got int"):
        prsgd.finish(3)  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match=r"together\(\) takes runs of LocalSGD, got Linear"),
        prsgd.together(nn.Linear(1, 1)),  # type: ignore[arg-type]
    ):
        raise AssertionError("it was started")
    with pytest.raises(ZeroDivisionError), prsgd.together(*(walk_run() for _ in range(2))) as runs:
        raise ZeroDivisionError
    for run in runs:
        with pytest.raises(prsgd.UsageError, match="after the run failed"):
            run.finish()


def walk_run() -> prsgd.LocalSGD:
    net = Point()
    return prsgd.LocalSGD(net, torch.optim.SGD(net.parameters(), lr=0.5), schedule=prsgd.every(2))


def one_after_the_other(rank: int) -> None:
    net, other = model(), model()
    optimizers = [torch.optim.SGD(n.parameters(), lr=0.1) for n in (net, other)]
    limits: dict[str, Any] = {"timeout_seconds": 4.0, "done_timeout_seconds": 60.0}
    with (
        prsgd.LocalSGD(net, optimizers[0], schedule=prsgd.every(2), **limits),
        prsgd.LocalSGD(other, optimizers[1], schedule=prsgd.every(2), **limits),
    ):
        for step in range(2 + 4 * rank):
            for n, optimizer in zip((net, other), optimizers):
                step_of(n, optimizer, rank, step)


def test_runs_that_end_one_after_the_other_say_what_to_do() -> None:
    outcomes = try_ranks(one_after_the_other, 2)
    assert all(kind == "error" for kind, _ in outcomes), outcomes
    assert any("AverageTimeout" in text and "`with prsgd.together(a, b):`" in text for _, text in outcomes), outcomes


def epochs(rank: int, overlap: int, hosted: bool) -> tuple[list[Tensor], list[Tensor], int, list[int]]:
    """Unequal shards, and a look after each epoch."""
    looks, ends = [], []
    net = model("batchnorm")
    fleet = prsgd.Fleet(net, 2) if hosted else None
    optimizer = torch.optim.SGD((net if fleet is None else fleet).parameters(), lr=0.1, momentum=0.9)
    with prsgd.LocalSGD(fleet or net, optimizer, schedule=prsgd.every(2), overlap=overlap) as local:
        taken = {0: 0, 1: 0}
        for epoch in range(3):
            with local.epoch():
                if fleet is None:
                    for _ in range(3 + 2 * rank + epoch):
                        step_of(net, optimizer, rank, taken[rank])
                        taken[rank] += 1
                else:
                    left = {w: 3 + 2 * w + epoch for w in (0, 1)}
                    while fleet.active:
                        for w in take_step(fleet, optimizer, local, taken):
                            left[w] -= 1
                            if not left[w]:
                                fleet.stop(w)
            ends.append(flat(net) if fleet is None else fleet.rows[rank].clone())
            with local.consensus() as averaged:
                looks.append(flat(averaged))
    return looks, ends, local.round, [record.step for record in local.records]


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_epoch_ends_for_all_at_once(overlap: int) -> None:
    one, other = run_ranks(rank_all, 2, epochs, [(overlap, False)])
    (looks, ends, rounds, steps), (same_looks, same_ends, same_rounds, _) = one[0], other[0]
    fleet_looks, fleet_ends, fleet_rounds, fleet_steps = epochs(1, overlap, True)
    assert rounds == same_rounds == fleet_rounds
    assert steps[-1] == 12
    assert fleet_steps[-1] == 18
    for mine, theirs, its, at_end, theirs_end, its_end in zip(
        looks, same_looks, fleet_looks, ends, same_ends, fleet_ends, strict=True
    ):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, its)
        assert torch.equal(mine, at_end)
        assert torch.equal(at_end, theirs_end)
        assert torch.equal(at_end, its_end)


def test_a_look_in_inference_mode_before_the_first_average() -> None:
    net = model("batchnorm")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for overlap in (0, 1):
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), overlap=overlap) as local:
            for step in range(6):
                step_of(net, optimizer, 0, step)
                with torch.inference_mode(), local.consensus() as averaged:
                    averaged.eval()
                    averaged(batch(0, step)[0])
        assert local.round == 2


# States


def test_no_state_inside_a_look() -> None:
    fleet = prsgd.Fleet(model(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4)).start()
    inside = pytest.raises(prsgd.UsageError, match=r"state_dict\(\) inside consensus\(\)")
    with local.consensus(), inside:
        local.state_dict()


def saved_by_step(rank: int, by: str) -> tuple[list[str], int]:
    """One step of worker 1 is skipped; each worker saves by its own step, or by the averages launched."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    at = -1
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), overlap=1) as local:
            for step in range(12):
                if rank == 1 and step == 1:
                    continue
                before = local.launched
                step_of(net, optimizer, rank, step)
                if (step == 6) if by == "step" else (before < 3 <= local.launched):
                    local.state_dict()
                    at = local.launched
    return [str(w.message) for w in seen if "saved a state" in str(w.message)], at


def test_states_that_do_not_fit_are_told_of_when_they_are_saved() -> None:
    one, other = run_ranks(rank_all, 2, saved_by_step, [("step",), ("launched",)])
    for (said, _), (nothing, at) in (one, other):
        assert any("since the last average (1 times here, 0.5 in the mean)" in text for text in said)
        assert not nothing
        assert at == 3


def started(**options: Any) -> prsgd.LocalSGD:
    fleet = prsgd.Fleet(options.pop("net", model()), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    return prsgd.LocalSGD(fleet, optimizer, **{"schedule": prsgd.every(4), **options})


def test_another_set_up_is_named() -> None:
    state = started(overlap=1, averaging=prsgd.outer(0.7)).start().state_dict()
    with pytest.raises(prsgd.CheckpointError, match="the state is of a run with overlap 1, this one has 2"):
        started(overlap=2, averaging=prsgd.outer(0.7)).load_state_dict(state)
    with pytest.raises(prsgd.CheckpointError, match="with optimizer state 'keep', this one has 'average'"):
        started(overlap=1, averaging=prsgd.outer(0.7), optimizer_state="average").load_state_dict(state)
    with pytest.raises(prsgd.CheckpointError, match=r"with num parameters 53, this one has 3"):
        started(net=nn.Linear(2, 1).double(), overlap=1, averaging=prsgd.outer(0.7)).load_state_dict(state)
    with pytest.warns(
        RuntimeWarning, match=r"began with the schedule every\(period=4\) and goes on with every\(period=8"
    ):
        started(schedule=prsgd.every(8), overlap=1, averaging=prsgd.outer(0.7)).load_state_dict(state)
    with pytest.warns(
        RuntimeWarning, match=r"began with the averaging outer\(lr=0.7,.* and goes on with outer\(lr=0.5"
    ):
        started(overlap=1, averaging=prsgd.outer(0.5)).load_state_dict(state)


@pytest.mark.parametrize("name", ["mean", "outer", "sparse", "bfloat16", "easgd"])
def test_a_damaged_state_is_one_line(name: str) -> None:
    """Whatever is taken away or replaced by something else, at every place."""
    averaging = copy.deepcopy(EVERY[name])
    local = started(overlap=1, averaging=averaging)
    optimizer = local._hooks.optimizers[0]
    fleet = local._host._fleet  # type: ignore[attr-defined]
    taken = dict.fromkeys(fleet.workers, 0)
    local.start()
    for _ in range(7):
        take_step(fleet, optimizer, local, taken)
    whole = local.state_dict()
    places = list(_places(whole))
    assert len(places) > 60
    refused = 0
    for place in places:
        for value in (None, "gone", torch.zeros(2)):
            state = copy.deepcopy(whole)
            inside: Any = state
            for key in place[:-1]:
                inside = inside[key]
            if value is None and isinstance(inside, dict):
                del inside[place[-1]]
            else:
                inside[place[-1]] = value
            again = started(overlap=1, averaging=averaging)
            said = refusal(again, state)
            if said:
                refused += 1
                assert "\n" not in said
                again.load_state_dict(whole)  # and nothing of it was taken over
                assert again.launched == local.launched
    assert refused > 50


def refusal(local: prsgd.LocalSGD, state: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            local.load_state_dict(state)
        except prsgd.CheckpointError as error:
            return str(error)
    return ""


LISTS = ("workers", "to_land", "lanes", "paces", "accounts", "pages", "waits", "counts", "bad")


def _places(state: Any, *before: Any) -> Any:
    """The keys that lead to each entry."""
    for key in state if isinstance(state, dict) else range(len(state)):
        yield (*before, key)
        if isinstance(state[key], dict) or (isinstance(state[key], list) and key in LISTS):
            yield from _places(state[key], *before, key)


# Numbers


def test_samples_are_counted_exactly() -> None:
    """More of them than float32 counts."""
    fleet = prsgd.Fleet(nn.Linear(3, 1), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)) as local:
        for step in range(2):
            optimizer.zero_grad()
            fleet.backward(nn.functional.mse_loss, torch.randn(2, 4, 3), torch.randn(2, 4, 1))
            local.log(samples=[16_777_217 + step, 12_345_678_901])
            optimizer.step()
    assert local.records[0].samples == 2 * 16_777_217 + 1 + 2 * 12_345_678_901
    assert local.totals.samples == local.records[0].samples


def test_sums_travel_and_come_back() -> None:
    numbers = [Sums(weight=2.0, drift=0.5, samples=n) for n in (0, 4095, 4096, 2**24 + 1, 2**35 + 7)]
    packed = torch.tensor([sums.packed() for sums in numbers], dtype=torch.float32)
    assert packed.shape == (5, SUMS_WIDTH)
    assert [Sums.unpacked(row.tolist()) for row in packed] == numbers
    assert Sums.unpacked(packed.sum(dim=0).tolist()).samples == sum(sums.samples for sums in numbers)


def test_records_are_bounded_and_totals_are_not() -> None:
    seen: list[int] = []
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=1e-3)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), on_record=lambda r: seen.append(r.round))
    assert local._ledger.records.maxlen == KEPT
    local._ledger.records = type(local._ledger.records)(maxlen=5)
    with local:
        for _ in range(12):
            optimizer.zero_grad()
            fleet.backward(itself, [0.0, 4.0], [0.0, 4.0])
            optimizer.step()
    assert seen == list(range(1, 13))
    assert [record.round for record in local.records] == [8, 9, 10, 11, 12]
    assert local.totals.rounds == 12
    assert local.totals.bytes_sent == 12 * local.records[0].bytes_sent


def test_half_precision_rounds_as_ranks_do() -> None:
    """Each worker rounds its own change: 1 + 2^-9 is 1 in bfloat16, for each of the two."""
    change = torch.tensor([[1 + 2.0**-9], [1 + 2.0**-9]], dtype=torch.float64)
    averaging = prsgd.mean(dtype=torch.bfloat16)
    header = prsgd.Header(
        Sums(workers=2), torch.zeros(0, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.float64),
        counts=(True, True), bad=(False, False), steps=(1, 1), samples=(1, 1),
    )  # fmt: skip
    memory = averaging.init(torch.zeros(1, dtype=torch.float64), 2)
    landing = averaging.launch(memory, prsgd.InProcess(2), change, header).wait()
    assert landing.target is not None
    assert landing.target.tolist() == [1.0]


def test_float16_loses_nothing_that_is_small_or_large() -> None:
    """1e-9 is 0 in float16, and 1e6 more than it holds: both arrive, later."""
    averaging = prsgd.mean(dtype=torch.float16)
    point = torch.zeros(2, dtype=torch.float64)
    header = prsgd.Header(
        Sums(workers=2), torch.zeros(0, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.float64),
        counts=(True, True), bad=(False, False), steps=(1, 1), samples=(1, 1),
    )  # fmt: skip
    memory = averaging.init(point, 2)
    comm = prsgd.InProcess(2)
    for average in range(100):
        change = torch.tensor([1e-9, 1e6 if average == 0 else 0.0], dtype=torch.float64)
        landing = averaging.launch(memory, comm, (memory["point"] + change).expand(2, -1).clone(), header).wait()
        assert landing.memory is not None
        memory = landing.memory
    kept = memory["residuals"][0]
    torch.testing.assert_close(
        memory["point"] + kept, torch.tensor([1e-7, 1e6], dtype=torch.float64), rtol=1e-9, atol=0
    )
    assert float(kept[0]) < 1e-7
    assert abs(float(kept[1])) < 1e3


# Gossip


def skipped_once(rank: int, skips: bool) -> int:
    """Worker 1 skips a step, as GradScaler does: a gradient that is not finite is dropped. Gradients that are computed
    for something else, and others' numbers of them, do not matter."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    averaging = prsgd.gossip("complete")
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), averaging=averaging, timeout_seconds=60) as local:
        for step in range(20):
            x, y = batch(rank, step)
            for _ in range(1 + (step == 1 and rank)):
                optimizer.zero_grad()
                cross_entropy(net(x), y).backward()
            if skips and rank == 1 and step == 5:
                (cross_entropy(net(x), y) * float("inf")).backward()
            else:
                optimizer.step()
    return local.round


def test_gossip_tells_of_a_skipped_step_at_the_next_average() -> None:
    outcomes = try_ranks(skipped_once, 2, True)
    assert all(kind == "error" for kind, _ in outcomes), outcomes
    assert any("worker 1 skipped 1 steps since the last average (as GradScaler does)" in text for _, text in outcomes)
    assert all("round 3, worker" in text for _, text in outcomes)
    assert try_ranks(skipped_once, 2, False) == [("result", 11)] * 2  # and one that ends the run


def leaves(rank: int, averaging: Any) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), averaging=averaging, timeout_seconds=60):
        for step in range(50):
            step_of(net, optimizer, rank, step)
            if rank == 1 and step == 4:
                raise ValueError("enough")


@pytest.mark.parametrize("averaging", [prsgd.gossip("complete"), prsgd.mean()], ids=["gossip", "mean"])
def test_a_lost_peer_is_told_of_with_round_and_worker(averaging: Any) -> None:
    outcomes = try_ranks(leaves, 2, averaging)
    assert outcomes[1] == ("error", "ValueError: enough")
    kind, text = outcomes[0]
    assert kind == "error"
    assert text.startswith("PeerError: round 3, worker 0: ")


def alone(rank: int) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), timeout_seconds=60) as local:
        for step in range(8):
            step_of(net, optimizer, rank, step)
            if rank == 0 and step == 5:
                with local.consensus():
                    pass


def test_a_look_of_worker_0_alone_names_the_remedies() -> None:
    for kind, text in try_ranks(alone, 2):
        assert kind == "error"
        assert (
            "1 of 2 workers called consensus() while 1 averaged: every worker must call it, not worker 0 alone" in text
        )
        assert "by local.launched, pad the sampler, or put each epoch into `with local.epoch():`" in text
