"""``prsgd.save`` and ``prsgd.load`` where one process is enough: what is refused, and in which words."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import prsgd

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
}
Run = tuple[nn.Module, torch.optim.Optimizer, prsgd.LocalSGD]


def new(kind: str = "AdamW", model: nn.Module | None = None, **options: Any) -> Run:
    model = nn.Linear(3, 2) if model is None else model
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, prsgd.LocalSGD(model, optimizer, **{"schedule": prsgd.every(2), **options})


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


def saved(folder: Path, run: Run, steps: int = 3, **others: Any) -> None:
    model, optimizer, local = run
    with local:
        for _ in range(steps):
            step(model, optimizer)
        prsgd.save(local, model, optimizer, folder, **others)


@pytest.mark.parametrize(("before", "now"), list(itertools.permutations(OPTIMIZERS, 2)))
@pytest.mark.parametrize("by", ["load", "resumable"])
def test_the_state_of_another_kind_of_optimizer_is_refused_before_anything_changes(
    before: str, now: str, by: str, tmp_path: Path
) -> None:
    saved(tmp_path, new(before))
    model, optimizer, local = new(now)
    was = deepcopy((model.state_dict(), optimizer.state_dict()))
    go_on = {
        "load": lambda: prsgd.load(local, model, optimizer, tmp_path),
        "resumable": prsgd.resumable(tmp_path, local, model=model, optimizer=optimizer).__enter__,
    }
    said = f"^the state is of a run with {before}, this one has {now}: an optimizer goes on from the state of its own"
    with pytest.raises(prsgd.CheckpointError, match=said):
        go_on[by]()
    assert repr((model.state_dict(), optimizer.state_dict())) == repr(was)


def test_a_state_of_the_users_own_keeping_is_refused_too() -> None:
    with new("SGD")[2] as local:
        state = local.state_dict()
    with pytest.raises(prsgd.CheckpointError, match="of a run with SGD, this one has AdamW"):
        new()[2].load_state_dict(state)
