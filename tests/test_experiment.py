"""One run: the same wherever it runs, stopped and continued to the last bit, and honest in what it writes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

import prsgd
from prsgd.data.shards import Shards
from prsgd.errors import CheckpointError
from prsgd.lab.checkpoint import fingerprint
from prsgd.lab.checks import check
from prsgd.lab.config import Config, lr_at
from prsgd.lab.folder import prepare
from prsgd.lab.processes import train
from prsgd.lab.progress import Progress, Stopped
from prsgd.lab.run import run
from prsgd.records import Summary
from prsgd.tasks import digits

pytestmark = pytest.mark.usefixtures("warm_launch")

QUICK = Config(task="digits", workers=4, period=4, epochs=3).resolve()


def go(config: Config, folder: Path, should_stop: Callable[[], bool] | None = None) -> Summary:
    if not (folder / "config.json").exists():
        prepare(config, folder)
    return run(config, folder, should_stop=should_stop)


def after(num_calls: int) -> Callable[[], bool]:
    calls = iter(range(10**9))
    return lambda: next(calls) >= num_calls


def lines(folder: Path) -> list[dict[str, Any]]:
    """What was recorded, without what a clock says."""
    found = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith("seconds")} for line in found]


def test_a_run_is_the_loop_a_user_would_write(tmp_path: Path) -> None:
    summary = go(QUICK, tmp_path)
    data = digits.load()
    torch.manual_seed(0)
    fleet = prsgd.Fleet(digits.mlp(), 4)
    optimizer = torch.optim.SGD(fleet.parameters(), lr=0.1, momentum=0.9)
    shards = Shards(data.train_x, data.train_y, num_workers=4, batch_size=8)
    steps = 3 * shards.steps_per_epoch
    tick = 0
    with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(4)) as local:
        for epoch in range(3):
            for x, y in shards.epoch(epoch):
                optimizer.param_groups[0]["lr"] = 0.1 / (
                    1 if tick < steps / 2 else 10 if tick < 11 * steps / 12 else 100
                )
                optimizer.zero_grad()
                fleet.backward(cross_entropy, x, y)
                optimizer.step()
                tick += 1
    model = fleet.modules[0]
    with torch.no_grad():
        loss = float(cross_entropy(model(data.train_x), data.train_y))
        accuracy = float((model(data.test_x).argmax(1) == data.test_y).float().mean())
    assert summary.train_loss == pytest.approx(loss, rel=1e-5)
    assert summary.test_score == pytest.approx(accuracy)
    assert (summary.steps, summary.rounds) == (steps, len(local.records))
    assert summary.bytes_sent == sum(r.bytes_sent for r in local.records)
    assert summary.samples == 3 * shards.steps_per_epoch * 4 * 8
    written = lines(tmp_path)
    assert [e["epoch"] for e in written if e["kind"] == "evaluation"] == [0, 1, 2, 3]
    assert len([e for e in written if e["kind"] == "average"]) == summary.rounds
    assert json.loads((tmp_path / "summary.json").read_text()) == dataclasses.asdict(summary)
    loaded = digits.mlp()
    loaded.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert fingerprint([*loaded.parameters()]) == summary.weights_sha256
    assert summary.first_train_loss == pytest.approx(2.3, abs=0.05)  # ln 10, about


def test_adamw_with_its_usual_recipe_is_the_loop_a_user_would_write(tmp_path: Path) -> None:
    config = Config(task="digits", optimizer="adamw", workers=1, period=5, epochs=2).resolve()
    assert (config.lr, config.recipe, config.warmup, config.clip) == (1e-3, "cosine", 0.05, 1.0)
    summary = go(config, tmp_path)
    data = digits.load()
    torch.manual_seed(0)
    model = digits.mlp()
    weights, vectors = ([p for p in model.parameters() if (p.dim() > 1) == wanted] for wanted in (True, False))
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    shards = Shards(data.train_x, data.train_y, num_workers=1, batch_size=8)
    steps, tick = 2 * shards.steps_per_epoch, 0
    rising = -(-steps // 20)
    for epoch in range(2):
        for x, y in shards.epoch(epoch):
            gone = (tick - rising) / (steps - rising)
            falling = 0.1 + 0.45 * (1 + math.cos(math.pi * gone))
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * ((tick + 1) / rising if tick < rising else falling)
            optimizer.zero_grad()
            cross_entropy(model(x[0]), y[0]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tick += 1
    written = load_file(tmp_path / "model.safetensors")
    for name, found in model.state_dict().items():
        torch.testing.assert_close(written[name], found, rtol=0, atol=1e-6)
    assert summary.steps == steps


def test_a_batch_in_parts_is_the_batch(tmp_path: Path) -> None:
    whole = go(QUICK, tmp_path / "whole")
    parts = go(dataclasses.replace(QUICK, accumulate=4), tmp_path / "parts")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name, found in ours.items():
        torch.testing.assert_close(theirs[name], found, rtol=0, atol=1e-4)
    assert (parts.rounds, parts.samples) == (whole.rounds, whole.samples)
    assert parts.train_loss == pytest.approx(whole.train_loss, rel=1e-3)
    losses = [[line["loss"] for line in lines(tmp_path / name) if "loss" in line] for name in ("whole", "parts")]
    assert losses[1][:5] == pytest.approx(losses[0][:5], rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "adam"}, "optimizer must be one of 'sgd', 'adamw', got 'adam'"),
        ({"recipe": "linear"}, "recipe must be one of 'drops', 'cosine', got 'linear'"),
        (
            {"warmup": 1.0},
            r"warmup must be a whole number of steps >= 0, or a fraction of the run in \[0, 1\), got 1.0",
        ),
        ({"warmup": -1}, "warmup must be a whole number of steps >= 0"),
        ({"warmup": True}, "warmup must be a whole number of steps >= 0"),
        ({"clip": -0.5}, r"clip must be in \[0, 1e\+30\), got -0.5"),
        ({"clip": float("nan")}, r"clip must be in \[0, 1e\+30\), got nan"),
        ({"accumulate": 3}, "accumulate must divide the batch size 8, of which it makes parts, got 3"),
        ({"accumulate": 0}, "accumulate must be a whole number >= 1, got 0"),
        ({"method": "pr-sgd-growing", "warmup": 3}, "method pr-sgd-growing has no warmup, got 3"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config(task="digits", **changes).resolve()


def test_a_resolved_config_stays_as_it_is() -> None:
    """A run under torchrun, and one that is continued, is resolved again."""
    for given in ({}, {"optimizer": "adamw"}, {"optimizer": "adamw", "clip": 0}, {"method": "pr-sgd-growing"}):
        config = Config.from_dict(given).resolve()
        assert config.resolve() == config
        assert Config.from_dict(json.loads(config.to_json())) == config


CASES = [
    {},
    {"overlap": 1, "method": "pr-sgd-momentum"},
    {"overlap": 3, "split": "dirichlet:0.3"},
    {"method": "pr-sgd-growing", "period": None, "recipe": None, "warmup": None, "split": "pool"},
    {"method": "post-local", "switch": 50, "overlap": 1},
    {"method": "qsr"},
    {"method": "pr-sgd-auto", "period": None, "overlap": 1},
    {"method": "streaming-diloco", "overlap": 1, "optimizer": "adamw", "lr": 0.003, "clip": 1.0},
    {"method": "pr-sgd", "model": "cnn", "fragments": 3, "overlap": 1},
    {"method": "one-shot", "period": None, "model": "cnn"},
    {"task": "synthetic", "model": "wells", "momentum": 0.5},
    {"optimizer": "adamw", "lr": 0.003, "recipe": "cosine", "warmup": 7, "clip": 0.5, "accumulate": 4, "overlap": 2},
    {"optimizer": "adamw", "lr": 0.003, "method": "pr-sgd-momentum", "recipe": "cosine", "overlap": 1},
    {"task": "text", "model": "tiny", "data": __file__, "split": "era", "batch_size": 1, "look": 7, "lr": 0.01},
]


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_stopped_and_continued_is_the_unbroken_run(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = dataclasses.replace(QUICK, **changes).resolve()
    unbroken = go(config, tmp_path / "unbroken")
    for stop in (5, 60):
        with pytest.raises(Stopped):
            go(config, tmp_path / "broken", after(stop))
    again = go(config, tmp_path / "broken")
    assert again.weights_sha256 == unbroken.weights_sha256
    assert lines(tmp_path / "broken") == lines(tmp_path / "unbroken")
    assert dataclasses.replace(again, seconds=0) == dataclasses.replace(unbroken, seconds=0)


def test_stopping_again_before_anything_was_recorded(tmp_path: Path) -> None:
    """The newest checkpoint is damaged: records beyond the one before it are cut off, and none is new at the stop."""
    config = dataclasses.replace(QUICK, period=32)
    unbroken = go(config, tmp_path / "unbroken")
    folder = tmp_path / "broken"
    with pytest.raises(Stopped):
        go(config, folder, after(100))
    [*_, newest] = sorted((folder / "checkpoints").iterdir())
    (newest / "rank-0.json").write_text("x")
    with pytest.raises(Stopped), pytest.warns(UserWarning, match="passed over"):
        go(config, folder, after(0))
    assert not newest.exists()
    assert go(config, folder).weights_sha256 == unbroken.weights_sha256
    assert lines(folder) == lines(tmp_path / "unbroken")


def test_records_that_were_lost_are_missed(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        go(QUICK, tmp_path, after(60))
    (tmp_path / "records.jsonl").write_text("")
    with pytest.raises(CheckpointError, match=r"records\.jsonl is shorter than when the checkpoint was written"):
        go(QUICK, tmp_path)


def test_two_in_one_folder(tmp_path: Path) -> None:
    prepare(QUICK, tmp_path)

    def second(progress: Progress) -> None:
        with pytest.raises(CheckpointError, match="another process is training in"):
            run(QUICK, tmp_path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(QUICK, tmp_path, observe=second)


def test_two_processes_train_what_one_does_and_stop_and_continue(tmp_path: Path) -> None:
    alone = go(QUICK, tmp_path / "alone")
    config = dataclasses.replace(QUICK, processes=2)

    def spread(folder: Path, stop: bool = False) -> Summary:
        seen: list[Progress] = []
        if not (folder / "config.json").exists():
            prepare(config, folder)
        summary = train(config, folder, observe=seen.append, should_stop=lambda: stop)
        assert seen[-1].step == summary.steps
        return summary

    unbroken = spread(tmp_path / "unbroken")
    assert unbroken.train_loss == pytest.approx(alone.train_loss, rel=1e-5)
    assert unbroken.test_score == pytest.approx(alone.test_score, abs=0.01)
    assert (unbroken.rounds, unbroken.bytes_sent, unbroken.samples) == (alone.rounds, alone.bytes_sent, alone.samples)
    with pytest.raises(Stopped, match=f"after step {1437 // 32}$"):  # the first epoch's end: all agree
        spread(tmp_path / "broken", stop=True)
    assert spread(tmp_path / "broken").weights_sha256 == unbroken.weights_sha256


def test_an_observer_sees_it_move(tmp_path: Path) -> None:
    prepare(QUICK, tmp_path)
    seen: list[Progress] = []
    summary = run(QUICK, tmp_path, observe=seen.append)
    assert [p.step for p in seen] == sorted(p.step for p in seen)
    assert (seen[0].step, seen[-1].step) == (0, summary.steps)
    assert seen[-1].evaluation is not None
    assert seen[-1].evaluation.test_score == summary.test_score
    assert seen[-1].num_epochs == 3


def test_the_split_is_written(tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, split="dirichlet:0.1")
    prepare(config, tmp_path)
    counts = torch.tensor(json.loads((tmp_path / "split.json").read_text())["counts"])
    assert counts.shape == (4, 10)
    assert counts.sum(1).tolist() == [(1437 // 32) * 8] * 4
    assert counts.max() > 3 * counts.float().mean()


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    config = dataclasses.replace(QUICK, lr=1e30).resolve()
    with pytest.raises(prsgd.DivergedError, match="lower the lr"):
        go(config, tmp_path)


def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        go(QUICK, tmp_path, after(5))
    with pytest.raises(ValueError, match="is of another config"):
        go(dataclasses.replace(QUICK, lr=0.2), tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 0}, "workers must be a whole number >= 1, got 0"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"lr": 0.0}, "lr must be a finite number > 0, got 0.0"),
        ({"lr": -1.0}, "lr must be"),
        ({"lr": 1e300}, "lr must be at most"),
        ({"seed": 10**20}, "seed must be below"),
        ({"lr": float("nan")}, "lr must be a finite number > 0, got nan"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\), got 1.0"),
        ({"momentum": -0.1}, "momentum must be"),
        ({"weight_decay": float("inf")}, r"weight_decay must be in \[0, 1e\+30\), got inf"),
        ({"task": "digit"}, "did you mean 'digits'"),
        ({"method": "prsgd"}, "did you mean 'pr-sgd'"),
        ({"model": "mpl"}, "did you mean 'mlp'"),
        ({"split": "idd"}, "did you mean 'iid'"),
        ({"overlap": 9}, "overlap must be at most the period 4, got 9"),
        ({"method": "pr-sgd-momentum", "overlap": 2}, "overlap must be 0 or 1"),
        ({"method": "one-shot"}, "method one-shot has no period, got 4"),
        ({"steps": 5}, "epochs and steps are two ways"),
        ({"processes": 5}, "processes must be at most the number of workers 4, got 5"),
    ],
    ids=str,
)
def test_bad_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(QUICK, **changes).resolve()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"wrkers": 3}, "unknown key 'wrkers': did you mean 'workers'"),
        ({"task": 3}, "task must be a text, got 3"),
        ({"workers": None}, "workers must have a value"),
    ],
)
def test_configs_from_files(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_dict(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 2000}, "workers must be at most the 1437 samples, got 2000"),
        ({"batch_size": 400}, "batch_size must be at most 359"),
    ],
)
def test_data_that_do_not_go_round(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(dataclasses.replace(QUICK, **changes).resolve())


def test_the_papers_recipe() -> None:
    config = Config(task="cifar10").resolve()
    assert (config.model, config.batch_size, config.lr, config.momentum) == ("resnet20", 32, 0.1, 0.9)
    steps = 300 * 195
    assert [lr_at(config, t, steps) for t in (0, 150 * 195 - 1, 150 * 195, 275 * 195 - 1, 275 * 195)] == pytest.approx(
        [0.1, 0.1, 0.01, 0.01, 0.001]
    )
