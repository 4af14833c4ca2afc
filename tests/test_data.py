"""Shards: every sample once an epoch at most, the same whoever hosts them."""

from __future__ import annotations

import pytest
import torch

from prsgd.data import Shards


def test_an_epoch_is_one_permutation_shared_by_all() -> None:
    x, y = torch.arange(100.0).view(50, 2), torch.arange(50)
    shards = Shards(x, y, num_workers=4, batch_size=3)
    steps = list(shards.epoch(1))
    assert len(steps) == shards.steps_per_epoch == 4
    for xs, ys in steps:
        assert xs.shape == (4, 3, 2)
        assert torch.equal(xs, x[ys])
    seen = torch.cat([ys.flatten() for _, ys in steps]).tolist()
    assert len(seen) == len(set(seen)) == 48
    assert [ys.tolist() for _, ys in shards.epoch(1)] == [ys.tolist() for _, ys in steps]
    assert [ys.tolist() for _, ys in shards.epoch(2)] != [ys.tolist() for _, ys in steps]


def test_hosts_see_their_own_workers() -> None:
    x = torch.arange(40)
    whole = torch.stack([xs for xs, _ in Shards(x, x, num_workers=4, batch_size=2, seed=3).epoch(5)])
    parts = [
        torch.stack([xs for xs, _ in Shards(x, x, num_workers=4, batch_size=2, seed=3, workers=hosted).epoch(5)])
        for hosted in (range(3), range(3, 4))
    ]
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_bad_input() -> None:
    x = torch.arange(10)
    with pytest.raises(ValueError, match="x and y must have the same length, got 10 and 9"):
        Shards(x, x[:9], num_workers=2, batch_size=2)
    with pytest.raises(ValueError, match="batch_size must be at most 5 for 10 samples and 2 workers, got 6"):
        Shards(x, x, num_workers=2, batch_size=6)
