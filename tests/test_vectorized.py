"""The fleet by vmap against the fleet by loop: the same to rounding, whatever the model, the schedule and who waits."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from tests.problems import CHANGING, batch, model, take_step, train_fleet

cross_entropy = nn.functional.cross_entropy
SCHEDULES: list[dict[str, Any]] = [
    {"schedule": prsgd.every(4)},
    {"schedule": prsgd.every(4), "overlap": 2},
    {"schedule": prsgd.per_worker([5, 1, 3, 2]), "overlap": 1},
    {"schedule": prsgd.once()},
    *({"schedule": schedule, "overlap": 1} for schedule in CHANGING.values()),
]


def train(
    mode: str, kind: str, num_steps: list[int], *, compile: bool = False, **options: Any
) -> tuple[prsgd.Fleet, prsgd.LocalSGD]:
    fleet = prsgd.Fleet(model(kind), len(num_steps), mode=mode, compile=compile)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    taken = dict.fromkeys(fleet.workers, 0)
    with prsgd.LocalSGD(fleet, optimizer, **options) as local:
        while fleet.active:
            for worker in take_step(fleet, optimizer, local, taken):
                if taken[worker] == num_steps[worker]:
                    fleet.stop(worker)
    return fleet, local


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", ["mlp", "batchnorm"])
def test_vmap_is_the_loop_to_rounding(kind: str, options: dict[str, Any]) -> None:
    num_steps = [11, 11, 6, 11]
    fast, fast_run = train("vmap", kind, num_steps, **options)
    slow, slow_run = train("loop", kind, num_steps, **options)
    assert (fast.mode, slow.mode) == ("vmap", "loop")
    torch.testing.assert_close(fast.rows, slow.rows, rtol=1e-11, atol=1e-13)
    for a, b in zip(fast.modules, slow.modules):
        for (name, mine), theirs in zip(a.named_buffers(), b.buffers()):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13, msg=name)
    assert fast_run.steps == slow_run.steps == (11, 11, 6, 11)
    assert [r.drift for r in fast_run.records] == pytest.approx([r.drift for r in slow_run.records], rel=1e-9)


def test_losses_and_accumulated_gradients() -> None:
    fleets = [prsgd.Fleet(model("batchnorm"), 3, mode=mode) for mode in ("vmap", "loop")]
    pairs = [batch(w, 0) for w in range(3)]
    x, y = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    for fleet in fleets:
        fleet.stop(1)
    losses = [fleet.backward(cross_entropy, x, y) + fleet.backward(cross_entropy, x, y) for fleet in fleets]
    assert torch.isnan(losses[0]).tolist() == [False, True, False]
    torch.testing.assert_close(losses[0], losses[1], equal_nan=True)
    for a, b in zip(fleets[0].parameters(), fleets[1].parameters()):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-14)
            assert a.grad.stride() == a.stride()
    norms = [fleet.clip_grad_norm_(0.1) for fleet in fleets]
    torch.testing.assert_close(norms[0], norms[1], equal_nan=True)
    clipped = torch.cat([p.grad.flatten() for p in fleets[0].modules[2].parameters() if p.grad is not None])
    assert clipped.norm().item() == pytest.approx(0.1)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 3)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def test_parameters_without_gradient_stay_without() -> None:
    fleet = prsgd.Fleet(Unused().double(), 2, mode="vmap")
    pairs = [batch(w, 0) for w in range(2)]
    fleet.backward(cross_entropy, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
    assert [p.grad is None for p in fleet.parameters()] == [False, False, True, True] * 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.a(x), self.b(x)


def test_a_head_that_joins_later_trains() -> None:
    fleet = prsgd.Fleet(TwoHeads(), 8)
    x = torch.randn(8, 4, 6)
    fleet.backward(lambda out, _: out[0].mean(), x, x)
    assert [p.grad is None for p in fleet.modules[3].parameters()] == [False, False, True, True]
    fleet.backward(lambda out, _: out[0].mean() + out[1].mean(), x, x)
    assert all(p.grad is not None for p in fleet.parameters())
    assert fleet.mode == "vmap"


def test_modules_in_different_training_modes_are_looped() -> None:
    fleet = prsgd.Fleet(model("batchnorm"), 8)
    fleet.modules[2].eval()
    pairs = [batch(w, 0) for w in range(8)]
    with pytest.warns(UserWarning, match="some workers' modules are in training mode and others are not"):
        fleet.backward(cross_entropy, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
    assert [int(m[1].num_batches_tracked) for m in fleet.modules] == [1, 1, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("net", "num_workers", "mode"),
    [
        (nn.Linear(4, 2), 8, "vmap"),
        (nn.Linear(4, 2), 7, "loop"),
        (nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), 8, "vmap"),
        (nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.1)), 8, "loop"),
        (nn.Conv2d(1, 1, 3), 8, "loop"),
    ],
)
def test_the_choice_goes_by_structure(net: nn.Module, num_workers: int, mode: str) -> None:
    assert prsgd.Fleet(net, num_workers).mode == mode
    assert prsgd.Fleet(net, num_workers, mode="loop").mode == "loop"
    assert prsgd.Fleet(net, num_workers, mode="vmap").mode == "vmap"


class Branching(nn.Module):
    """Control flow that depends on the data, which vmap cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.linear(x if x.sum() > 0 else -x)  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Changes a tensor in place that is no buffer, and so one for all workers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.seen = torch.zeros(3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        self.seen += out.detach().mean(0)
        return out


@pytest.mark.parametrize("kind", [Branching, Counting])
def test_what_vmap_cannot_take(kind: type[nn.Module]) -> None:
    pairs = [batch(w, 0) for w in range(8)]
    x, y = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    torch.manual_seed(0)
    net = kind().double()
    ours = prsgd.Fleet(net, 8)
    assert ours.mode == "vmap"
    with pytest.warns(UserWarning, match="the fleet runs its workers in a loop, since vmap cannot: "):
        losses = ours.backward(cross_entropy, x, y)
    assert ours.mode == "loop"
    loop = prsgd.Fleet(net, 8, mode="loop")
    assert torch.equal(losses, loop.backward(cross_entropy, x, y))
    for a, b in zip(ours.modules, loop.modules):  # the failed attempt left no trace
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(a.parameters(), b.parameters()))  # type: ignore[arg-type]
        assert all(torch.equal(p, q) for p, q in zip(a.buffers(), b.buffers()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.backward(cross_entropy, x, y)
    theirs = prsgd.Fleet(net, 8, mode="vmap")
    with pytest.raises(ValueError, match='mode="vmap" cannot run this model and loss, use mode="loop": '):
        theirs.backward(cross_entropy, x, y)


def test_a_mistake_in_the_loss_is_shown_as_it_is() -> None:
    def wrong(output: Tensor, y: Tensor) -> Tensor:
        raise KeyError("mine")

    fleet = prsgd.Fleet(model(), 8)
    with pytest.raises(KeyError, match="mine"):
        fleet.backward(wrong, torch.zeros(8, 4, 6).double(), torch.zeros(8, 4).long())
    assert fleet.mode == "vmap"


def test_the_mode_is_in_the_checkpoint() -> None:
    state = prsgd.Fleet(model("batchnorm"), 8).state_dict()
    assert state["mode"] == "vmap"
    other = prsgd.Fleet(model("batchnorm"), 8, mode="loop")
    other.load_state_dict(state)
    assert other.mode == "vmap"
    pairs = [batch(w, 0) for w in range(8)]
    other.backward(cross_entropy, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
    assert [int(m[1].num_batches_tracked) for m in other.modules] == [1] * 8


def test_replaced_buffers_are_followed() -> None:
    fleet = prsgd.Fleet(model("batchnorm"), 2, mode="vmap")
    fleet.modules[1][1].running_mean = torch.full((5,), 7.0, dtype=torch.float64)
    pairs = [batch(w, 0) for w in range(2)]
    fleet.backward(cross_entropy, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
    means = [m[1].running_mean.mean().item() for m in fleet.modules]
    assert means[1] > 5 > means[0]


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_buffers_replaced_during_a_run_are_pooled(mode: str) -> None:
    fleet = prsgd.Fleet(model("batchnorm"), 2, mode=mode)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)):
        for t in range(2):
            fleet.modules[1][1].running_mean = torch.full((5,), 7.0, dtype=torch.float64)
            pairs = [batch(w, t) for w in range(2)]
            optimizer.zero_grad()
            fleet.backward(cross_entropy, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs]))
            optimizer.step()
        means = [m[1].running_mean.mean().item() for m in fleet.modules]
        assert means[0] == means[1]
        assert 2.5 < means[0] < 4


def test_a_thousand_workers() -> None:
    rows, local, fleet = train_fleet([3] * 1024, schedule=prsgd.every(2), dtype=torch.float32)
    assert fleet.mode == "vmap"
    assert len(local.records) == 2
    assert torch.equal(rows, rows[0].expand_as(rows))


def test_channels_last_inputs_for_convolutions() -> None:
    seen = []

    class Watching(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().forward(x).mean((1, 2, 3))

    fleet = prsgd.Fleet(Watching(3, 4, 3), 2)
    fleet.backward(lambda out, _: out.sum(), torch.randn(2, 5, 3, 8, 8), [None, None])
    assert seen == [True, True]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # torch.compile's own, of which it has many
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["mlp", "batchnorm"])
def test_compiled_is_the_loop_to_rounding(kind: str) -> None:
    """Also when workers wait (period 1 against 3) and at the end of their data, where the compiled step is left."""
    options: dict[str, Any] = {"schedule": prsgd.per_worker([3, 1, 3]), "overlap": 1}
    fast, _ = train("vmap", kind, [8, 8, 5], compile=True, **options)
    slow, _ = train("loop", kind, [8, 8, 5], **options)
    assert fast.compile
    assert fast._vectorized is not None
    assert len(fast._vectorized._compiled or ()) == 1
    torch.testing.assert_close(fast.rows, slow.rows, rtol=1e-11, atol=1e-13)
    for a, b in zip(fast.modules, slow.modules):
        for (name, mine), theirs in zip(a.named_buffers(), b.buffers()):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13, msg=name)
    again = prsgd.Fleet(model(kind), 3)
    again.load_state_dict(fast.state_dict())
    assert (again.mode, again.compile) == ("vmap", True)


def test_compile_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="compile=True is for mode='vmap': leave it off"):
        prsgd.Fleet(model(), 8, mode="loop", compile=True)
    with pytest.raises(ValueError, match="run in a loop: leave it off"):
        prsgd.Fleet(nn.Sequential(nn.Conv2d(1, 2, 3)), 8, compile=True)
    assert prsgd.Fleet(model(), 2, compile=True).mode == "vmap"  # asked for, so also for few workers


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        def run(*_: Any) -> Any:
            raise RuntimeError("no C++ compiler found\nand much more")

        return run

    monkeypatch.setattr(torch, "compile", failing)
    fleet = prsgd.Fleet(model(), 2, compile=True)
    x, y = torch.randn(2, 4, 6, dtype=torch.float64), torch.randint(3, (2, 4))
    with pytest.raises(ValueError, match=r"cannot run this model and loss, leave it off: no C\+\+ compiler found$"):
        fleet.backward(cross_entropy, x, y)


def test_a_new_lambda_at_every_step_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda program, **_: program)
    fleet = prsgd.Fleet(model(), 2, compile=True)
    x, y = torch.randn(2, 4, 6, dtype=torch.float64), torch.randint(3, (2, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(7):
            fleet.backward(lambda out, y: cross_entropy(out, y), x, y)
    [warning] = caught
    assert "5 different loss functions" in str(warning.message)
    assert warning.filename == __file__


class Shared(nn.Module):
    """Two parameters whose gradients are one tensor, and one whose gradient is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 6).double()), nn.Parameter(torch.zeros(3, 6).double())
        self.c = nn.Parameter(torch.ones(4).double())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.a + self.b) * torch.tensor([1.0, 2.0, 3.0]) + self.c.sum()


class Remembering(nn.Module):
    """A buffer that forward replaces instead of changing it."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3).double()
        self.register_buffer("seen", torch.zeros(6).double())

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        out: Tensor = self.linear(x - self.seen)
        return out


def data_of(num_workers: int, step: int = 0) -> tuple[Tensor, Tensor]:
    pairs = [batch(w, step) for w in range(num_workers)]
    return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])


@pytest.mark.parametrize("kind", [Shared, Remembering])
def test_in_place_on_one_gradient_or_buffer_touches_no_other(kind: type[nn.Module]) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = kind()
    fleets = [prsgd.Fleet(net, 3, mode=mode) for mode in ("vmap", "loop")]
    for fleet in fleets:
        for step in range(2):
            if step:
                fleet.idle = {1}  # as while a worker waits
            fleet.backward(cross_entropy, *data_of(3, step))
        fleet.clip_grad_norm_(0.1)
    for mine, theirs in zip(*(fleet.modules for fleet in fleets)):
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters()):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14, msg=name)
        for (name, p), q in zip(mine.named_buffers(), theirs.buffers()):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14, msg=name)


def test_layers_frozen_during_a_run_and_before_it() -> None:
    fleets = []
    for mode in ("vmap", "loop"):
        net = model()
        net[0].requires_grad_(False)
        fleet = prsgd.Fleet(net, 3, mode=mode)
        for i, module in enumerate(fleet.modules):
            module[0].weight.fill_(i)  # another for each worker
            module[2].bias.requires_grad_(False)  # only now
        fleets.append((fleet, fleet.backward(cross_entropy, *data_of(3))))
    (fast, fast_losses), (slow, slow_losses) = fleets
    torch.testing.assert_close(fast_losses, slow_losses, rtol=1e-12, atol=1e-14)
    for p, q in zip(fast.parameters(), slow.parameters()):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)


class Noting(nn.Linear):
    """Keeps something that is no registered buffer."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach().mean()
        return super().forward(x)


def test_state_of_the_users_own_is_looped() -> None:
    net = Noting(6, 3).double()
    with pytest.raises(ValueError, match=r"forward sets Noting\.(calls|last), which is no registered tensor buffer"):
        prsgd.Fleet(net, 3, mode="vmap").backward(cross_entropy, *data_of(3))
    fleet = prsgd.Fleet(net, 8)
    with pytest.warns(UserWarning, match=r"runs its workers in a loop, since vmap cannot: forward sets Noting\."):
        fleet.backward(cross_entropy, *data_of(8))
    assert [m.calls for m in fleet.modules] == [1] * 8
    fleet.state_dict()


def test_hooks_are_called() -> None:
    called = []
    fleet = prsgd.Fleet(model(), 8)
    for module in fleet.modules:
        module.register_forward_hook(lambda *_: called.append(1))
    with pytest.warns(UserWarning, match="a module has hooks"):
        fleet.backward(cross_entropy, *data_of(8))
    assert len(called) == 8


def test_one_workers_bad_label_is_its_own_error() -> None:
    x, y = data_of(8)
    y[3, 0] = 9
    fleet = prsgd.Fleet(model(), 8)
    with pytest.raises(IndexError):
        fleet.backward(cross_entropy, x, y)
    assert fleet.mode == "vmap"


def test_a_state_from_before_compile_was_there() -> None:
    fleet = prsgd.Fleet(model(), 2)
    state = fleet.state_dict()
    del state["compile"]
    fleet.load_state_dict(state)
    assert not fleet.compile


def test_what_vmap_would_loop_over_itself_runs_in_the_fleets_own_loop() -> None:
    """Attention on a CPU: torch has no rule for it, warns, and is slower than the loop."""
    from prsgd.tasks.gpt import GPT
    from prsgd.tasks.text import next_byte_loss

    x = torch.randint(256, (8, 2, 9))
    fleets = []
    for mode in ("auto", "loop"):
        torch.manual_seed(0)
        fleets.append(prsgd.Fleet(GPT(layers=1, width=8, heads=2, context=8), 8, mode=mode))
    ours, theirs = (fleet.backward(next_byte_loss, x[..., :-1], x[..., 1:]) for fleet in fleets)
    assert fleets[0].mode == "loop"
    assert torch.equal(ours, theirs)
    for mine, other in zip(fleets[0].parameters(), fleets[1].parameters()):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)
