"""Stopping anywhere and going on gives the run that was never stopped, to the last bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import prsgd
from tests.problems import CHANGING, batch, model, take_step
from tests.ranks import run_ranks

CASES: list[dict[str, Any]] = [
    {"schedule": prsgd.every(4)},
    {"schedule": prsgd.every(4), "overlap": 1},
    {"schedule": prsgd.every(4), "overlap": 3},
    {"schedule": prsgd.every(3), "overlap": 3},
    {"schedule": prsgd.per_worker([5, 2]), "overlap": 2},
    {"schedule": prsgd.every(4), "optimizer_state": "average", "overlap": 1},
    {"schedule": prsgd.every(2), "optimizer_state": {"momentum_buffer": 2}, "overlap": 1},
    {"schedule": prsgd.once()},
    *({"schedule": schedule, "overlap": overlap} for schedule in CHANGING.values() for overlap in (0, 2)),
]


def run(options: dict[str, Any], steps: int, stop_at: int | None = None, kind: str = "batchnorm") -> Any:
    """Train; with ``stop_at`` save everything there, throw all away, load it into new objects and go on. A ``clock``
    among the options makes one."""

    def build() -> tuple[prsgd.Fleet, torch.optim.Optimizer, prsgd.LocalSGD]:
        fleet = prsgd.Fleet(model(kind), 2)
        optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2, momentum=0.9)
        own = {**options, "clock": options["clock"]()} if "clock" in options else options
        return fleet, optimizer, prsgd.LocalSGD(fleet, optimizer, **own)

    fleet, optimizer, local = build()
    records = []
    local.start()
    taken = dict.fromkeys(fleet.workers, 0)
    for tick in range(steps):
        if tick == stop_at:
            saved = pickle.dumps((fleet.state_dict(), optimizer.state_dict(), local.state_dict()))
            records += local.records
            fleet, optimizer, local = build()
            fleet_state, optimizer_state, local_state = pickle.loads(saved)
            fleet.load_state_dict(fleet_state)
            optimizer.load_state_dict(optimizer_state)
            local.load_state_dict(copy.deepcopy(local_state))
            local.start()
        take_step(fleet, optimizer, local, taken)
    local.finish()
    buffers = [b.clone() for m in fleet.modules for b in m.buffers()]
    done = {
        r.round: (r.step, r.period, r.overlap, r.drift, r.loss, r.samples, r.noise, r.reason)
        for r in [*records, *local.records]
    }
    return fleet.rows.clone(), buffers, done


def same(a: Any, b: Any) -> None:
    assert torch.equal(a[0], b[0])
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
    assert a[2] == b[2]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_stop_anywhere(options: dict[str, Any]) -> None:
    kind = "dropout" if options["schedule"] == prsgd.once() else "batchnorm"
    unbroken = run(options, 13, kind=kind)
    for stop_at in range(1, 13):
        same(run(options, 13, stop_at=stop_at, kind=kind), unbroken)


def rank_run(rank: int, options: dict[str, Any], stop_at: int | None) -> Any:
    return run(options, 13, stop_at=stop_at)


@pytest.mark.parametrize("options", CASES[2:4], ids=str)
def test_stop_in_flight_over_gloo(options: dict[str, Any]) -> None:
    unbroken = run_ranks(rank_run, 2, options, None)
    for stop_at in (6, 7):
        for mine, theirs in zip(run_ranks(rank_run, 2, options, stop_at), unbroken):
            same(mine, theirs)


def test_state_is_plain() -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        if isinstance(value, list | tuple):
            return all(map(plain, value))
        return value is None or isinstance(value, bool | int | float | str | torch.Tensor)

    fleet = prsgd.Fleet(model("batchnorm"), 2)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3), overlap=3) as local:
        for t in range(4):
            pairs = [batch(w, t) for w in range(2)]
            optimizer.zero_grad()
            losses = fleet.backward(nn.functional.cross_entropy, [x for x, _ in pairs], [y for _, y in pairs])
            optimizer.step()
            local.log(loss=losses)
        assert local.state_dict()["lanes"][0]["flight"] is not None
        assert plain(local.state_dict())
        assert plain(fleet.state_dict())


def test_a_state_of_other_workers_is_refused() -> None:
    fleet = prsgd.Fleet(model(), 3)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.2)
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(3)) as local:
        state, fleet_state = local.state_dict(), fleet.state_dict()
    other = prsgd.Fleet(model(), 2)
    again = prsgd.LocalSGD(other, torch.optim.SGD(other.parameters(), lr=0.2), schedule=prsgd.every(3))
    with pytest.raises(ValueError, match=r"state is of a run with workers \[0, 1, 2\], this one has \[0, 1\]"):
        again.load_state_dict(state)
    with pytest.raises(ValueError, match=r"state must be of workers \[0, 1\], got \[0, 1, 2\]"):
        other.load_state_dict(fleet_state)
