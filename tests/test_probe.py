"""The probe against constants that are known, and against exact Hessians and variances."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd.cli import main
from prsgd.tasks import digits, synthetic
from prsgd.theory.bounds import gradient_bound
from prsgd.theory.probe import exact_noise
from tests.ranks import run_ranks


def batches_of(x: Tensor, y: Tensor, size: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[part], y[part]) for part in order.split(size) if len(part) == size]


def test_synthetic_constants_are_found() -> None:
    """sigma^2 within 10 %, and L within 10 % once the path has reached the wells; at the start L is far off."""
    known, data = synthetic.constants(), synthetic.load()
    model = synthetic.Wells()
    loader = batches_of(data.train_x, data.train_y, 8)
    start = prsgd.probe(model, synthetic.mean_value, loader, max_batches=400)
    assert start.noise.value == pytest.approx(known.noise / 8, rel=0.1)
    assert start.noise.low <= known.noise / 8 <= start.noise.high
    assert start.gap.value == pytest.approx(known.start_value - known.best_value, rel=0.01)
    assert start.smoothness.value < 0.9 * known.smoothness
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for x, y in batches_of(data.train_x, data.train_y, 8, seed=1)[:200]:
        optimizer.zero_grad()
        synthetic.mean_value(model(x), y).backward()
        optimizer.step()
    later = prsgd.probe(model, synthetic.mean_value, loader, max_batches=200, since=start)
    assert later.smoothness.value == pytest.approx(known.smoothness, rel=0.1)
    assert later.looks == 2
    assert later.gap == start.gap
    assert later.loss < start.loss
    assert later.grad_second_moment.value <= known.grad_second_moment
    assert later.grad_second_moment.value >= start.grad_second_moment.value
    bound = gradient_bound(later.problem, workers=8, steps=1000, lr=0.1, period=4)
    assert 0 < bound.total < math.inf


class Quadratic(nn.Module):
    """x' A x / 2 with the eigenvalues -7, 3, 1: the largest in magnitude is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
        turn, _ = torch.linalg.qr(torch.tensor([[1.0, 2, 3], [0, 1, 4], [5, 6, 0]], dtype=torch.float64))
        self.register_buffer("a", turn @ torch.diag(torch.tensor([-7.0, 3, 1]).double()) @ turn.T)

    def forward(self, _: Tensor) -> Tensor:
        return self.x @ self.a @ self.x / 2


def itself(out: Tensor, _: Any) -> Tensor:
    return out


def test_curvature_of_a_quadratic_is_exact() -> None:
    loader = [(torch.zeros(1), torch.zeros(1))] * 3
    found = prsgd.probe(Quadratic(), itself, loader, best_value=-100.0)
    assert found.smoothness.value == pytest.approx(7.0, rel=1e-9)
    assert found.smoothness.says.startswith("the largest curvature of")
    assert found.noise.value == pytest.approx(0.0, abs=1e-20)


def test_curvature_of_a_network_against_its_whole_hessian() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, y = torch.randn(12, 3).double(), torch.randint(2, (12,))
    loader = [(x[:6], y[:6]), (x[6:], y[6:])]
    names = [name for name, _ in net.named_parameters()]

    def whole(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in net.parameters()])
        values = {n: part.view_as(p) for n, part, p in zip(names, parts, net.parameters())}
        return nn.functional.cross_entropy(torch.func.functional_call(net, values, (x,)), y)

    at = torch.cat([p.detach().flatten() for p in net.parameters()])
    exact = torch.linalg.eigvalsh(torch.autograd.functional.hessian(whole, at)).abs().max()
    found = prsgd.probe(net, nn.functional.cross_entropy, loader, lanczos_steps=12)
    assert found.smoothness.value == pytest.approx(float(exact), rel=1e-3)
    few = prsgd.probe(net, nn.functional.cross_entropy, loader, lanczos_steps=2)
    assert "not converged after 2 Lanczos steps" in few.smoothness.says


def test_exact_noise_is_the_variance_of_all_batches() -> None:
    """Against the mean over many draws, and for batch size 1 against the definition."""
    data = digits.load()
    torch.manual_seed(0)
    model = digits.mlp()
    x, y = data.train_x[:60], data.train_y[:60]
    one = exact_noise(model, nn.functional.cross_entropy, x, y, batch_size=1)
    gradients = []
    for i in range(60):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1]).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    stacked = torch.stack(gradients)
    assert one == pytest.approx(float((stacked - stacked.mean(0)).square().sum(1).mean()), rel=1e-5)
    whole = exact_noise(model, nn.functional.cross_entropy, x, y, batch_size=60)
    assert whole == pytest.approx(0.0, abs=1e-12)  # the one batch that there is
    drawn = [stacked[torch.randperm(60)[:5]].mean(0) for _ in range(3000)]
    seen = float((torch.stack(drawn) - stacked.mean(0)).square().sum(1).mean())
    assert exact_noise(model, nn.functional.cross_entropy, x, y, batch_size=5) == pytest.approx(seen, rel=0.05)


def test_the_model_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    before = {k: v.clone() for k, v in net.state_dict().items()}
    loader = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
    random = torch.get_rng_state()
    prsgd.probe(net, nn.functional.cross_entropy, loader)
    assert torch.equal(random, torch.get_rng_state())
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in net.parameters())


def test_a_shuffling_loader_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
    random = torch.get_rng_state()
    prsgd.probe(nn.Linear(6, 3), nn.functional.cross_entropy, torch.utils.data.DataLoader(data, 8, shuffle=True))
    assert not torch.equal(random, torch.get_rng_state())  # the module's own weights were drawn
    random = torch.get_rng_state()
    net = nn.Sequential(nn.Linear(6, 3))
    after = torch.get_rng_state()
    prsgd.probe(net, nn.functional.cross_entropy, torch.utils.data.DataLoader(data, 8, shuffle=True))
    assert torch.equal(after, torch.get_rng_state())


def test_dropout_has_one_hessian_for_all_products() -> None:
    """With 24 Lanczos steps in 22 dimensions a symmetric matrix is known to rounding; a changing one never is."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2)).double()
    loader = [(torch.randn(8, 3).double(), torch.randint(2, (8,))) for _ in range(2)]
    found = prsgd.probe(net, nn.functional.cross_entropy, loader, lanczos_steps=24)
    assert found.smoothness.says.startswith("the largest curvature of")


def test_two_batches_give_no_interval() -> None:
    """Both are equally far from their mean, whatever the noise."""
    torch.manual_seed(0)
    loader = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)]
    found = prsgd.probe(nn.Linear(3, 2), nn.functional.cross_entropy, loader).noise
    assert (found.low, found.high) == (0.0, math.inf)
    assert "over 2 batches only" in found.says


def test_a_short_last_batch_is_left_out() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(161, 3), torch.randint(2, (161,))
    model = nn.Linear(3, 2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16)
    whole = prsgd.probe(model, nn.functional.cross_entropy, loader)
    same = prsgd.probe(model, nn.functional.cross_entropy, batches_in_order(x[:160], y[:160], 16))
    assert whole.noise == same.noise
    assert whole.batch_size == 16


def batches_in_order(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size)))


def test_few_batches_overstate_the_curvature_and_the_interval_knows() -> None:
    """Late on a path the Hessian of few samples has larger eigenvalues than that of all."""
    data = digits.load()
    torch.manual_seed(0)
    model = digits.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        for x, y in batches_of(data.train_x, data.train_y, 16, seed=epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    whole = prsgd.probe(model, nn.functional.cross_entropy, batches_in_order(data.train_x, data.train_y, 359))
    few = prsgd.probe(model, nn.functional.cross_entropy, batches_of(data.train_x, data.train_y, 16), max_batches=8)
    assert few.smoothness.value > whole.smoothness.value
    assert few.smoothness.low < whole.smoothness.value


def in_a_group(rank: int) -> tuple[float, float | None]:
    torch.manual_seed(rank)
    loader = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(10 + 5 * rank)]  # they may differ
    found = prsgd.probe(nn.Linear(3, 2), nn.functional.cross_entropy, loader)
    return found.step_seconds, found.average_seconds


def test_in_a_process_group_it_times_an_average() -> None:
    (step, average), other = run_ranks(in_a_group, 2)
    assert other[0] == step > 0  # the slowest rank's, on all
    assert average is not None
    assert average > 0


def test_bad_input() -> None:
    model = nn.Linear(2, 1)

    def never(out: Tensor, _: Any) -> Tensor:
        return out.sum() * float("nan")

    pair = (torch.ones(1, 2), torch.ones(1))
    with pytest.raises(ValueError, match="loader must give at least two batches of one size, got 0"):
        prsgd.probe(model, itself, [])
    with pytest.raises(ValueError, match="the loss must be finite, got nan on batch 0"):
        prsgd.probe(model, never, [pair, pair])
    with pytest.raises(ValueError, match="model must have parameters that train"):
        prsgd.probe(nn.ReLU(), itself, [pair, pair])
    with pytest.raises(ValueError, match="has no curvature here, its Hessian is zero"):
        prsgd.probe(model, lambda out, _: out.sum(), [pair, pair])
    with pytest.raises(ValueError, match=r"loss_fn must give one number"):
        prsgd.probe(model, lambda out, _: torch.cat([out, out]), [pair, pair])
    with pytest.raises(ValueError, match=r"loader must give pairs \(x, y\), got Tensor"):
        prsgd.probe(model, itself, [pair[0], pair[0]])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="the gradient must be finite, got one that is not on batch 0"):
        prsgd.probe(model, lambda out, _: (out - out.detach()).abs().sqrt().sum(), [pair, pair])
    with pytest.raises(ValueError, match=r"best_value must be at most the loss, .* here, got 100"):
        prsgd.probe(model, lambda out, _: out.square().mean(), [pair, pair], best_value=100.0)
    with pytest.raises(ValueError, match="best_value must be finite, got nan"):
        prsgd.probe(model, itself, [pair, pair], best_value=math.nan)
    with pytest.raises(ValueError, match="lanczos_steps must be a whole number >= 2, got 1"):
        prsgd.probe(model, itself, [pair, pair], lanczos_steps=1)
    with pytest.raises(ValueError, match="x must have at least"):
        exact_noise(model, itself, pair[0], pair[1], batch_size=4)


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["probe", "--task", "synthetic", "--steps", "60", "--looks", "3", "--lr", "0.2", "--momentum", "0"]
    assert main(args) == 0
    shown = capsys.readouterr()
    assert all(len(line) <= 80 for line in (shown.out + shown.err).splitlines())
    assert [line.split()[0] for line in shown.err.splitlines()] == ["step", "0", "30", "60"]
    [command] = [line for line in shown.out.replace("\\\n", "").splitlines() if "prsgd plan" in line]
    assert main(command.split()[1:]) == 0  # what it says to type works
    capsys.readouterr()
    assert main([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["looks"] == 3
    assert found["smoothness"]["high"] is None
    (tmp_path / "probe.json").write_text(json.dumps(found))
    assert main(["plan", "--workers", "8", "--steps", "1000", "--probe", str(tmp_path / "probe.json"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problem"]["smoothness"] == found["smoothness"]["value"]
    known = synthetic.constants().noise / 8 * (4096 - 8) / 4095  # drawn without replacement
    assert found["noise"]["value"] == pytest.approx(known, rel=1e-5)
    assert found["smoothness"]["value"] == pytest.approx(2.0, rel=0.1)
    with pytest.raises(SystemExit) as stopped:
        main(["probe", "--looks", "1"])
    assert stopped.value.code == 2
    assert "looks must be a whole number >= 2, got 1" in capsys.readouterr().err
