"""optimizer_state="average": what travels is found without touching the user's model or optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import prsgd
from prsgd.replicas.optimizer_state import state_keys
from tests.problems import batch, model

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2]),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01),
}

OPTIMIZERS: dict[str, tuple[Make, list[str]]] = {
    "SGD": (lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), ["momentum_buffer"]),
    "AdamW": (lambda p: AdamW(p, lr=0.1), ["exp_avg", "exp_avg_sq"]),
}


def wrapped_step(optimizer: Optimizer) -> None:
    """What users and libraries do: a function in the place of the bound method."""
    step = optimizer.step
    optimizer.step = lambda *args, **kwargs: step(*args, **kwargs)  # type: ignore[assignment, method-assign]


def everything(fleet: prsgd.Fleet, optimizer: Optimizer) -> list[Any]:
    """All that a step would change, as copies."""
    gradients = [None if p.grad is None else p.grad.clone() for p in fleet.parameters()]
    rest = {k: v for k, v in vars(optimizer).items() if k not in ("step", "state", "param_groups")}
    return [
        fleet.rows.clone(),
        gradients,
        [copy.deepcopy(dict(optimizer.state[p])) if p in optimizer.state else None for p in fleet.parameters()],
        [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        {k: v for k, v in rest.items() if isinstance(v, int | float | str | bool)},
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


def gradients(fleet: prsgd.Fleet, optimizer: Optimizer, step: int) -> None:
    pairs = [batch(w, step) for w in fleet.workers]
    optimizer.zero_grad()
    fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])


def states(fleet: prsgd.Fleet, optimizer: Optimizer, key: str) -> Tensor:
    """(worker, number)"""
    return torch.stack([torch.cat([optimizer.state[p][key].flatten() for p in m.parameters()]) for m in fleet.modules])


def check(make: Make, keys: list[str], before: Callable[[Optimizer], Any], stepped: int) -> None:
    """Every state is untouched by the constructor and really averaged, with the optimizer as ``before`` leaves it."""
    fleets = [prsgd.Fleet(model(), 3) for _ in range(2)]
    alone, averaged = (make(fleet.parameters()) for fleet in fleets)
    kept = before(averaged), before(alone)  # a scheduler that nobody holds is gone, and its step with it
    for t in range(stepped):
        for fleet, optimizer in zip(fleets, (alone, averaged)):
            gradients(fleet, optimizer, t)
            optimizer.step()
    for fleet, optimizer in zip(fleets, (alone, averaged)):
        gradients(fleet, optimizer, stepped)  # gradients are there when the run is made
    was = everything(fleets[1], averaged)
    local = prsgd.LocalSGD(fleets[1], averaged, schedule=prsgd.every(1), optimizer_state="average")
    assert same(everything(fleets[1], averaged), was)
    fleets[0].rows.copy_(fleets[0].rows[0].expand_as(fleets[0].rows))  # what start() does
    with local:
        for fleet, optimizer in zip(fleets, (alone, averaged)):
            gradients(fleet, optimizer, stepped)
            optimizer.step()
        for key in keys:
            own, found = states(fleets[0], alone, key), states(fleets[1], averaged, key)
            assert not torch.equal(own[0], own[1])  # workers differ by themselves
            torch.testing.assert_close(found, own.mean(0).expand_as(found), rtol=1e-12, atol=1e-14)
    del kept


@pytest.mark.parametrize("stepped", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_with_a_scheduler_made_before(scheduler: str, optimizer: str, stepped: int) -> None:
    check(*OPTIMIZERS[optimizer], SCHEDULERS[scheduler], stepped)


def test_every_scheduler_of_torch_is_tried() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_a_step_of_the_users_own(optimizer: str) -> None:
    check(*OPTIMIZERS[optimizer], wrapped_step, 2)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"maximize": True}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_options(optimizer: str, options: dict[str, Any]) -> None:
    _, keys = OPTIMIZERS[optimizer]
    makes: dict[str, Make] = {
        "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, **options),
        "AdamW": lambda p: AdamW(p, lr=0.1, amsgrad=True, **options),
    }
    check(makes[optimizer], [*keys, "max_exp_avg_sq"] if optimizer == "AdamW" else keys, SCHEDULERS["StepLR"], 2)


def test_with_a_learning_rate_that_is_a_tensor() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    check(lambda p: AdamW(p, lr=lr, fused=True), ["exp_avg", "exp_avg_sq"], SCHEDULERS["ExponentialLR"], 2)


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
def test_flags_for_graphs_and_for_meta_learning(flag: str) -> None:
    """A step with them is impossible here, on a CPU or on leaves, but what is kept can be told."""
    parameter = nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter], lr=0.1, **{flag: True})  # type: ignore[arg-type]
    assert state_keys(optimizer) == [["exp_avg", "exp_avg_sq"]]
    assert parameter.tolist() == [1.0] * 4
    assert not optimizer.state


def test_nobodys_hooks_see_the_trial() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = SGD([parameter], lr=0.1, momentum=0.9)
    seen: list[Any] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *args: seen.append(args)),
        register_optimizer_step_post_hook(lambda *args: seen.append(args)),
        optimizer.register_step_pre_hook(lambda *args: seen.append(args)),
        optimizer.register_step_post_hook(lambda *args: seen.append(args)),
    ]
    try:
        assert state_keys(optimizer) == [["momentum_buffer"]]
    finally:
        for handle in handles:
            handle.remove()
    assert seen == []


class Lookahead(Optimizer):
    """Steps another optimizer, and remembers where the parameters were."""

    def __init__(self, base: Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.calls, self.lengths = base, torch.zeros(()), [0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        self.calls += 1
        self.lengths.append(len(self.lengths))
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("slow", torch.clone(p.detach()))


def test_an_optimizer_that_steps_another() -> None:
    parameter = nn.Parameter(torch.ones(4))
    parameter.grad = gradient = torch.full((4,), 2.0)
    base = SGD([parameter], lr=0.1, momentum=0.9)
    outer = Lookahead(base)
    assert state_keys(outer) == [["slow"]]
    assert parameter.tolist() == [1.0] * 4
    assert parameter.grad is gradient
    assert (dict(base.state), dict(outer.state), outer.calls.item(), outer.lengths) == ({}, {}, 0.0, [0])


def test_optimizers_whose_state_cannot_be_told() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"needs an optimizer whose step\(\) takes no closure, got LBFGS"):
        state_keys(torch.optim.LBFGS([parameter]))
    with pytest.raises(ValueError, match=r'^optimizer_state="average" cannot tell what state SparseAdam keeps: its '):
        state_keys(torch.optim.SparseAdam([parameter]))
    with pytest.raises(ValueError, match="needs state of the parameters' shapes, Adafactor keeps 'row_var'"):
        state_keys(torch.optim.Adafactor([parameter]))
