"""transformers' Trainer with ``local_sgd``, against the same loop by hand."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import prsgd
from tests.kept import Kept

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="transformers is not installed: the extra [integrations]"
    ),
    pytest.mark.xdist_group("transformers"),  # whose ranks import it once
]
RUNS = "tests.transformers_runs"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Kept]:
    with Kept(2) as kept:
        yield kept


def same(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected["model"].items():
        assert torch.equal(ours["model"][name], value), name
    for name in ("steps", "drifts"):
        assert ours[name] == expected[name][-len(ours[name]) :]
    assert ours["bytes"] == expected["bytes"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": 1, "gradient_accumulation_steps": 2, "eval_strategy": "epoch"},
        {"overlap": 3, "bf16": True, "optim": "sgd", "eval_strategy": "epoch"},
        {"overlap": 1, "schedule": prsgd.per_worker([2, 3]), "logging_steps": 100, "eval_strategy": "epoch"},
        {"overlap": 2, "torch_compile": True, "torch_compile_backend": "eager"},
    ],
    ids=str,
)
def test_the_trainer_is_the_loop_by_hand(ranks: Kept, settings: dict[str, Any], tmp_path: Path) -> None:
    results = ranks.run(f"{RUNS}:both", str(tmp_path), settings)
    for trainer, hand in results:
        same(trainer, hand)
        assert trainer["seen"] == hand["seen"]
    assert results[0][0]["seen"] == results[1][0]["seen"]
    last = results[0][0]["log"][-1]
    assert last["prsgd/rounds"] == len(hand["steps"])
    assert last["prsgd/bytes_sent"] == hand["bytes"]
    assert last["prsgd/drift"] == hand["drifts"][-1]
    assert "schedule" in settings or any("prsgd/drift" in entry and "loss" in entry for entry in results[0][0]["log"])


@pytest.mark.parametrize(
    ("settings", "dies"),
    [
        ({"overlap": 2, "save_strategy": "steps", "save_steps": 5}, 13),  # in the second epoch, in mid-round
        ({"overlap": 1, "save_strategy": "epoch", "gradient_accumulation_steps": 3, "optim": "sgd"}, 7),
    ],
    ids=str,
)
def test_goes_on_from_a_checkpoint_to_the_last_bit(
    ranks: Kept, settings: dict[str, Any], dies: int, tmp_path: Path
) -> None:
    for again, whole in ranks.run(f"{RUNS}:resumed", str(tmp_path), settings, dies):
        same(again, whole)
    runs = pytest.importorskip(RUNS)
    average, first, second = (runs.saved(f"{tmp_path}/parts", name) for name in ("model", "0", "1"))
    for name, value in average.items():
        torch.testing.assert_close(value.double(), (first[name].double() + second[name].double()) / 2)
    with Kept(1) as one:
        (result,) = one.run(f"{RUNS}:alone", str(tmp_path), settings)
    assert "all workers go on from the average" in result["said"][0]


def test_the_best_model_is_loaded_at_the_end(ranks: Kept, tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5, "overlap": 1,
        "load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 0.05,
    }  # fmt: skip
    results = ranks.run(f"{RUNS}:by_trainer", str(tmp_path), settings)
    safetensors = pytest.importorskip("safetensors.torch")
    best = safetensors.load_file(f"{results[0]['best']}/model.safetensors")
    for result in results:
        assert all(torch.equal(result["model"][name], value) for name, value in best.items())


def test_steps_that_a_worker_skips(ranks: Kept, tmp_path: Path) -> None:
    first, second = ranks.run(f"{RUNS}:skipping", str(tmp_path))
    assert first["own"] == first["global_step"] == second["own"] + 2
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())


def test_a_trainer_that_makes_an_accelerator_anew_stays_without_ddp(ranks: Kept, tmp_path: Path) -> None:
    assert ranks.run(f"{RUNS}:accelerator_made_anew", str(tmp_path)) == ["BertForSequenceClassification"] * 2


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("twice", "UsageError: local_sgd(trainer) was called before"),
        ("ddp", "ValueError: model must not be in DistributedDataParallel"),
        ("fsdp", "ValueError: model is in FullyShardedDataParallel"),
        ("trained", "UsageError: local_sgd(trainer) comes before the first trainer.train()"),
        ("freezing", "UsageError: what the optimizer trains changed in the middle of train()"),
        ("compiled", "ValueError: trainer must have the model as it is, not torch.compile(model)"),
        ("tokens", "ValueError: include_num_input_tokens_seen must be 'no'"),
        ("lengths", "ValueError: the workers' loaders must have as many batches each, they have [8, 7]"),
        ("schedule", "ValueError: schedule must be a schedule such as every(8), got 8"),
        ("overlap", "ValueError: overlap must be at most the period"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ranks: Kept, kind: str, said: str, tmp_path: Path) -> None:
    for told in ranks.run(f"{RUNS}:refused", str(tmp_path), kind):
        assert told.startswith(said)
        assert "\n" not in told


def test_a_worker_that_raises_ends_all(ranks: Kept, tmp_path: Path) -> None:
    first, second = ranks.run(f"{RUNS}:one_fails", str(tmp_path))
    assert second == "KeyError: 'no more'"
    assert first.startswith("PeerError: round 3")
