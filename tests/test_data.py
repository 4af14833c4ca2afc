"""Shards: every sample once an epoch at most, the same whoever hosts them."""

from __future__ import annotations

import pytest
import torch

from prsgd.data.shards import Shards
from prsgd.data.splits import Split, dirichlet, iid, parse, pool


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


def test_a_range_of_workers_that_cannot_be() -> None:
    x = torch.arange(10)
    for workers in (range(0, 4, 2), range(4, 6)):
        with pytest.raises(ValueError, match=r"workers must be a range within 0 ... 3, got range"):
            Shards(x, x, num_workers=4, batch_size=2, workers=workers)
    with pytest.raises(ValueError, match="num_workers must be at most the number of samples 10, got 11"):
        Shards(x, x, num_workers=11, batch_size=1)


@pytest.mark.parametrize("split", [pool(), iid(), dirichlet(0.2)], ids=str)
def test_splits_deal_alike_in_every_process_and_epoch(split: Split) -> None:
    labels = torch.arange(200) % 5
    first = split.deal(labels, 4, 50, seed=1, epoch=3)
    assert first.shape == (4, 50)
    assert torch.equal(first, split.deal(labels.clone(), 4, 50, seed=1, epoch=3))
    assert not torch.equal(first, split.deal(labels, 4, 50, seed=1, epoch=4))
    assert not torch.equal(first, split.deal(labels, 4, 50, seed=2, epoch=3))
    for row in first:
        assert len(set(row.tolist())) == 50  # no sample twice in an epoch
    if split == iid():
        assert sorted(first.flatten().tolist()) == list(range(200))


def test_dirichlet_shares_are_equal_disjoint_and_unlike() -> None:
    labels = torch.arange(1000) % 10
    shares = dirichlet(0.1).owned(labels, 8, seed=0)
    assert [len(s) for s in shares] == [125] * 8
    assert len(set(torch.cat(shares).tolist())) == 1000
    most = [int(labels[s].bincount().max()) for s in shares]
    even = [int(labels[s].bincount().max()) for s in dirichlet(1e6).owned(labels, 8, seed=0)]
    assert sum(most) > 2 * sum(even)
    # Several epochs go through a share again and again, each sample once a turn.
    turns = torch.cat([dirichlet(0.1).deal(labels, 8, 100, seed=0, epoch=e) for e in range(5)], dim=1)
    for row, share in zip(turns, shares):
        assert sorted(row[:125].tolist()) == share.tolist()
        assert row.bincount(minlength=1000)[share].tolist() == [4] * 125


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.zeros(40, 10), "one class number per sample"),
        (torch.zeros(40), "one class number per sample"),
        (torch.zeros(3, dtype=torch.long), "at most the number of samples 3, got 5"),
    ],
)
def test_dirichlet_of_what_has_no_classes(labels: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dirichlet(0.5).owned(labels, 5, seed=0)


@pytest.mark.parametrize("text", ["idd", "dirichlet", "dirichlet:0", "dirichlet:x", "pool:3"])
def test_splits_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="split must"):
        parse(text)
