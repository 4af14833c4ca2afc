"""Models that ``torch.compile`` has wrapped, whole or in part: they train, and fit to those that are as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import prsgd
from prsgd.core.start import describe
from prsgd.replicas.host import OwnModel

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
NORM = [f"1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def whole(model: nn.Sequential) -> nn.Module:
    compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]  # a module gives a module
    return compiled


def part(model: nn.Sequential) -> nn.Module:
    model[0] = whole(model[0])  # type: ignore[arg-type]  # a Linear is no Sequential
    return model


def as_it_is(model: nn.Sequential) -> nn.Module:
    return model


Wrapper = Callable[[nn.Sequential], nn.Module]
COMPILED = pytest.mark.parametrize("wrap", [whole, part])


def run_of(wrap: Wrapper) -> tuple[nn.Module, torch.optim.Optimizer, prsgd.LocalSGD]:
    model = wrap(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    fragments = ["0.*", "1.*"]
    return model, optimizer, prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4), overlap=1, fragments=fragments)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x: Tensor = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()


@COMPILED
def test_it_is_saved_and_told_of_by_the_names_of_the_model_itself(wrap: Wrapper, tmp_path: Path) -> None:
    model, optimizer, local = run_of(wrap)
    with local:
        train(model, optimizer, range(6))
        prsgd.save(local, model, optimizer, tmp_path)
    assert sorted(load_file(tmp_path / "model.safetensors")) == sorted(NAMES + NORM)
    assert describe(OwnModel(model)) == describe(OwnModel(network()))  # which is what workers compare
    some = torch.optim.SGD([next(model.parameters())], lr=0.1)
    with pytest.raises(ValueError, match=r"must own the model's parameters, '0\.bias' is in none"):
        prsgd.LocalSGD(model, some, schedule=prsgd.every(4))
    model.register_buffer("seen", torch.zeros(2))
    found = prsgd.LocalSGD(model, torch.optim.SGD(model.parameters(), lr=0.1), schedule=prsgd.every(1))
    model.register_buffer("seen", torch.zeros(3))
    with pytest.raises(ValueError, match="buffer 'seen' must keep its shape"), found:
        train(model, found.optimizers[0], range(1))


@COMPILED
@pytest.mark.parametrize("back", [False, True])
def test_a_run_goes_on_with_or_without_it(wrap: Wrapper, back: bool, tmp_path: Path) -> None:
    begun, gone_on = (as_it_is, wrap) if back else (wrap, as_it_is)
    model, optimizer, local = run_of(begun)
    with local:
        train(model, optimizer, range(6))
        prsgd.save(local, model, optimizer, tmp_path)
        train(model, optimizer, range(6, 12))
    other, optimizer, local = run_of(gone_on)
    prsgd.load(local, other, optimizer, tmp_path)
    with local:
        train(other, optimizer, range(6, 12))
    assert local.step == 12
    assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("mode", ["loop", "vmap"])
def test_a_fleet_of_them(mode: str) -> None:
    results = []
    for model in (nn.Linear(3, 1), whole(nn.Sequential(nn.Linear(3, 1)))):
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        fleet = prsgd.Fleet(model, 2, mode=mode)
        assert [name.rpartition(".")[2] for name in fleet.named_parameters(0)] == ["weight", "bias"]
        assert not any("_orig_mod" in name for name in fleet.named_parameters(0))
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1)
        with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(2)):
            for step in range(3):
                optimizer.zero_grad()
                x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(step))
                fleet.backward(lambda out, y: (out - y).square().mean(), x, torch.zeros(2, 5, 1))
                optimizer.step()
        results.append(fleet.rows.clone())
    assert torch.equal(*results)
