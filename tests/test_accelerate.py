"""accelerate's example of local SGD: our ``LocalSGD`` in the place of its own."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from tests.kept import Kept

pytestmark = [
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed: the extra [integrations]"),
    pytest.mark.xdist_group("accelerate"),  # whose ranks import it once
]
RUNS = "tests.accelerate_runs"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Kept]:
    with Kept(2) as kept:
        yield kept


def same(first: dict[str, Any], second: dict[str, Any]) -> None:
    for name, value in second["model"].items():
        assert torch.equal(first["model"][name], value), name


def test_it_gives_the_bits_of_accelerates_own(ranks: Kept) -> None:
    """Where that can: no buffers, no accumulation, no overlap."""
    for ours, theirs in ranks.run(f"{RUNS}:compared", ["ours", "theirs"], {}):
        same(ours, theirs)
        assert ours["rounds"] == [4, 7] * 3


@pytest.mark.parametrize(
    "settings",
    [
        {"norm": True},
        {"overlap": 2, "accumulate": 2},
        {"overlap": 1, "norm": True, "precision": "bf16"},
        {"dynamo": "eager"},
    ],
    ids=str,
)
def test_it_is_the_loop_by_hand(ranks: Kept, settings: dict[str, Any]) -> None:
    results = ranks.run(f"{RUNS}:compared", ["ours", "hand"], settings)
    for ours, hand in results:
        same(ours, hand)
        assert ours["rounds"] == hand["rounds"]
    same(results[0][0], results[1][0])


def test_a_look_shows_the_average(ranks: Kept) -> None:
    assert ranks.run(f"{RUNS}:looked") == [(True, True)] * 2


def test_goes_on_from_the_workers_states_to_the_last_bit(ranks: Kept) -> None:
    assert ranks.run(f"{RUNS}:resumed") == [True, True]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("unprepared", "ValueError: model must have an optimizer: give both to accelerator.prepare() first"),
        ("fsdp", "ValueError: model has its '0' in FullyShardedDataParallel"),
        ("fsdp, prepared", "ValueError: model has its 'module' in FullyShardedDataParallel"),
        ("compiled DDP", "ValueError: model must not be in DistributedDataParallel"),
        ("steps", "ValueError: period must be a whole number >= 1, got 0"),
        ("schedule", "ValueError: schedule must be a schedule such as every(8), got 'often'"),
        ("swapped", "ValueError: accelerator must be an accelerate.Accelerator, got DistributedDataParallel"),
        ("optimizer", "ValueError: model must be an nn.Module, got AcceleratedOptimizer"),
        ("disabled", "enabled False, local NoneType"),
        ("", "enabled True, local LocalSGD"),
    ],
)
def test_what_it_says(ranks: Kept, kind: str, said: str) -> None:
    for told in ranks.run(f"{RUNS}:said", kind):
        assert told.startswith(said)
        assert "\n" not in told


def test_one_process_is_one_worker() -> None:
    with Kept(1) as one:
        assert one.run(f"{RUNS}:said", "") == ["enabled True, local LocalSGD"]
