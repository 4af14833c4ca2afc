"""A period that chooses itself: the gradients' noise and the rule by hand, and ``auto()`` with every other part."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import prsgd
from prsgd.core.noise import EVERY
from prsgd.lab.config import Config
from prsgd.lab.methods import METHODS, Method, Parts
from prsgd.records import Record
from prsgd.schedules.auto import OLD
from prsgd.schedules.base import Learns
from tests.problems import Point, batch, model, train_fleet, train_model
from tests.ranks import run_ranks, try_ranks
from tests.test_resume import run as stopped_run
from tests.test_resume import same

cross_entropy = nn.functional.cross_entropy
SGD, Adam = torch.optim.SGD, torch.optim.Adam
FIRST, SECOND = [1.0, 2.0], [3.0, -1.0]
"""Two gradients: half the squared length of their difference is (2^2 + 3^2) / 2 = 6.5."""
NEARLY = pytest.approx(6.5, rel=1e-14)


# The noise of gradients, by hand


class Numbers(nn.Module):
    """Parameters ``a``, ``b``, … of two numbers each, whose gradients a test writes by hand."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for name in "abcd"[:count]:
            self.register_parameter(name, nn.Parameter(torch.zeros(2, dtype=torch.float64)))


def noise_of(
    net: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    gradients: Iterable[Sequence[Sequence[float] | None]],
    step: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer.step(),
    **options: Any,
) -> list[float | None]:
    """What the records of one worker's run say, whose parameters get these gradients, step by step."""
    with prsgd.LocalSGD(net, list(optimizers), schedule=prsgd.auto(), **options) as local:
        for of_step in gradients:
            for p, grad in zip(net.parameters(), of_step, strict=True):
                p.grad = None if grad is None else torch.tensor(grad, dtype=p.dtype)
            for optimizer in optimizers:
                step(optimizer)
    return [record.noise for record in local.records]


def test_noise_of_sgd_is_half_the_squared_difference_of_two_gradients() -> None:
    net = Numbers(1)
    assert noise_of(net, [SGD(net.parameters(), lr=0.3)], [[FIRST], [SECOND]]) == [None, NEARLY]


def test_a_look_takes_two_steps_of_sixteen() -> None:
    net = Numbers(1)
    gradients = [[[float(t), 0.0]] for t in (0, 1, *range(100, 114), 50, 53, 7, 9)]
    found = noise_of(net, [SGD(net.parameters(), lr=0.1)], gradients)
    assert len(found) == EVERY + 4
    assert {t: noise for t, noise in enumerate(found) if noise is not None} == {1: 0.5, EVERY + 1: 4.5}


def test_noise_with_momentum_is_what_a_gradient_moves_in_the_end() -> None:
    for options, weight in (
        ({"momentum": 0.75}, 4.0),
        ({"momentum": 0.75, "dampening": 0.5}, 2.0),
        ({"momentum": 0.75, "nesterov": True}, 4.0),
        ({"dampening": 0.5}, 1.0),  # without momentum torch does not dampen
    ):
        net = Numbers(1)
        found = noise_of(net, [SGD(net.parameters(), lr=0.3, **options)], [[FIRST], [SECOND]])  # type: ignore[arg-type]
        assert found[1] == pytest.approx(6.5 * weight**2, rel=1e-14), options


def test_noise_of_groups_counts_by_their_lr() -> None:
    net = Numbers(2)
    a, b = net.parameters()
    groups = [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.3, "momentum": 0.5}]
    found = noise_of(net, [SGD(groups, lr=1.0)], [[FIRST, FIRST], [SECOND, [1.0, 0.0]]])
    assert found[1] == pytest.approx(6.5 + 2.0 * (3 * 2) ** 2, rel=1e-14)


def squares(steps: int, past: float = 0.999) -> list[float]:
    """Adam's mean squares, bias corrected, after so many steps with the first gradient and one with the second."""
    firsts, seconds = ([x**2 for x in grad] for grad in (FIRST, SECOND))
    before = 1 - past**steps
    return [(past * before * a + (1 - past) * b) / (1 - past ** (steps + 1)) for a, b in zip(firsts, seconds)]


def by_adam(steps: int, eps: float) -> float:
    """Half the squared difference of the two gradients, divided as Adam is about to."""
    return sum((d / (math.sqrt(v) + eps)) ** 2 for d, v in zip((2, 3), squares(steps))) / 2


@pytest.mark.parametrize("kind", [Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_noise_of_adam_is_divided_as_its_gradients_are(kind: Any) -> None:
    net = Numbers(1)
    found = noise_of(net, [kind(net.parameters(), lr=0.1, eps=1e-3)], [[FIRST], [SECOND]])
    assert found[1] == pytest.approx(by_adam(1, 1e-3), rel=1e-9)
    optimizer = kind(net.parameters(), lr=0.1, eps=1e-3)
    found = noise_of(net, [optimizer], [[FIRST]] * EVERY + [[FIRST], [SECOND]])
    assert found[-1] == pytest.approx(by_adam(EVERY + 1, 1e-3), rel=1e-9)


def test_noise_of_amsgrad_is_divided_by_the_largest_mean_square() -> None:
    net = Numbers(1)
    optimizer = Adam(net.parameters(), lr=0.1, betas=(0.9, 0.5), amsgrad=True)
    found = noise_of(net, [optimizer], [*[[FIRST]] * 2, *[[[0.0, 0.0]]] * (EVERY - 2), [FIRST], [SECOND]])
    # After two steps 3/4 of the first gradient's square, (0.75, 3). Much later a quarter of that square and half of the
    # second's make (0.25 + 4.5, 1 + 0.5): the first number is larger than ever.
    assert found[-1] == pytest.approx((4 / 4.75 + 9 / 3) / 2, rel=1e-4)


def test_noise_of_a_parameter_that_is_seldom_used() -> None:
    """Adam divides its first gradient by itself; without that one in the mean square it would be divided by eps."""
    net = Numbers(1)
    gradients = [[[0.0, 1.0]]] * (EVERY + 1) + [[[1.0, 1.0]]]
    found = noise_of(net, [Adam(net.parameters(), lr=0.1)], gradients)
    assert found[-1] == pytest.approx((1 - 0.999 ** (EVERY + 2)) / 0.001 / 2, rel=1e-5)


def test_noise_of_an_adam_that_starts_afresh_at_every_average() -> None:
    """It never has a mean square to look at: then that of the two gradients is taken, as Adam's own would be."""
    net = Numbers(1)
    found = noise_of(net, [Adam(net.parameters(), lr=0.1, eps=1e-9)], [[FIRST], [SECOND]], optimizer_state="reset")
    assert found[1] == pytest.approx((4 / 5 + 9 / 2.5) / 2, rel=1e-6)


def test_noise_before_adam_has_stepped_once_is_none() -> None:
    net = Numbers(1)
    assert noise_of(net, [Adam(net.parameters(), lr=0.1)], [[FIRST]]) == [None]


def test_noise_where_a_parameter_has_no_gradient() -> None:
    for optimizer in (SGD, Adam):
        net, alone = Numbers(2), Numbers(1)
        both = noise_of(net, [optimizer(net.parameters(), lr=0.1)], [[FIRST, None], [SECOND, None]])
        assert both[1] is not None
        assert both == noise_of(alone, [optimizer(alone.parameters(), lr=0.1)], [[FIRST], [SECOND]])
    net = Numbers(2)  # a part that is used now and then scatters between its gradient and none
    assert noise_of(net, [SGD(net.parameters(), lr=0.1)], [[FIRST, None], [SECOND, FIRST]])[1] == pytest.approx(
        6.5 + 2.5, rel=1e-14
    )
    net = Numbers(2)
    assert noise_of(net, [SGD(net.parameters(), lr=0.1)], [[FIRST, FIRST], [SECOND, None]])[1] == pytest.approx(
        6.5 + 2.5, rel=1e-14
    )


def test_noise_of_a_sparse_gradient() -> None:
    net = nn.Embedding(3, 2, sparse=True, dtype=torch.float64)
    optimizer = SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.auto()) as local:
        for rows in ([0, 0, 1], [0, 2]):  # the gradients of a sum are the counts, in both columns
            optimizer.zero_grad()
            net(torch.tensor(rows)).sum().backward()
            optimizer.step()
    assert local.records[1].noise == pytest.approx(2 * (1 + 1 + 1) / 2, rel=1e-14)


@pytest.mark.filterwarnings("ignore:worker 1. its model was not finite")
def test_noise_that_is_not_finite_is_left_out() -> None:
    fleet = prsgd.Fleet(Point(), 2)
    optimizer = SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.auto()) as local:
        for grads in ([1.0, 1.0], [3.0, math.nan]):
            for p, grad in zip(fleet.parameters(), grads, strict=True):
                p.grad = torch.tensor([grad], dtype=torch.float64)
            optimizer.step()
    assert [record.noise for record in local.records] == [None, 2.0]
    net = Numbers(1)
    huge = [1e300, 0.0]  # its square is not finite
    assert noise_of(net, [SGD(net.parameters(), lr=1e-300)], [[FIRST], [huge]]) == [None, None]


def test_noise_that_only_the_header_cannot_hold_is_left_out() -> None:
    net = Numbers(1).float()
    assert noise_of(net, [SGD(net.parameters(), lr=1e-30)], [[[1e19, 1e19]], [[-1e19, -1e19]]]) == [None, None]


@pytest.mark.parametrize("fused", [True, False])
def test_noise_under_a_grad_scaler_whose_scale_changes(fused: bool) -> None:
    """A fused optimizer divides by the scale itself; else GradScaler does, and for each optimizer when it steps."""
    net = Numbers(2)
    a, b = net.parameters()
    optimizers = [SGD([a], lr=0.1, fused=fused), Adam([b], lr=0.2, eps=1e-9, fused=fused)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with prsgd.LocalSGD(net, optimizers, schedule=prsgd.auto()) as local:
        for grads in ((FIRST, FIRST), (SECOND, SECOND)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            parts = [(p * torch.tensor(g, dtype=p.dtype)).sum() for p, g in zip(net.parameters(), grads)]
            scaler.scale(torch.stack(parts).sum()).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 32.0
    assert local.records[1].noise == pytest.approx(6.5 + 2**2 * by_adam(1, 1e-9), rel=1e-6)


def test_a_step_that_grad_scaler_skips_is_looked_at_again() -> None:
    net = Numbers(1)
    optimizer = SGD(net.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.auto()) as local:
        for grad in (FIRST, [math.inf, 0.0], SECOND):
            optimizer.zero_grad()
            for p in net.parameters():
                scaler.scale((p * torch.tensor(grad, dtype=p.dtype)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert local.step == 2
    assert [record.noise for record in local.records] == [None, NEARLY]


def test_noise_of_several_optimizers_is_in_units_of_the_first_ones_lr() -> None:
    net = Numbers(3)
    a, b, c = net.parameters()
    optimizers = [SGD([b], lr=0.1), Adam([c], lr=0.2, eps=1e-9), SGD([a], lr=0.4, momentum=0.5)]
    found = noise_of(net, optimizers, [[FIRST, FIRST, FIRST], [SECOND, SECOND, SECOND]])
    assert found[1] == pytest.approx(6.5 * (4 * 2) ** 2 + 6.5 + 2**2 * by_adam(1, 1e-9), rel=1e-6)


def test_an_optimizer_that_steps_now_and_then_has_no_say() -> None:
    """Two looks in a row are needed of every optimizer: what is left out would count as if it did not scatter."""
    net = Numbers(2)
    a, b = net.parameters()
    often, seldom = SGD([a], lr=0.1), SGD([b], lr=0.1)
    with prsgd.LocalSGD(net, [seldom, often], schedule=prsgd.auto()) as local:
        for t in range(EVERY + 2):
            a.grad, b.grad = (torch.tensor(g, dtype=a.dtype) for g in (FIRST, SECOND))
            if t % 2 == 0:
                seldom.step()
            often.step()
    assert [record.noise for record in local.records] == [None] * (EVERY + 2)


def _two_momenta(a: Tensor, b: Tensor) -> list[torch.optim.Optimizer]:
    groups: list[dict[str, Any]] = [{"params": [a], "momentum": 0.5}, {"params": [b]}]
    return [SGD(groups, lr=0.1)]


@pytest.mark.parametrize(
    ("make", "momentum"),
    [
        (lambda a, b: [SGD([a, b], lr=0.1)], 0.0),
        (lambda a, b: [SGD([a, b], lr=0.1, momentum=0.75, dampening=0.5)], 0.75),
        (lambda a, b: [SGD([a], lr=0.1, momentum=0.5), SGD([b], lr=0.3, momentum=0.5)], 0.5),
        (_two_momenta, None),
        (lambda a, b: [SGD([a, b], lr=0.1, momentum=0.5, nesterov=True)], None),
        (lambda a, b: [Adam([a, b], lr=0.1)], None),
        (lambda a, b: [SGD([a], lr=0.1, momentum=0.9), Adam([b], lr=0.1)], None),
    ],
)
def test_the_momentum_is_told_where_it_is_one_number(make: Any, momentum: float | None) -> None:
    net = Numbers(2)
    optimizers = make(*net.parameters())
    with prsgd.LocalSGD(net, optimizers, schedule=prsgd.auto()) as local:
        for gradient in (FIRST, SECOND):
            for p in net.parameters():
                p.grad = torch.tensor(gradient, dtype=p.dtype)
            for optimizer in optimizers:
                optimizer.step()
    assert [record.momentum for record in local.records] == [None, momentum]


class ByGroup(torch.optim.Adam):
    """Of Adam's kind, with the count of steps in the group, as some optimizers have it, and no largest one yet."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                self.state[p].setdefault("exp_avg_sq", torch.zeros_like(p)).addcmul_(p.grad, p.grad, value=0.001)
                self.state[p].setdefault("max_exp_avg_sq", None)


def test_noise_of_an_optimizer_of_adams_kind_that_counts_steps_elsewhere() -> None:
    net = Numbers(1)
    found = noise_of(net, [ByGroup(net.parameters(), lr=0.1, eps=1e-3)], [[FIRST], [SECOND]])
    roots = [math.sqrt((a * a + b * b) / 2) + 1e-3 for a, b in zip(FIRST, SECOND)]
    assert found[1] == pytest.approx(sum(((a - b) / r) ** 2 for a, b, r in zip(FIRST, SECOND, roots)) / 2, rel=1e-9)


def test_noise_at_lr_0_is_unknown() -> None:
    net = Numbers(2)
    assert noise_of(net, [SGD(net.parameters(), lr=0.0)], [[FIRST, FIRST], [SECOND, SECOND]])[1] is None
    net = Numbers(2)  # a group that is frozen moves nothing
    a, b = net.parameters()
    groups = [{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.0}]
    assert noise_of(net, [SGD(groups)], [[FIRST, FIRST], [SECOND, SECOND]])[1] == NEARLY


def test_groups_that_train_beside_a_first_one_that_does_not_are_told_of() -> None:
    """The schedule goes by the first group's lr: with 0 it would stay at period 1 for ever, without a word."""
    net = Numbers(2)
    a, b = net.parameters()
    groups = [{"params": [a], "lr": 0.0}, {"params": [b], "lr": 0.1}]
    with pytest.warns(RuntimeWarning, match="the first parameter group's lr is 0, and others train"):
        assert noise_of(net, [SGD(groups)], [[FIRST, FIRST], [SECOND, SECOND]])[1] is None


def test_a_closure_takes_gradients_too_late_to_be_looked_at() -> None:
    net = nn.Linear(1, 1)
    optimizer = SGD(net.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = net(torch.ones(1, 1)).sum()
        loss.backward()
        return float(loss)

    with (
        pytest.raises(prsgd.UsageError, match=r"after the schedule would look at it: use one that does not"),
        prsgd.LocalSGD(net, optimizer, schedule=prsgd.auto()),
    ):
        optimizer.step(closure)


@pytest.mark.parametrize("kind", [torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD])
def test_an_optimizer_of_another_kind_is_named(kind: Any) -> None:
    net = Numbers(1)
    with pytest.warns(RuntimeWarning, match=rf"not for {kind.__name__}: auto\(\) learns nothing"):
        found = noise_of(net, [kind(net.parameters(), lr=0.1)], [[FIRST], [SECOND]])
    assert found == [None, None]


# A quadratic with noise: worker i's gradient is x - b, with b drawn anew each step around the worker's own centre


class Bowl(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.full((8,), 3.0, dtype=torch.float64))

    def forward(self, b: Tensor) -> Tensor:
        return ((self.x - b) ** 2).sum() / 2


def loss_itself(output: Tensor, _: Tensor) -> Tensor:
    return output


def drawn(worker: int, step: int, *, apart: float, noise: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * worker + step)
    own = apart * torch.randn(8, generator=torch.Generator().manual_seed(worker), dtype=torch.float64)
    return own + noise * torch.randn(8, generator=generator, dtype=torch.float64)


def descend(
    n: int,
    lrs: Sequence[float],
    *,
    apart: float = 0.0,
    noise: float = 1.0,
    momentum: float = 0.0,
    kind: str = "sgd",
    nan_at: int = -1,
    **options: Any,
) -> tuple[Tensor, prsgd.LocalSGD]:
    """This process's share of n workers, by an lr that is set before each step; the model and the run."""
    fleet = prsgd.Fleet(Bowl(), n)
    params = list(fleet.parameters())
    optimizer: torch.optim.Optimizer = (
        SGD(params, lr=lrs[0], momentum=momentum) if kind == "sgd" else torch.optim.AdamW(params, lr=lrs[0])
    )
    with prsgd.LocalSGD(fleet, optimizer, **options) as local:
        for t, lr in enumerate(lrs):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            x = torch.stack([drawn(w, t, apart=apart, noise=noise) for w in fleet.workers])
            losses = fleet.backward(loss_itself, x, x)
            local.log(loss=losses, samples=[1 + w for w in fleet.workers])
            if t == nan_at and fleet.workers[-1] == n - 1:
                params[-1].data.fill_(math.nan)
            optimizer.step()
    return fleet.rows.clone(), local


GENEROUS = prsgd.auto(largest_lr=0.5)
"""Rounds of some steps at an lr of 0.05."""


def said(local: prsgd.LocalSGD) -> list[tuple[Any, ...]]:
    """What records say of the rule."""
    return [(r.round, r.step, r.period, r.workers, r.drift, r.noise, r.reason) for r in local.records]


@dataclass(frozen=True)
class Replayed(prsgd.Schedule):
    """Rounds of these periods, the last of which goes on."""

    periods: tuple[int, ...]

    def open(self, now: prsgd.Now) -> prsgd.Round:
        return prsgd.Round(steps=self.periods[min(now.round, len(self.periods)) - 1])

    def check(self, num_workers: int, overlap: int) -> None:
        pass


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_looking_at_gradients_changes_nothing(kind: str, overlap: int) -> None:
    lrs = [0.05] * 60
    rows, local = descend(3, lrs, kind=kind, overlap=overlap, schedule=GENEROUS)
    periods = tuple(period for period, _ in rule(local.records, largest_lr=0.5))  # as planned, the last one too
    assert max(periods) > 3
    again, replayed = descend(3, lrs, kind=kind, overlap=overlap, schedule=Replayed(periods))
    assert torch.equal(rows, again)
    assert [r.drift for r in replayed.records] == [r.drift for r in local.records]
    assert all(r.noise is None and r.reason == "" for r in replayed.records)


# The rule


def apart_by_noise(steps: int, m: float, *, own: bool) -> float:
    """The variance of where ``steps`` steps with momentum m bring a worker, by gradients of variance (1 - m)^2 at lr 1;
    the velocity that it begins with is its own from all steps before, or that of all."""
    velocity = [(1 - m) * m**k for k in range(400)] if own else []  # as sums of independent gradients: their weights
    place = [0.0] * len(velocity)
    for _ in range(steps):
        velocity, place = [m * v for v in velocity] + [1 - m], [*place, 0.0]
        place = [p + v for p, v in zip(place, velocity)]
    return sum(p**2 for p in place)


def rule(
    records: Sequence[Record],
    *,
    tolerance: float = 0.6,
    largest_lr: float | None = None,
    longest: int = 1024,
    own: bool | None = True,
) -> list[tuple[int, str]]:
    """The period and reason of each round, transcribed: from the records of all rounds before the last one's. Workers
    keep their ``own`` momentum, or do not; None: they do not count alike, or start apart."""
    found = [(1, ""), (1, "")]
    noise, m, excess, before = None, None, None, None
    period, largest = 1, 0.0
    for record, after in pairwise(records):  # the numbers of a round come with the average after its own
        n, lr, measured, reason = record.workers, after.lr, found[record.round - 1][0], ""
        largest = max(largest, lr)
        if record.noise is not None:
            noise = record.noise if noise is None else 0.7 * noise + 0.3 * record.noise
            m = record.momentum
        if noise is not None and n > 1 and record.drift is not None and lr > 0 and record.lr > 0:
            v = record.drift * n / (n - 1)
            systematic = 0.0
            if own is not None and m is not None:
                if noise and 0.9 < (before or record.lr) / record.lr < 1.1:
                    ratio = min(4.0, v / (record.lr**2 * noise * apart_by_noise(measured, m, own=own)))
                    excess = ratio if excess is None else 0.9 * excess + 0.1 * ratio
                systematic = max(0.0, 1 - 1.1 / excess) if excess else 0.0
            before = record.lr
            v = v * (1 + 63 * systematic) * (lr / record.lr) ** 2
            growth = max(1.0, math.sqrt(sum(steps for steps, _ in found[: record.round]) / 5_000))
            target = tolerance * growth * (largest_lr or largest) ** 2 * noise / n
            wanted = max(1, math.floor(measured * min(2.0, math.sqrt(target / v)) + 1e-9))
            wanted = max(period, wanted) if v <= target else min(period, wanted)
            wanted = min(longest, wanted)
            if wanted != period:
                part = f" ({systematic:.0%} of it systematic, weighed 64-fold)" if systematic else ""
                reason = f"drift {v:.3g}{part}, target {target:.3g}: period {period} to {wanted}"
            period = wanted
        found.append((period, reason))
    return found


LRS: dict[str, list[float]] = {
    "the same": [0.05] * 300,
    "drops": [0.1] * 150 + [0.02] * 100 + [0.004] * 150,
    "rises": [0.01] * 150 + [0.04] * 100 + [0.16] * 100,
    "warms up from 0": [0.1 * min(1.0, t / 60) for t in range(300)],
    "falls to 0": [0.1 * (1 - t / 299) for t in range(300)],
}


@pytest.mark.parametrize("name", LRS)
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize(
    "given",
    [{}, {"tolerance": 0.5, "largest_lr": 0.2}, {"tolerance": 1.0, "longest": 5}, {"tolerance": 30.0, "longest": 64}],
    ids=str,
)
def test_a_run_follows_the_rule(given: dict[str, Any], n: int, name: str) -> None:
    _, local = descend(n, LRS[name], apart=0.2, schedule=prsgd.auto(**given))
    expected = rule(local.records, **given)
    full = local.records[:-1]  # the last round ends with the run
    assert [(r.period, r.reason) for r in full] == expected[: len(full)]
    assert n > 2 or not given or max(r.period for r in full) > 1
    assert all(r.period <= given.get("longest", 1024) for r in full)


def test_the_rule_with_momentum_and_by_samples() -> None:
    for options, own in (
        ({"momentum": 0.9}, True),
        ({"momentum": 0.9, "optimizer_state": "average"}, False),
        ({"momentum": 0.9, "optimizer_state": "reset"}, False),
        ({"averaging": prsgd.mean("samples")}, None),
        ({"averaging": prsgd.outer()}, True),
        ({"averaging": prsgd.easgd()}, None),
        ({"kind": "adamw"}, True),
    ):
        _, local = descend(3, [0.01] * 250, schedule=prsgd.auto(tolerance=4.0), **options)
        full = local.records[:-1]
        assert [(r.period, r.reason) for r in full] == rule(local.records, tolerance=4.0, own=own)[: len(full)]
        assert max(r.period for r in full) > 1


def longest_in(local: prsgd.LocalSGD, first: int, last: int) -> int:
    return max(record.period for record in local.records[:-1] if first <= record.step <= last)


def test_a_lower_lr_gives_longer_rounds_and_a_higher_one_shorter() -> None:
    _, drops = descend(4, LRS["drops"], schedule=prsgd.auto(tolerance=4.0))
    assert longest_in(drops, 200, 250) > 2 * longest_in(drops, 100, 150)
    rising = [0.01] * 300 + [0.16] * 300
    _, rises = descend(4, rising, schedule=prsgd.auto(tolerance=4.0, largest_lr=0.16))
    assert longest_in(rises, 200, 300) > 4 * longest_in(rises, 500, 600)


def a_record(**changes: Any) -> Record:
    known: dict[str, Any] = {
        "round": 3, "step": 3, "period": 1, "overlap": 0, "workers": 4, "bad_workers": 0, "bytes_sent": 0,
        "server_bytes_sent": 0, "wait_seconds": 0.0, "copy_seconds": 0.0, "flight_seconds": 0.0, "lr": 0.1,
        "drift": 1.0, "loss": None, "samples": 0,
    }  # fmt: skip
    return Record(**known | changes)


def opened(schedule: prsgd.auto, learned: Any, round: int) -> prsgd.Round:
    return schedule.open(prsgd.Now(worker=0, num_workers=4, round=round, step=9, lr=0.1, last=None, learned=learned))


sizes = st.floats(0, 1e30) | st.floats(0, allow_nan=False)
rates = st.just(0.0) | st.floats(1e-6, 10.0)
seen = st.tuples(st.none() | sizes, st.none() | sizes, rates, st.integers(1, 9))


@given(st.lists(seen, max_size=40), st.floats(1e-3, 1e3), st.integers(1, 300), st.none() | st.floats(1e-3, 10))
def test_periods_stay_within_bounds_whatever_is_seen(
    seen: list[tuple[float | None, float | None, float, int]], tolerance: float, longest: int, largest_lr: float | None
) -> None:
    schedule = prsgd.auto(tolerance=tolerance, largest_lr=largest_lr, longest=longest)
    learned: Any = {}
    periods, lr_then = [opened(schedule, {}, 1).steps, opened(schedule, {}, 2).steps], 0.1
    assert periods == [1, 1]
    for round, (drift, noise, lr, workers) in enumerate(seen, start=1):
        record = a_record(round=round, drift=drift, noise=noise, lr=lr_then, workers=workers, period=0)
        before = dict(learned)
        learned = schedule.learn(learned, record, lr)
        found = opened(schedule, learned, round + 2)
        assert before == {} or learned is not before
        assert all(isinstance(value, float) for value in learned.values())  # as they are saved
        assert isinstance(found.steps, int)
        assert 1 <= found.steps <= longest
        last, measured = periods[-1], periods[round - 1]
        assert last is not None
        assert measured is not None
        assert found.steps <= max(last, 2 * measured)
        assert bool(found.reason) == (found.steps != last)
        assert opened(schedule, learned, round + 3).reason == ""  # it is said once, also if nothing is learned then
        periods.append(found.steps)
        lr_then = lr


@given(st.integers(1, 500), st.integers(1, 500), st.floats(1e-9, 1e9), st.floats(1e-9, 1e9), st.floats(1, 100))
def test_the_next_period_grows_with_the_target(
    period: int, measured: int, drift: float, target: float, more: float
) -> None:
    schedule = prsgd.auto()
    found = [schedule._next(period, measured, drift, t) for t in (target, target * more)]
    assert found[0] <= found[1]
    assert found[0] >= period if drift <= target else found[0] <= period
    assert schedule._next(period, measured, 0.0, target) == min(1024, max(period, 2 * measured))


def test_one_outlier_does_not_stop_the_rule() -> None:
    """A noise of a size that no header can hold is none; what is finite fades by the share of the past."""
    schedule = prsgd.auto()
    learned: dict[str, float] = {}
    for round, noise in enumerate([1.0, 1e30, *[1.0] * 300], start=1):
        learned = dict(schedule.learn(learned, a_record(round=round, noise=noise, drift=1e-4), 0.1))
    assert learned["noise"] == pytest.approx(1.0, rel=1e-9)
    assert OLD == 0.7


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("state", ["keep", "average", "reset"])
def test_noise_alone_explains_the_drift_of_workers_with_the_same_data(state: str, momentum: float) -> None:
    """On a flat loss, so that gradients are noise alone: 0.9 to 1.1 of the drift over 300 rounds of 5 steps."""
    ratios: list[float] = []

    class Look(prsgd.auto):
        def learn(self, learned: Any, record: Record, lr: float) -> Any:
            found = super().learn(learned, record, lr)
            ratios.append(found.get("excess", 1.0))
            return found

    fleet = prsgd.Fleet(nn.Linear(30, 30).double(), 4)
    optimizer = SGD(fleet.parameters(), lr=0.1, momentum=momentum)
    draws = torch.Generator().manual_seed(3)
    with prsgd.LocalSGD(fleet, optimizer, schedule=Look(tolerance=1e9, longest=5), optimizer_state=state):
        for _ in range(1500):
            for p in fleet.parameters():
                p.grad = torch.randn(p.shape, generator=draws, dtype=p.dtype)
            optimizer.step()
    assert 0.9 < sum(ratios[20:]) / len(ratios[20:]) < 1.1


def test_a_drop_of_the_lr_is_no_excess() -> None:
    """A round in which the lr falls has drifted at the old one."""
    schedule, learned = prsgd.auto(), {"own_momentum": 1.0}
    for round, lr in enumerate([0.1, 0.1, 0.1, 0.01, 0.01], start=1):
        drift = 0.75 * 0.1**2 if round <= 4 else 0.75 * 0.01**2  # of 4 workers, after one step with noise 1
        record = a_record(round=round, noise=1.0, momentum=0.0, drift=drift, lr=lr)
        learned = dict(schedule.learn(learned, record, lr))
        assert learned["excess"] == pytest.approx(1.0)
        assert learned["systematic"] == 0.0


@pytest.mark.parametrize("lr", [1e200, 1e-200])
def test_an_lr_of_any_size(lr: float) -> None:
    learned: Any = {"own_momentum": 1.0}
    for round, now in enumerate([0.1, lr, 0.1, lr], start=1):
        learned = prsgd.auto().learn(learned, a_record(round=round, noise=1.0, momentum=0.9, lr=now), 0.1)
    assert learned["period"] >= 1


def test_a_momentum_that_float32_rounds_to_1() -> None:
    learned = prsgd.auto().learn({"own_momentum": 0.0}, a_record(noise=1.0, momentum=1.0), 0.1)
    assert "momentum" not in learned


def test_workers_with_other_schedules_are_told_apart() -> None:
    for kind, said in try_ranks(_with_own_tolerance, 2):
        assert kind == "error"
        assert "MismatchError" in said
        assert "tolerance" in said


def _with_own_tolerance(rank: int) -> None:
    net = Numbers(1)
    optimizer = SGD(net.parameters(), lr=0.1)
    with prsgd.LocalSGD(net, optimizer, schedule=prsgd.auto(tolerance=1.0 + rank)):
        pass


# Fleets, ranks, and stopping

TRAINED: dict[str, dict[str, Any]] = {
    "blocking": {},
    "overlap 1": {"overlap": 1},
    "overlap 3": {"overlap": 3},
    "momentum averaged": {"optimizer_state": "average", "overlap": 1},
    "momentum reset": {"optimizer_state": "reset"},
    "by samples": {"averaging": prsgd.mean("samples")},
    "outer": {"averaging": prsgd.outer()},
    "outer of steps, overlap 1": {"averaging": prsgd.outer(0.5, 0.5, of=prsgd.mean("steps")), "overlap": 1},
    "easgd": {"averaging": prsgd.easgd()},
    "easgd, overlap 3": {"averaging": prsgd.easgd(alpha=0.3, beta=0.5), "overlap": 3},
    "batchnorm": {"kind": "batchnorm"},
}
LENIENT = prsgd.auto(tolerance=40.0)
"""So that periods change in a few steps."""


def rank_trains(rank: int, num_steps: list[int], cases: list[dict[str, Any]]) -> list[tuple[Tensor, Any]]:
    found = []
    for case in cases:
        rows, local, _ = train_fleet(num_steps, schedule=LENIENT, lr=0.05, **case)
        found.append((rows, said(local)))
    return found


@pytest.mark.parametrize("num_steps", [[52, 52], [21, 52]], ids=str)
def test_ranks_are_the_fleet_to_the_last_bit(num_steps: list[int]) -> None:
    by_rank = run_ranks(rank_trains, 2, num_steps, list(TRAINED.values()))
    for place, (name, case) in enumerate(TRAINED.items()):
        rows, local, _ = train_fleet(num_steps, schedule=LENIENT, lr=0.05, **case)
        assert sum(r.noise is not None for r in local.records) >= 3, name
        assert max(r.period for r in local.records) > 4, name
        for worker in range(2):
            got, mine = by_rank[worker][place]
            assert torch.equal(got[0], rows[worker]), name
            if num_steps[worker] == max(num_steps):
                assert mine == said(local), name
            else:  # a process without data has no step and no period
                assert [(r[0], *r[3:6]) for r in mine] == [(r[0], *r[3:6]) for r in said(local)], name


def rank_plain(rank: int, cases: list[dict[str, Any]]) -> list[tuple[Tensor, Any]]:
    found = []
    for case in cases:
        weights, local, _ = train_model(rank, 40, schedule=LENIENT, lr=0.05, **case)
        found.append((weights, said(local)))
    return found


def test_plain_models_under_gloo_are_the_fleet() -> None:
    by_rank = run_ranks(rank_plain, 2, list(TRAINED.values()))
    for place, (name, case) in enumerate(TRAINED.items()):
        rows, local, _ = train_fleet([40, 40], schedule=LENIENT, lr=0.05, **case)
        for worker in range(2):
            weights, mine = by_rank[worker][place]
            assert torch.equal(weights, rows[worker]), name
            for one, other in zip(mine, said(local), strict=True):
                assert one[4] == (other[4] and pytest.approx(other[4], rel=1e-12)), (
                    name
                )  # by tensors, or the row at once
                assert (*one[:4], *one[5:]) == (*other[:4], *other[5:]), name


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": 3}, {"overlap": 1, "optimizer_state": "average"}, {"averaging": prsgd.easgd(), "overlap": 1}],
    ids=str,
)
def test_stop_anywhere(options: dict[str, Any]) -> None:
    """Between the two steps of a look (16, 17), with its number not yet told, and with an average in flight."""
    options = {"schedule": LENIENT, **options}
    unbroken = stopped_run(options, 26)
    periods = [period for _, period, *_ in unbroken[2].values()]
    assert max(periods) > 3
    for stop_at in range(1, 26):
        same(stopped_run(options, 26, stop_at=stop_at), unbroken)


def rank_stops(rank: int, stop_at: int | None) -> Any:
    return stopped_run({"schedule": LENIENT, "overlap": 3}, 40, stop_at=stop_at)


def test_stop_in_a_look_over_gloo() -> None:
    unbroken = run_ranks(rank_stops, 2, None)
    for stop_at in (EVERY, EVERY + 1, EVERY + 2):
        for mine, theirs in zip(run_ranks(rank_stops, 2, stop_at), unbroken):
            same(mine, theirs)


def test_a_state_with_other_gradients_is_refused() -> None:
    def start() -> tuple[prsgd.Fleet, prsgd.LocalSGD]:
        fleet = prsgd.Fleet(Point(), 2)
        return fleet, prsgd.LocalSGD(fleet, SGD(fleet.parameters(), lr=0.1), schedule=prsgd.auto())

    _, local = start()
    with local:
        state = pickle.loads(pickle.dumps(local.state_dict()))
    for damage, message in (
        ({"at": [[0]]}, "the state has 1 gradients at for 2 workers"),
        ({"at": [[0, 0], [0, 0]]}, "the state is of a run with 2 optimizers, this has 1"),
        ({"before": [torch.zeros(3), None]}, r"a gradient is \(3,\), this run's has the shape \(1,\)"),
    ):
        damaged = copy.deepcopy(state)
        damaged["noise"].update(damage)
        with pytest.raises(prsgd.CheckpointError, match=message):
            start()[1].load_state_dict(damaged)


def test_a_run_may_go_on_with_auto_or_without() -> None:
    def start(schedule: prsgd.Schedule) -> tuple[prsgd.Fleet, torch.optim.Optimizer, prsgd.LocalSGD]:
        fleet = prsgd.Fleet(model(), 2)
        optimizer = SGD(fleet.parameters(), lr=0.1)
        return fleet, optimizer, prsgd.LocalSGD(fleet, optimizer, schedule=schedule)

    for was, now in ((prsgd.every(2), prsgd.auto()), (prsgd.auto(), prsgd.every(2))):
        fleet, optimizer, local = start(was)
        states = []
        for _ in range(2):
            with local:
                for t in range(20):
                    optimizer.zero_grad()
                    pairs = [batch(w, t) for w in range(2)]
                    fleet.backward(cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
                    optimizer.step()
                states = [fleet.state_dict(), local.state_dict()]
            if local.step < 40:
                fleet, optimizer, local = start(now)
                fleet.load_state_dict(states[0])
                with pytest.warns(RuntimeWarning, match="the run began with the schedule"):
                    local.load_state_dict(states[1])
        assert local.step == 40


def flat_run(local: prsgd.LocalSGD, steps: int, seed: int, bend: float = 0.1) -> None:
    """Steps of a fleet whose gradients are noise, and a pull to 0."""
    draws = torch.Generator().manual_seed(seed)
    [optimizer] = local.optimizers
    for _ in range(steps):
        for p in local.model.parameters():
            p.grad = p.detach() * bend + torch.randn(p.shape, generator=draws, dtype=p.dtype)
        optimizer.step()


def flat(state: str, num_workers: int = 4, lr: float = 0.02) -> prsgd.LocalSGD:
    fleet = prsgd.Fleet(nn.Linear(30, 30).double(), num_workers)
    optimizer = SGD(fleet.parameters(), lr=lr, momentum=0.9)
    return prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.auto(largest_lr=0.1), optimizer_state=state)


@pytest.mark.parametrize(("before", "now"), [("average", "keep"), ("keep", "average")])
def test_what_is_done_with_the_momentum_is_this_runs(before: str, now: str) -> None:
    """A state tells of another run, whose workers part in another way: noise explained none of it, or too much."""
    with flat(before) as local:
        flat_run(local, 300, 0)
        state = local.state_dict()
    found = []
    for inherits in (True, False):
        other = flat(now, 5)
        if inherits:
            other.inherit(state)
        with other:
            flat_run(other, 600, 1)
        late = [record.period for record in other.records][-30:-1]
        found.append(sum(late) / len(late))
    assert found[0] == pytest.approx(found[1], rel=0.15)


# Epochs


def test_an_epoch_without_a_whole_round_halves_the_period() -> None:
    schedule = prsgd.auto(tolerance=1.0, largest_lr=1.0)
    learned: dict[str, float] = {}
    for round in range(1, 7):
        learned = dict(schedule.learn(learned, a_record(round=round, noise=1.0, drift=1e-9, lr=0.1), 0.1))
    period = opened(schedule, learned, 8).steps
    after = schedule.cut_short(learned, 7)
    assert opened(schedule, after, 8).steps == period  # a round of this epoch was whole
    once, twice = (opened(schedule, found, 9) for found in (schedule.cut_short(after, 8), schedule.cut_short(after, 7)))
    assert period is not None
    assert once.steps == twice.steps == period // 2
    assert once.reason == f"an epoch ended before its first round did: period {period} to {period // 2}"
    assert schedule.cut_short({}, 1) == {}


def test_epochs_of_few_steps_do_not_freeze_a_period_that_is_too_long() -> None:
    """Rounds had grown beyond an epoch at a small lr; then it grows, and no round is whole any more."""
    with flat("average", lr=0.001) as local:
        for number in range(40):
            local.optimizers[0].param_groups[0]["lr"] = 0.001 if number < 4 else 0.1
            with local.epoch():
                flat_run(local, 12, number)
    assert max(record.period for record in local.records if record.step <= 48) == 12
    late = [record for record in local.records if record.step > 240]
    noise = [record.noise for record in local.records if record.noise is not None][-1]
    target = 0.6 * 0.1**2 * noise / 4
    drifts = [record.drift for record in late if record.drift]
    assert sum(drifts) / len(drifts) < target
    assert 2 < sum(record.period for record in late) / len(late) < 4  # 3 without epochs


# Uneven data


LENGTHS = [(9, 40), (30, 30), (34, 17), (30, 30)]
"""Batches of two workers, epoch by epoch."""


def rank_epochs(rank: int, overlap: int, averaging: Any) -> Any:
    net = model()
    optimizer = SGD(net.parameters(), lr=0.05, momentum=0.9)
    found, taken = [], 0
    schedule = prsgd.auto(tolerance=40.0, longest=7)
    with prsgd.LocalSGD(net, optimizer, schedule=schedule, averaging=averaging, overlap=overlap) as local:
        for lengths in LENGTHS:
            with local.epoch():
                for _ in range(lengths[rank]):
                    x, y = batch(rank, taken)
                    optimizer.zero_grad()
                    cross_entropy(net(x), y).backward()
                    optimizer.step()
                    taken += 1
            with local.consensus() as averaged:
                shown = torch.cat([p.detach().flatten() for p in averaged.parameters()])
            found.append((shown, local.round, len(local.records)))
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
    return found, [(r.round, r.period, r.drift, r.noise, r.reason) for r in local.records]


@pytest.mark.parametrize("averaging", [None, prsgd.easgd()], ids=str)
@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_all_workers_have_the_same_periods_after_uneven_epochs(overlap: int, averaging: Any) -> None:
    one, other = run_ranks(rank_epochs, 2, overlap, averaging)
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert mine[1:] == theirs[1:]
    even = [range(one[0][k - 1][1] + 1, one[0][k][1] + 1) for k in (1, 3)]
    assert all(len(rounds) > 2 for rounds in even)
    rounds = {round: rest for round, *rest in one[1]}
    others = {round: rest for round, *rest in other[1]}
    for round in (*even[0], *even[1]):
        assert rounds[round] == others[round], round
    assert max(period for period, *_ in rounds.values()) > 4
    reasons = [reason for *_, reason in one[1] if reason]
    assert len(reasons) == len(set(reasons))  # each is said of one round


@dataclass(frozen=True)
class Looking(Learns, Replayed):
    """Asks for the noise of gradients, and does not go by it."""


def rank_looks(rank: int, num_steps: list[int], looks: bool) -> Any:
    """Worker 0 runs out of data in a round in which it looked at gradients; the other calls consensus() before the
    average that hears of it."""
    net = model()
    optimizer = SGD(net.parameters(), lr=0.05)
    with prsgd.LocalSGD(net, optimizer, schedule=Looking((1,) * 10 + (20,))) as local:
        for t in range(num_steps[rank]):
            x, y = batch(rank, t)
            optimizer.zero_grad()
            cross_entropy(net(x), y).backward()
            optimizer.step()
            if looks and t == num_steps[0] + 2:
                with local.consensus():
                    pass
    return [record.noise for record in local.records]


def rank_long_round(rank: int) -> list[float | None]:
    _, local, _ = train_model(rank, 60, schedule=Looking((60,)))
    return [record.noise for record in local.records]


def test_a_round_with_several_looks_has_their_mean_in_ranks_as_in_a_fleet() -> None:
    _, local, _ = train_fleet([60, 60], schedule=Looking((60,)))
    expected = [record.noise for record in local.records]
    assert run_ranks(rank_long_round, 2) == [expected, expected]
    _, each, _ = train_fleet([60, 60], schedule=Looking((2,)), lr=0.2)
    assert len([record for record in each.records if record.noise is not None]) == 4


def test_what_a_done_worker_saw_is_not_lost_in_a_look_of_others() -> None:
    assert run_ranks(rank_looks, 2, [19, 45], True) == run_ranks(rank_looks, 2, [19, 45], False)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_worker_that_turns_nan_is_rescued(overlap: int) -> None:
    with pytest.warns(RuntimeWarning, match="worker 2: its model was not finite"):
        rows, local = descend(3, [0.05] * 120, nan_at=EVERY, overlap=overlap, schedule=GENEROUS)
    assert bool(rows.isfinite().all())
    assert sum(record.bad_workers for record in local.records) == 1
    assert all(record.noise is None or math.isfinite(record.noise) for record in local.records)
    assert max(record.period for record in local.records) > 3


def test_one_worker_alone_is_sgd() -> None:
    averaged, local, _ = train_model(0, 40, schedule=prsgd.auto())
    alone, _, _ = train_model(0, 40, schedule=prsgd.once())
    assert torch.equal(averaged, alone)
    assert {record.period for record in local.records} == {1}


def test_records_come_back_from_json() -> None:
    _, local = descend(4, [0.05] * 100, schedule=GENEROUS)
    assert any(record.noise is not None for record in local.records)
    assert any(record.reason for record in local.records)
    for record in local.records:
        assert Record.from_dict(json.loads(json.dumps(asdict(record)))) == record


# Data that differ


def settled(local: prsgd.LocalSGD) -> float:
    """The mean period in the second half of a run."""
    half = [r.period for r in local.records[:-1] if r.step > local.step / 2]
    return sum(half) / len(half)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_where_data_differ_rounds_are_shorter(kind: str) -> None:
    options: dict[str, Any] = {"kind": kind, "schedule": prsgd.auto(tolerance=4.0, largest_lr=0.1)}
    # By Adam nobody knows what of the drift is noise, and it takes more to be seen.
    little, large = (0.3, 1.0) if kind == "sgd" else (1.0, 5.0)
    alike, some, much = (settled(descend(4, [0.01] * 400, apart=apart, **options)[1]) for apart in (0.0, little, large))
    assert alike > 2 * some > 4 * much
    _, quiet = descend(4, [0.01] * 400, apart=little, noise=0.1, **options)
    assert settled(quiet) < some / 2  # with less noise the same differences count for more


# Bad input


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "4"])
def test_numbers(value: Any) -> None:
    for name in ("tolerance", "largest_lr"):
        with pytest.raises(ValueError, match=rf"^{name} must be a finite number > 0, got {value!r}$"):
            prsgd.auto(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, True, "4", None])
def test_longest(value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^longest must be a whole number >= 1, got {value!r}$"):
        prsgd.auto(longest=value)


UNKNOWN = [
    prsgd.gossip("complete"),
    prsgd.mean(wire=prsgd.quantized(4)),
    prsgd.mean(wire=prsgd.sparse(0.1)),
    prsgd.mean(wire=prsgd.half()),
    prsgd.mean(dtype=torch.bfloat16),
    prsgd.outer(of=prsgd.mean(wire=prsgd.quantized(4))),
    prsgd.quantized(4),
    prsgd.sparse(0.1),
    prsgd.half(),
]
WHY = r"the schedule goes by the workers' drift, .* and with .* no process knows that mean: use mean\(\), or"


@pytest.mark.parametrize("averaging", UNKNOWN, ids=str)
def test_averagings_whose_drift_nobody_knows(averaging: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = prsgd.Fleet(model(), 2)
    with pytest.raises(ValueError, match=f"^{WHY}") as error:
        prsgd.LocalSGD(fleet, SGD(fleet.parameters(), lr=0.1), schedule=prsgd.auto(), averaging=averaging, overlap=1)
    assert "\n" not in str(error.value)
    if isinstance(averaging, prsgd.Averaging):
        row = Method("It cannot work.", "nobody", lambda _: Parts(prsgd.auto(), averaging), period=None)
        monkeypatch.setitem(METHODS, "cannot", row)
        with pytest.raises(ValueError, match=f"^method cannot: {WHY}"):
            Config(method="cannot", workers=2).resolve()


def test_averagings_whose_drift_is_known() -> None:
    for averaging in (prsgd.mean(), prsgd.mean("steps"), prsgd.outer(), prsgd.easgd()):
        fleet = prsgd.Fleet(model(), 2)
        prsgd.LocalSGD(fleet, SGD(fleet.parameters(), lr=0.1), schedule=prsgd.auto(), averaging=averaging, overlap=9)
