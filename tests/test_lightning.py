"""Lightning's Trainer with ``LocalSGDStrategy``, against the same loop by hand."""

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
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed: the extra [integrations]"),
    pytest.mark.xdist_group("lightning"),  # whose ranks import it once
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Kept]:
    with Kept(2) as kept:
        yield kept


def same(ours: dict[str, Any], by_hand: dict[str, Any]) -> None:
    for name, value in by_hand["model"].items():
        assert torch.equal(ours["model"][name], value), name
    for name in ("steps", "drifts", "bytes"):
        assert ours[name] == by_hand[name]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": 1, "optimizer": "sgd"},
        {"overlap": 3, "accumulate": 2},
        {"overlap": 1, "precision": "bf16-mixed", "compiled": True},
        {"overlap": 2, "precision": "16-mixed", "scale": 100.0},
        {"overlap": 1, "periods": (2, 3), "optimizer": "sgd"},
        {"overlap": 1, "batches": (5, 9)},
        {"batches": (8, 5), "accumulate": 3, "precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_the_trainer_is_the_loop_by_hand(ranks: Kept, settings: dict[str, Any]) -> None:
    results = ranks.run("tests.lightning_runs:both", settings)
    for trainer, hand in results:
        same(trainer, hand)
    if settings.get("precision") == "16-mixed":
        assert results[0][0]["steps"][-1] < results[0][0]["global_step"]  # some were skipped


def test_a_training_warns_of_no_collective(ranks: Kept) -> None:
    assert ranks.run("tests.lightning_runs:warned") == [[], []]


def test_an_overlap_that_chooses_itself(ranks: Kept) -> None:
    results = ranks.run("tests.lightning_runs:both", {"overlap": "auto", "period": 6})
    (first, _), (second, _) = results
    assert first["steps"] == second["steps"]
    assert sorted(set(first["steps"])) == [6, 12, 18, 21]  # the last one lands in its step, or blocks after it as well
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())


def test_validation_and_checkpoints_see_the_average(ranks: Kept, tmp_path: Path) -> None:
    (first, hand), (second, _) = ranks.run("tests.lightning_runs:both", {"overlap": 2}, True)
    assert [first["seen"][i] for i in (0, 2, 4)] == hand["seen"] == [second["seen"][i] for i in (0, 2, 4)]
    same(first, hand)  # looking changes nothing
    metrics = first["metrics"]
    assert metrics["prsgd/rounds"] == len(hand["steps"])
    assert metrics["prsgd/bytes_sent"] == hand["bytes"]
    assert metrics["prsgd/drift"] == pytest.approx(hand["drifts"][-1])
    assert "val_loss" in metrics


@pytest.mark.parametrize(
    ("settings", "every", "dies"),
    [
        ({"overlap": 2}, None, 16),  # after two epochs, in the middle of the fourth round
        ({"overlap": 1, "optimizer": "sgd"}, 3, 11),  # in the middle of the second epoch, with an average on its way
        ({"precision": "16-mixed", "scale": 100.0, "accumulate": 2}, None, 9),
        ({"overlap": 1, "batches": (5, 9)}, None, 11),
    ],
    ids=str,
)
def test_goes_on_from_a_checkpoint_to_the_last_bit(
    ranks: Kept, settings: dict[str, Any], every: int | None, dies: int, tmp_path: Path
) -> None:
    results = ranks.run("tests.lightning_runs:resumed", settings, str(tmp_path), every, dies)
    for result in results:
        tail = len(result["got"]["steps"])
        assert tail <= len(result["expected"]["steps"])
        expected = {name: result["expected"][name][-tail:] for name in ("steps", "drifts")}
        same(result["got"], {**result["expected"], **expected})
        mains = [file for file in result["files"] if ".workers" not in file]
        assert result["files"] == sorted(f"{name}{end}" for name in mains for end in ENDS)
    for name, value in results[0]["own"].items():
        average = results[0]["average"][name].double()
        if value.is_floating_point() and "running_var" not in name:
            torch.testing.assert_close(average, (value.double() + results[1]["own"][name].double()) / 2)


ENDS = ("", ".workers/0.ckpt", ".workers/1.ckpt")


def test_another_number_of_workers_goes_on_from_the_average(ranks: Kept, tmp_path: Path) -> None:
    ranks.run("tests.lightning_runs:resumed", {}, str(tmp_path), None, 16)
    with Kept(1) as one:
        (result,) = one.run("tests.lightning_runs:alone", str(tmp_path))
    assert "it was saved by 2 workers, here are 1" in result["said"][0]
    assert result["epoch"] == 3
    assert result["round"] > 3


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_two_optimizers_by_hand_with_toggles_and_closures(ranks: Kept, overlap: int) -> None:
    for trainer, hand in ranks.run("tests.lightning_runs:manual", overlap):
        same(trainer, hand)


def test_early_stopping_stops_all(ranks: Kept) -> None:
    first, second = ranks.run("tests.lightning_runs:stopped_early")
    assert 1 <= first["epoch"] == second["epoch"] < 10
    assert all(torch.equal(value, second["model"][name]) for name, value in first["model"].items())


def test_loggers_hear_of_rounds(ranks: Kept, tmp_path: Path) -> None:
    lines = ranks.run("tests.lightning_runs:logged", str(tmp_path))[0]
    rows = [dict(zip(lines[0].split(","), line.split(","))) for line in lines[1:]]
    assert [row["prsgd/rounds"] for row in rows if row["prsgd/rounds"]] == ["1", "2", "3", "4", "6"]


def test_a_search_for_the_learning_rate_is_a_run_of_its_own(ranks: Kept) -> None:
    first, second = ranks.run("tests.lightning_runs:searched")
    assert first["steps"] == [4, 8, 12, 16, 20, 21]
    assert first["lr"] == second["lr"] != 0.01


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sync_batchnorm", "ValueError: sync_batchnorm must be off with LocalSGDStrategy"),
        ("ema", "ValueError: callbacks must not have EMAWeightAveraging with LocalSGDStrategy"),
        ("swa", "ValueError: callbacks must not have StochasticWeightAveraging with LocalSGDStrategy"),
        ("finetuning", "UsageError: what the optimizers train changed in the middle of fit"),
        ("lbfgs", "ValueError: overlap must be 0 with LBFGS, which takes several gradients in a step, got 1"),
        ("ddp", "ValueError: model must not have its 'net' in DistributedDataParallel"),
        ("fsdp", "ValueError: model has its 'net' in FullyShardedDataParallel"),
        ("period", "ValueError: overlap must be at most the period"),
        (
            "max_steps",
            "ValueError: max_steps counts each worker's own steps: use max_epochs, since the workers' loaders",
        ),
        ("val_check_interval", "ValueError: val_check_interval must be 1.0 where epochs differ in length"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(ranks: Kept, kind: str, said: str) -> None:
    for told in ranks.run("tests.lightning_runs:refused", kind):
        assert told.startswith(said)
        assert "\n" not in told


def test_a_worker_that_raises_ends_all(ranks: Kept) -> None:
    first, second = ranks.run("tests.lightning_runs:one_fails")
    assert second == "KeyError: 'no more'"
    assert first.startswith("PeerError: round 3")


def test_fabrics_wrapper_is_not_in_names() -> None:
    from lightning.fabric.wrappers import _FabricModule

    from prsgd.integrations.lightning import FabricStrategy

    model: Any = _FabricModule(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)), FabricStrategy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4), fragments=["0.*", "1.*"]) as local:
        for _ in range(4):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert {record.fragment for record in local.records} == {0, 1}


def test_fabric(ranks: Kept) -> None:
    for fabric, plain in ranks.run("tests.lightning_runs:by_fabric"):
        same(fabric, plain)
