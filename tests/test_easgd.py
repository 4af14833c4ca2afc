"""Elastic averaging: by hand, equal over gloo, with one exact mean at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import prsgd
from prsgd.lab import methods
from tests.problems import Point, walk
from tests.ranks import run_ranks


def test_two_workers_by_hand() -> None:
    path, local = walk([0.0, 4.0], schedule=prsgd.every(1), steps=2, averaging=prsgd.easgd(alpha=0.25, beta=0.5))
    # (0, 2), centre 0: to (0, 3/2); the mean is 1, the centre goes to 1/2.
    # (0, 11/4), centre 1/2: to (1/8, 35/16); the mean is 11/8, the centre goes to 15/16.
    assert path[0] == [0.0, 1.5]
    assert path[1] == [0.125, 2.1875]
    assert path[2] == [1.15625, 1.15625]  # the run ends with the exact mean
    assert [record.drift for record in local.records] == [1.0, 1.375**2, 1.03125**2]  # from the mean, as everywhere


def test_alpha_is_beta_over_n() -> None:
    """Then the sum of all workers' pulls is the centre's own move: nothing is lost between them."""
    how: dict[str, Any] = {"schedule": prsgd.every(1), "steps": 5, "lr": 0.3}
    targets = [0.0, 4.0, -2.0, 1.0]
    assert (
        walk(targets, averaging=prsgd.easgd(beta=0.8), **how)[0]
        == (walk(targets, averaging=prsgd.easgd(alpha=0.2, beta=0.8), **how)[0])
    )


@pytest.mark.parametrize("overlap", [1, 2])
def test_overlap_lands_by_the_delta_rule(overlap: int) -> None:
    """Closed after 2 - overlap steps; the pull of the snapshot is added to where the worker is by then."""
    path, _ = walk(
        [0.0, 4.0], schedule=prsgd.every(2), steps=2, overlap=overlap, averaging=prsgd.easgd(alpha=0.25, beta=0.5)
    )
    # overlap 1: snapshots (0, 2), pulls (0, -1/2); gradients of step 2 at (0, 2) are (0, -2): (0, 2 - 1/2 + 1).
    # overlap 2: snapshots (0, 0), no pull: (0, 3).
    assert path[1] == ([0.0, 2.5] if overlap == 1 else [0.0, 3.0])


def one_rank(rank: int) -> list[float]:
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found = []
    averaging = prsgd.easgd(alpha=0.25, beta=0.5)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2), averaging=averaging) as local:
        for _ in range(6):
            optimizer.zero_grad()
            model(4.0 * rank).backward()
            optimizer.step()
            found.append(model.x.item())
    return [*found, model.x.item(), *(record.drift or -1.0 for record in local.records)]


def test_over_gloo_it_is_the_same() -> None:
    ranks = run_ranks(one_rank, 2)
    path, local = walk([0.0, 4.0], schedule=prsgd.every(2), steps=6, averaging=prsgd.easgd(alpha=0.25, beta=0.5))
    assert [list(step) for step in zip(*ranks)][:7] == path
    assert ranks[0][7:] == ranks[1][7:] == [record.drift for record in local.records]


def test_bad_input() -> None:
    for bad in (0.0, 1.0, -0.1, True, "x"):
        with pytest.raises(ValueError, match=r"alpha must be in \(0, 1\), got"):
            prsgd.easgd(alpha=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"beta must be in \(0, 1\), got 2"):
        prsgd.easgd(beta=2)


def test_the_named_method() -> None:
    given = methods.Settings(period=8, lr=0.1, seconds=1.0, weights="uniform")
    assert methods.find("easgd").build(given).averaging == prsgd.easgd(None, 0.9)
