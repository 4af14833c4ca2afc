"""Bad input: an error as early as possible that names the argument, the value and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import prsgd
from tests.problems import CHANGING, Point, batch, itself, model


def sgd(net: nn.Module | prsgd.Fleet) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, y = batch(0, 0)
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()


@pytest.mark.parametrize("period", [0, -3, 1.5, "8", None, True])
def test_period(period: Any) -> None:
    with pytest.raises(ValueError, match=rf"^period must be a whole number >= 1, got {period!r}$"):
        prsgd.every(period)


@pytest.mark.parametrize("overlap", [-1, 0.5, "1", "fast", "Auto", True, None])
def test_overlap(overlap: Any) -> None:
    net = model()
    with pytest.raises(ValueError, match=rf'^overlap must be a whole number >= 0, or "auto", got {overlap!r}$'):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4), overlap=overlap)


@pytest.mark.parametrize(
    ("listener", "message"),
    [
        (5, "must be a function of a Record, got int"),
        (lambda: None, "must take one argument, a Record"),
        (lambda _, __: None, "must take one argument, a Record"),
    ],
)
def test_listeners(listener: Any, message: str) -> None:
    """Before a run, not at its first record."""
    net = model()
    with pytest.raises(ValueError, match=f"^on_record {message}$"):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4), on_record=listener)
    with pytest.raises(ValueError, match=f"^on_record {message}$"):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4)).add_listener(listener)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (prsgd.every(4), "overlap must be at most the period 4, got 5"),
        (prsgd.per_worker([7]), None),
        (prsgd.per_worker([3]), "overlap must be at most the smallest period 3, got 5"),
        (prsgd.per_worker([8, 8]), "periods must have one entry per worker: 1 workers, got 2"),
        *((schedule, None) for schedule in CHANGING.values()),
        (prsgd.once(), None),
    ],
)
def test_overlap_and_schedule(schedule: prsgd.Schedule, message: str | None) -> None:
    net = model()
    if message is None:
        prsgd.LocalSGD(net, sgd(net), schedule=schedule, overlap=5)
        return
    with pytest.raises(ValueError, match=f"^{message}$"):
        prsgd.LocalSGD(net, sgd(net), schedule=schedule, overlap=5)


@pytest.mark.parametrize("periods", [[], "44", 4, [4, 0], [4, 1.5]])
def test_per_worker(periods: Any) -> None:
    with pytest.raises(ValueError, match=r"^periods(\[1\])? must be a "):
        prsgd.per_worker(periods)


@pytest.mark.parametrize(
    ("name", "value"), [("lr_scale", 0.0), ("lr_scale", "1"), ("lr_cap", -1.0), ("lr_cap", float("nan"))]
)
def test_growing(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be a finite number > 0, got {value!r}$"):
        prsgd.growing(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_state": "mean"}, "optimizer_state must be one of 'keep', 'average', 'reset', got 'mean'"),
        ({"optimizer_state": "average", "overlap": 2}, 'overlap must be 0 or 1 with optimizer_state="average", got 2'),
        ({"timeout_seconds": 0}, "timeout_seconds must be a finite number > 0, got 0"),
        ({"comm": prsgd.InProcess(3)}, "comm hosts 3 workers in this process, the model is 1; a Fleet hosts several"),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    net = model()
    with pytest.raises(ValueError, match=f"^{message}$"):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4), **options)


def test_weights() -> None:
    with pytest.raises(ValueError, match="weights must be one of 'uniform', 'steps', 'samples', got 'loss'"):
        prsgd.mean("loss")


def test_weights_by_samples_without_samples() -> None:
    net = model()
    optimizer = sgd(net)
    with (
        pytest.raises(ValueError, match=r'weights="samples" needs local.log\(samples=...\)'),
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1), averaging=prsgd.mean("samples")),
    ):
        step(net, optimizer)


def test_nothing_to_train() -> None:
    net = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="model must have a parameter with requires_grad, Linear has none"):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4))
    with pytest.raises(ValueError, match="model must have a parameter with requires_grad, ReLU has none"):
        prsgd.Fleet(nn.ReLU(), 2)


def test_not_a_model() -> None:
    with pytest.raises(ValueError, match=r"model must be an nn\.Module or a Fleet, got a int"):
        prsgd.LocalSGD(3, sgd(model()), schedule=prsgd.every(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", [8, None, prsgd.every])
def test_not_a_schedule(schedule: Any) -> None:
    net = model()
    with pytest.raises(ValueError, match=r"schedule must be a schedule such as every\(8\), got "):
        prsgd.LocalSGD(net, sgd(net), schedule=schedule)


@pytest.mark.parametrize("averaging", ["mean", prsgd.mean])
def test_not_an_averaging(averaging: Any) -> None:
    net = model()
    with pytest.raises(
        ValueError, match=r"averaging must be one such as mean\(\), or of a class derived from prsgd.Averaging, got "
    ):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4), averaging=averaging)


@pytest.mark.parametrize("optimizer", [None, 3, [], [3], "sgd"])
def test_not_an_optimizer(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be a torch.optim.Optimizer or a list of them, got "):
        prsgd.LocalSGD(model(), optimizer, schedule=prsgd.every(4))


def test_averaged_state_of_an_optimizer_with_closure() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"needs an optimizer whose step\(\) takes no closure, got LBFGS"):
        prsgd.LocalSGD(net, torch.optim.LBFGS(net.parameters()), schedule=prsgd.every(4), optimizer_state="average")


def test_steps_and_calls_inside_consensus() -> None:
    net = model()
    optimizer = sgd(net)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4)) as local:
        step(net, optimizer)
        with local.consensus():
            with pytest.raises(prsgd.UsageError, match=r"optimizer.step\(\) inside consensus\(\)"):
                step(net, optimizer)
            with pytest.raises(prsgd.UsageError, match=r"finish\(\) inside consensus\(\)"):
                local.finish()
        assert local.step == 1


def test_complex_sparse_and_lazy_parameters() -> None:
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ValueError, match="parameters must be dense and real, 'w' is complex"):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4))
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(2, 2).to_sparse())
    with pytest.raises(ValueError, match="parameters must be dense and real, 'w' is sparse"):
        prsgd.LocalSGD(net, sgd(net), schedule=prsgd.every(4))
    lazy = nn.LazyLinear(2)
    with pytest.raises(ValueError, match="parameter 'weight' has no shape yet"):
        prsgd.LocalSGD(lazy, sgd(nn.Linear(1, 1)), schedule=prsgd.every(4))


def test_an_optimizer_of_something_else() -> None:
    net, other = model(), model()
    with pytest.raises(ValueError, match=r"optimizer must own the model's parameters, '0\.weight' is in none"):
        prsgd.LocalSGD(net, sgd(other), schedule=prsgd.every(4))
    fleet = prsgd.Fleet(net, 2)
    with pytest.raises(ValueError, match=r"optimizer must own the model's parameters, '0\.weight' is in none"):
        prsgd.LocalSGD(fleet, sgd(net), schedule=prsgd.every(4))
    both = torch.optim.SGD([*net.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"one of shape \[5, 6\] is not in the model and would never be averaged"):
        prsgd.LocalSGD(net, both, schedule=prsgd.every(4))


def test_two_on_one_optimizer() -> None:
    net = model()
    optimizer = sgd(net)
    other = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4))
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4)):
        with pytest.raises(prsgd.UsageError, match="SGD is hooked by another LocalSGD"):
            prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4))
        with pytest.raises(prsgd.UsageError, match="SGD is hooked by another LocalSGD"):
            other.start()
    other.start()
    other.finish()


def test_before_start_and_after_finish() -> None:
    net = model()
    optimizer = sgd(net)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4))
    for call in (local.finish, local.log, local.state_dict, local.consensus().__enter__):
        with pytest.raises(prsgd.UsageError, match=r"\(\) needs start\(\) first"):
            call()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    step(net, optimizer)  # not hooked: an ordinary step
    assert local.step == 0
    assert not all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    local.start()
    with pytest.raises(prsgd.UsageError, match="started before"):
        local.start()
    with pytest.raises(prsgd.UsageError, match=r"load_state_dict\(\) comes before start\(\)"):
        local.load_state_dict({})
    local.finish()
    for call in (local.finish, local.log, local.consensus().__enter__):
        with pytest.raises(prsgd.UsageError, match=r"\(\) after the run ended"):
            call()
    with pytest.raises(prsgd.UsageError, match="started before"):
        local.start()
    step(net, optimizer)
    assert local.step == 0
    assert local.state_dict()["lanes"][0]["books"]["round"] == 0  # the last checkpoint of a run


def test_an_exception_takes_the_hooks_off() -> None:
    net = model()
    optimizer = sgd(net)
    local = prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1))

    def fail() -> None:
        with local:
            step(net, optimizer)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert local.round == 1
    step(net, optimizer)
    assert local.round == 1
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1)) as again:
        step(net, optimizer)
    assert again.round == 1


def test_closure_with_overlap() -> None:
    net = Point(8.0)
    optimizer = sgd(net)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(0.0)
        loss.backward()
        return float(loss.detach())

    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2), overlap=1):
        with pytest.raises(prsgd.UsageError, match=r"optimizer.step\(closure\) takes its gradient after"):
            optimizer.step(closure)
        with pytest.raises(prsgd.UsageError, match=r"optimizer.step\(closure\) takes its gradient after"):
            optimizer.step(closure=closure)
        assert net.x.item() == 8.0
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(2)) as local:
        optimizer.step(closure)
    assert net.x.item() == pytest.approx(7.2)
    assert local.step == 1


@pytest.mark.parametrize(
    "move", [lambda m: m.float(), lambda m: m.double().half(), lambda m: setattr(m.x, "data", m.x.data.clone())]
)
def test_a_fleet_moved_off_its_rows(move: Any) -> None:
    fleet = prsgd.Fleet(Point(1.0), 2)
    optimizer = sgd(fleet)
    local = prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1)).start()
    move(fleet.modules[1])
    fleet.backward(itself, [0.0, 0.0], [0.0, 0.0])
    with pytest.raises(prsgd.UsageError, match="parameter 'x' of worker 1 was moved off the fleet's rows"):
        optimizer.step()
    with pytest.raises(prsgd.UsageError, match=r"finish\(\) after the run failed"):
        local.finish()


def test_a_run_that_failed_does_not_end_in_silence() -> None:
    net = model()
    optimizer = sgd(net)

    def refuse(_: prsgd.Record) -> None:
        raise KeyError("mine")

    def run() -> None:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1), on_record=refuse):
            step(net, optimizer)
            with pytest.raises(KeyError, match="mine"):
                step(net, optimizer)
            step(net, optimizer)  # not hooked any more

    with pytest.raises(prsgd.UsageError, match=r"finish\(\) after the run failed"):
        run()


def test_parameters_added_during_a_run() -> None:
    net = model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net[2].parameters(), lr=0.1)

    def run() -> None:
        with prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(1)):
            step(net, optimizer)
            net[0].requires_grad_(True)
            optimizer.add_param_group({"params": net[0].parameters()})
            step(net, optimizer)

    with pytest.raises(prsgd.UsageError, match="the optimizer's parameters changed during the run"):
        run()


def test_optimizer_state_that_cannot_be_averaged() -> None:
    net = model()
    optimizer = torch.optim.Adafactor(net.parameters())
    with pytest.raises(ValueError, match=r"Adafactor keeps '.*' of shape .* for a parameter of shape"):
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.every(4), optimizer_state="average")


def test_fleet() -> None:
    for num_workers in (0, -1, 2.0, "2"):
        with pytest.raises(ValueError, match=rf"^num_workers must be a whole number >= 1, got {num_workers!r}$"):
            prsgd.Fleet(model(), num_workers)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_workers must be that of comm, 3, got 2"):
        prsgd.Fleet(model(), 2, comm=prsgd.InProcess(3))
    with pytest.raises(ValueError, match="mode must be one of"):
        prsgd.Fleet(model(), 2, mode="fast")
    with pytest.raises(ValueError, match="a fleet's parameters must have one dtype and device, got"):
        prsgd.Fleet(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double()), 2)
    fleet = prsgd.Fleet(Point(), 2)
    with pytest.raises(ValueError, match="x must have one entry per hosted worker: 2, got 3"):
        fleet.backward(itself, [0.0] * 3, [0.0] * 2)
    with pytest.raises(ValueError, match=r"worker must be hosted here, one of \[0, 1\], got 2"):
        fleet.stop(2)


@pytest.mark.parametrize(("field", "value"), [("steps", 0), ("steps", 2.5), ("seconds", 0.0), ("lr", -1.0)])
def test_a_schedule_of_the_users_own_that_answers_nonsense(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^Round\.{field} must be a "):
        prsgd.Round(**{field: value})


def test_log_for_another_number_of_workers() -> None:
    fleet = prsgd.Fleet(Point(), 2)
    with prsgd.LocalSGD(fleet, sgd(fleet), schedule=prsgd.every(4)) as local:
        with pytest.raises(ValueError, match=r"loss must be one number or one per hosted worker \(2\), got tensor"):
            local.log(loss=torch.zeros(3))
        with pytest.raises(ValueError, match=r"loss must be one number .*, got 'low'"):
            local.log(loss="low")  # type: ignore[arg-type]
        for samples in (-3, 1.5, float("nan")):
            with pytest.raises(ValueError, match=r"samples must be a whole number >= 0, got"):
                local.log(samples=samples)  # type: ignore[arg-type]
