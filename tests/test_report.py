"""From run folders to numbers, words, tables and figures. The folders are written by hand: nothing is trained."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from prsgd.records import Evaluation, Record, Summary
from prsgd.report import page
from prsgd.report.chart import Chart
from prsgd.report.figures import FIGURES
from prsgd.report.figures.base import applying
from prsgd.report.read import Seen, read
from prsgd.report.series import Group, group, rows
from prsgd.report.table import text_table, write_csv
from prsgd.report.verdict import verdict

STEPS_PER_EPOCH = 8
MODEL_BYTES = 1_000_000


def average_line(**values: Any) -> dict[str, Any]:
    """A whole line of records.jsonl, with these values and others that say nothing."""
    usual = Record(
        round=1, step=1, period=1, overlap=0, workers=4, bad_workers=0, bytes_sent=MODEL_BYTES, server_bytes_sent=0,
        wait_seconds=0.0, copy_seconds=0.0, flight_seconds=0.0, lr=0.1, drift=None, loss=None, samples=0,
    )  # fmt: skip
    return {"kind": "average", **asdict(usual), **values}


def evaluation_line(**values: Any) -> dict[str, Any]:
    """The same for an evaluation."""
    usual = Evaluation(epoch=1.0, step=8, train_loss=1.0, test_loss=1.0, test_score=0.5, seconds=1.0, metric="accuracy")
    return {"kind": "evaluation", **asdict(usual), **values}


SUMMARY = Summary(
    label="whatever", train_loss=0.1, test_loss=1.0, test_score=None, best_test_score=None, epochs=2.0, steps=16,
    rounds=16, bytes_sent=16 * MODEL_BYTES, mean_drift=None, seconds=1.0, samples=0, weights_sha256="",
)  # fmt: skip


def make_run(
    folder: Path,
    *,
    accuracies: Sequence[float | None] = (0.1, 0.8, 0.9),
    losses: Sequence[float] = (2.0, 0.5, 0.1),
    finished: bool = True,
    split: list[list[int]] | None = None,
    **config: Any,
) -> Path:
    """A run's folder: an evaluation each epoch, an average each period, the lr by the recipe."""
    given = {
        "task": "digits", "model": "mlp", "method": "pr-sgd", "workers": 4, "period": 1, "overlap": 0,
        "epochs": len(losses) - 1, "steps": None, "batch_size": 8, "lr": 0.1, "momentum": 0.9, "weight_decay": 0.0,
        "split": "iid", "seed": 0, "processes": 1, "optimizer": "sgd", "recipe": "drops", "warmup": 0.0, "clip": 0.0,
        "accumulate": 1, **config,
    }  # fmt: skip
    num_steps = (len(losses) - 1) * STEPS_PER_EPOCH
    planned = given["epochs"] * STEPS_PER_EPOCH
    period = given["period"] or 1
    lines: list[dict[str, Any]] = []
    for step in range(num_steps + 1):
        if step and (step % period == 0 or step == planned):
            drops = sum(step - 1 >= fraction * planned for fraction in (1 / 2, 11 / 12))
            drift = 0.01 * period / 10**drops
            lr = 0.1 / 10**drops
            lines.append(average_line(round=-(-step // period), step=step, lr=lr, drift=drift))
        if step % STEPS_PER_EPOCH == 0:
            epoch = step // STEPS_PER_EPOCH
            seen = {"train_loss": losses[epoch], "test_score": accuracies[epoch], "seconds": 0.5 * epoch}
            lines.append(evaluation_line(epoch=float(epoch), step=step, **seen))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(given))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "cuda": None}))
    (folder / "records.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (folder / "summary.json").write_text(json.dumps(asdict(SUMMARY)))
    if split is not None:
        (folder / "split.json").write_text(json.dumps({"counts": split}))
    return folder


def make_comparison(folder: Path) -> Path:
    """Periods 1, 4 and 8, two seeds each, five epochs."""
    for period in (1, 4, 8):
        for seed in (0, 1):
            make_run(
                folder / f"period-{period}-seed-{seed}",
                period=period,
                seed=seed,
                accuracies=[0.1, 0.7, 0.8, 0.9, 0.95, 0.96 + 0.002 * seed],
                losses=[2.0, 0.6, 0.4, 0.2, 0.1, 0.08 + 0.01 * seed],
                split=[[3, 1], [2, 2], [1, 3], [4, 0]],
            )
    return folder


def grouped(folder: Path) -> list[Group]:
    return group(read([folder]))


# Reading


def test_a_run_and_a_comparison_are_read_alike(tmp_path: Path) -> None:
    make_comparison(tmp_path)
    alone = read([tmp_path / "period-4-seed-1"])
    assert len(alone) == 1
    assert alone[0] in read([tmp_path])
    assert len(read([tmp_path, tmp_path / "period-4-seed-1"])) == 6  # what is given twice counts once
    run = alone[0]
    assert run.label == "pr-sgd period 4"
    assert run.finished
    assert run.bytes_sent == 10 * MODEL_BYTES
    assert run.split == Seen(((3, 1), (2, 2), (1, 3), (4, 0)), ("0", "1"), "class")


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"one level down, got {tmp_path}"):
        read([tmp_path])


def test_a_last_line_may_be_cut_off(tmp_path: Path) -> None:
    whole = read([make_run(tmp_path / "a", finished=False)])[0]
    records = tmp_path / "a" / "records.jsonl"
    records.write_text(records.read_text() + '{"kind": "evaluation", "epo')
    assert read([tmp_path / "a"]) == [whole]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"kind": "evaluation", "epo', "line 2: Unterminated"),
        ('{"kind": "other"}', "line 2: kind must be 'average' or 'evaluation', got 'other'"),
        ("[]", "line 2: kind must be"),
        ('{"kind": "average", "round": "one"}', "line 2: round must be a whole number >= 0, got 'one'"),
        ('{"kind": "evaluation", "epoch": 1.0, "step": 8}', "line 2: train_loss must be a number, got None"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    records = make_run(tmp_path / "a") / "records.jsonl"
    first, _, rest = records.read_text().partition("\n")
    records.write_text(f"{first}\n{line}\n{rest}")
    with pytest.raises(ValueError, match=f"records.jsonl, {message}"):
        read([tmp_path])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "config.json: must be a JSON object, got list"),
        ("config.json", "{}", "config.json: task is missing"),
        ("split.json", '{"counts": [[1], [1, 2]]}', "split.json: counts must be rows"),
        ("split.json", "{}", "split.json: counts must be rows"),
        ("summary.json", '{"label": "x"}', "summary.json: train_loss must be a number, got None"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (make_run(tmp_path / "a") / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read([tmp_path])


def test_what_a_newer_version_wrote_is_left_out_and_what_is_missing_is_named(tmp_path: Path) -> None:
    """Also where a field has a default: the report shows what was written, and supposes nothing."""
    records = make_run(tmp_path / "a") / "records.jsonl"
    whole = read([tmp_path])
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    records.write_text("".join(json.dumps({**line, "of_tomorrow": [1]}) + "\n" for line in lines))
    assert read([tmp_path]) == whole
    for line in lines:
        line.pop("hops", None)
    records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"records.jsonl, line \d+: hops must be a whole number >= 0, got None"):
        read([tmp_path])


# Groups and curves


def test_groups_are_ordered_and_named(tmp_path: Path) -> None:
    for i, (method, period, overlap) in enumerate(
        [("pr-sgd", 16, 0), ("pr-sgd", 4, 1), ("pr-sgd", 4, 0), ("minibatch-sgd", None, 0)]
    ):
        make_run(tmp_path / str(i), method=method, period=period, overlap=overlap)
    labels = ["minibatch-sgd", "pr-sgd period 4", "pr-sgd period 4 overlap 1", "pr-sgd period 16"]
    assert [one.name for one in grouped(tmp_path)] == labels
    only_pr_sgd = group(read([tmp_path / str(i) for i in range(3)]))
    assert [one.name for one in only_pr_sgd] == ["period 4", "period 4 overlap 1", "period 16"]


def test_runs_that_differ_in_more_are_not_averaged(tmp_path: Path) -> None:
    make_run(tmp_path / "a", lr=0.1)
    make_run(tmp_path / "b", lr=0.2)
    assert [one.name for one in grouped(tmp_path)] == ["period 1, lr 0.1", "period 1, lr 0.2"]


def test_what_a_method_has_no_use_for_sets_no_runs_apart(tmp_path: Path) -> None:
    """Growing rounds set the lr themselves, and only diloco has an outer lr."""
    make_run(tmp_path / "a", method="pr-sgd-growing", period=None, recipe=None, warmup=None)
    make_run(tmp_path / "b", method="minibatch-sgd", period=None, recipe="drops", warmup=0.0)
    make_run(tmp_path / "c", method="diloco", recipe="drops", warmup=0.0, outer_lr=0.5)
    assert [one.name for one in grouped(tmp_path)] == ["minibatch-sgd", "pr-sgd-growing", "diloco period 1"]
    make_run(tmp_path / "d", method="diloco", recipe="drops", warmup=0.0, outer_lr=0.7, seed=0)
    assert [one.name for one in grouped(tmp_path)][2:] == [
        "diloco period 1, outer lr 0.5",
        "diloco period 1, outer lr 0.7",
    ]


def test_one_run_is_not_counted_twice(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    with pytest.raises(ValueError, match="are the same run"):
        grouped(tmp_path)


def test_tasks_are_not_mixed(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", task="cifar10")
    with pytest.raises(ValueError, match="one task to be compared, got cifar10, digits"):
        grouped(tmp_path)


def charts(groups: Sequence[Group]) -> dict[str, Chart]:
    return page.charts(applying(FIGURES, groups))


def chart(groups: Sequence[Group], name: str) -> Chart:
    return charts(groups)[name]


def test_curves_have_mean_and_band(tmp_path: Path) -> None:
    make_run(tmp_path / "a", seed=0, losses=[2.0, 1.0, 0.2], accuracies=[0.1, 0.5, 0.8])
    make_run(tmp_path / "b", seed=1, losses=[2.0, 2.0, 0.4], accuracies=[0.1, 0.7, 0.9])
    found = grouped(tmp_path)
    loss = chart(found, "training-loss").curves[0]
    assert loss.x == (0.0, 1.0, 2.0)
    assert loss.mean == pytest.approx((2.0, 1.5, 0.3))
    assert (loss.low, loss.high) == ((2.0, 1.0, 0.2), (2.0, 2.0, 0.4))
    assert chart(found, "test-accuracy").curves[0].mean == pytest.approx((10, 60, 85))
    assert chart(found, "training-loss").marks == pytest.approx((1.0, 22 / 12))


def test_bytes_are_those_of_the_averages_that_had_landed(tmp_path: Path) -> None:
    """Period 6 of 16 steps: averages at 6, 12 and the end; evaluations at 0, 8 and 16."""
    make_run(tmp_path / "a", period=6)
    curve = chart(grouped(tmp_path), "loss-against-bytes").curves[0]
    assert curve.x == (1.0, 3.0)  # MB; nothing had been sent at step 0
    assert curve.mean == (0.5, 0.1)


def test_long_curves_of_drift_are_thinned_by_averaging(tmp_path: Path) -> None:
    make_run(tmp_path / "a", losses=[1.0] * 61, accuracies=[0.5] * 61)  # 480 averages
    curve = chart(grouped(tmp_path), "drift").curves[0]
    assert len(curve.x) == 160
    assert curve.x[0] == 2 / STEPS_PER_EPOCH  # of steps 1, 2, 3
    assert curve.mean[0] == pytest.approx(0.01)
    assert curve.mean[-1] == pytest.approx(0.0001)


def test_a_task_without_accuracy_has_no_such_figure(tmp_path: Path) -> None:
    make_run(tmp_path / "a", accuracies=[None] * 3)
    assert list(charts(grouped(tmp_path))) == ["training-loss", "loss-against-bytes", "drift"]


def test_a_run_that_just_began(tmp_path: Path) -> None:
    (make_run(tmp_path / "a", finished=False) / "records.jsonl").write_text("")
    found = grouped(tmp_path)
    assert charts(found) == {}
    assert rows(found)[0].train_loss is None
    assert found[0].state == "unfinished, epoch 0 of 2"
    assert "nothing to draw" in page.write([tmp_path]).read_text()


def test_a_run_that_diverged(tmp_path: Path) -> None:
    make_run(tmp_path / "a", losses=[2.0, math.inf, math.nan], finished=False)
    found = grouped(tmp_path)
    assert found[0].state == "diverged"
    assert chart(found, "training-loss").curves[0].x == (0.0,)
    page.write([tmp_path])  # JSON has no NaN


def test_the_recipe_is_recognized(tmp_path: Path) -> None:
    run = read([make_run(tmp_path / "a", losses=[1.0] * 5, accuracies=[0.5] * 5)])[0]
    assert run.follows_recipe
    constant = replace(run, averages=tuple(replace(average, lr=0.1) for average in run.averages))
    assert not constant.follows_recipe


# The table


def test_rows(tmp_path: Path) -> None:
    first, _, last = rows(grouped(make_comparison(tmp_path)))
    assert (first.rounds, first.megabytes, first.share) == (40, 40.0, 1.0)
    assert (last.rounds, last.share, last.seeds) == (5, 0.125, 2)
    assert last.test_score.mean == pytest.approx(96.1)
    assert last.test_score.spread == pytest.approx(0.2 / math.sqrt(2))
    assert last.seconds == 2.5


def test_text_table_fits_a_terminal(tmp_path: Path) -> None:
    make_comparison(tmp_path)
    make_run(tmp_path / "x", method="a-method-with-a-name-that-goes-on-and-on", finished=False, epochs=9)
    table = text_table(grouped(tmp_path))
    assert max(map(len, table.splitlines())) <= 80
    assert "96.10 ± 0.14" in table
    assert "* a-method-with-a-name-that-goes-on-and-on period 1, epochs 9: unfinished" in table


def test_text_table_leaves_out_what_nobody_has(tmp_path: Path) -> None:
    make_run(tmp_path / "a", accuracies=[None] * 3)
    assert "accuracy" not in text_table(grouped(tmp_path))


def test_csv(tmp_path: Path) -> None:
    found = grouped(make_comparison(tmp_path))
    table, curves = write_csv(found, charts(found), tmp_path / "out")
    with table.open() as file:
        lines = list(csv.DictReader(file))
    assert [line["run"] for line in lines] == ["pr-sgd period 1", "pr-sgd period 4", "pr-sgd period 8"]
    assert float(lines[2]["share_of_baseline_bytes"]) == 0.125
    with curves.open() as file:
        points = list(csv.DictReader(file))
    assert {point["figure"] for point in points} == {"training-loss", "test-accuracy", "loss-against-bytes", "drift"}
    one = next(point for point in points if point["figure"] == "test-accuracy" and point["x"] == "5.0")
    assert float(one["low"]) == pytest.approx(96.0)
    assert float(one["high"]) == pytest.approx(96.2)


# The verdict


def ends(tmp_path: Path, ends_at: dict[int, list[float]], **config: Any) -> list[Group]:
    """Groups by period, with a final accuracy in percent for each seed."""
    for period, accuracies in ends_at.items():
        for seed, accuracy in enumerate(accuracies):
            folder = tmp_path / f"{period}-{seed}"
            make_run(folder, accuracies=[0.1, 0.5, accuracy / 100], period=period, seed=seed, **config)
    return grouped(tmp_path)


def test_verdict_equal(tmp_path: Path) -> None:
    found = ends(tmp_path, {1: [97.3, 97.5], 4: [97.4, 97.4], 8: [97.3, 97.5], 16: [90.0, 90.1]})
    assert verdict(found) == (
        "Period 8 reached the accuracy of period 1 (97.4 % against 97.4 %) "
        "with 8.0x fewer rounds and 12.5 % of the bytes."
    )


def test_verdict_within_the_spread(tmp_path: Path) -> None:
    """Standard errors of 1 and 1: differences of 0.4 and 2 are less than 2 sqrt 2, but noise excuses half a point."""
    found = ends(tmp_path / "near", {1: [96.0, 98.0], 8: [95.6, 97.6]})
    assert verdict(found) == (
        "Period 8 reached the accuracy of period 1 (within the seeds' spread, 96.6 % against 97.0 %) "
        "with 8.0x fewer rounds and 12.5 % of the bytes."
    )
    found = ends(tmp_path / "far", {1: [96.0, 98.0], 8: [94.0, 96.0]})
    assert verdict(found).startswith("No other run reached the accuracy of period 1 (97.0 %). Period 8 came nearest")


def test_verdict_none_reached_it(tmp_path: Path) -> None:
    found = ends(tmp_path, {1: [97.0, 97.1], 4: [96.0, 96.1], 8: [93.0, 93.1]})
    assert verdict(found) == (
        "No other run reached the accuracy of period 1 (97.0 %). "
        "Period 4 came nearest: it loses 1.0 points, with 4.0x fewer rounds and 25 % of the bytes."
    )


def test_verdict_better(tmp_path: Path) -> None:
    found = ends(tmp_path, {1: [97.0, 97.0], 8: [98.5, 98.5]})
    assert verdict(found) == (
        "Period 8 was more accurate than period 1 (98.5 % against 97.0 %), "
        "with 8.0x fewer rounds and 12.5 % of the bytes."
    )


def test_verdict_the_cheapest_is_not_the_best(tmp_path: Path) -> None:
    found = ends(tmp_path, {1: [97.0, 97.0], 4: [98.5, 98.5], 8: [97.0, 97.0]})
    assert verdict(found) == (
        "Period 8 reached the accuracy of period 1 (97.0 % against 97.0 %) "
        "with 8.0x fewer rounds and 12.5 % "
        "of the bytes. "
        "Period 4 was the most accurate: 98.5 %, with 4.0x fewer rounds and 25 % of the bytes."
    )


def test_verdict_one_seed(tmp_path: Path) -> None:
    assert verdict(ends(tmp_path, {1: [97.0], 8: [96.9]})) == (
        "Period 8 reached the accuracy of period 1 (96.9 % against 97.0 %) "
        "with 8.0x fewer rounds and 12.5 % of the bytes "
        "(one seed: differences under about a point mean little)."
    )


def test_verdict_by_loss(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / f"1-{seed}", accuracies=[None] * 3, seed=seed)
        make_run(tmp_path / f"8-{seed}", accuracies=[None] * 3, seed=seed, period=8, losses=[2.0, 0.5, 0.2])
    assert verdict(grouped(tmp_path)) == (
        "No other run reached the training loss of period 1 (0.1). "
        "Period 8 came nearest: it ends at 0.2, with 8.0x fewer rounds and 12.5 % of the bytes."
    )


def test_verdict_alone(tmp_path: Path) -> None:
    assert verdict(ends(tmp_path, {8: [97.0]})) == "Period 8 reached a test accuracy of 97.0 % in 2 rounds."


def test_verdict_counts_finished_runs_only(tmp_path: Path) -> None:
    make_run(tmp_path / "a", period=1)
    make_run(tmp_path / "b", period=8, finished=False)
    assert verdict(grouped(tmp_path)) == (
        "Period 1 reached a test accuracy of 90.0 % in 16 rounds. Not counted: period 8 (unfinished, epoch 2 of 2)."
    )
    (tmp_path / "a" / "summary.json").unlink()
    assert verdict(grouped(tmp_path)) == "No run is finished yet, so there is nothing to conclude."


@pytest.mark.parametrize("name", ["pr-sgd period 4", "period 4"])
def test_a_baseline_by_name(tmp_path: Path, name: str) -> None:
    ends(tmp_path, {1: [97.0, 97.0], 4: [97.0, 97.0], 8: [97.0, 97.0]})
    found = group(read([tmp_path]), baseline=name)
    assert [row.share for row in rows(found)] == [4.0, 1.0, 0.5]
    assert verdict(found) == (
        "Period 8 reached the accuracy of period 4 (97.0 % against 97.0 %) "
        "with 2.0x fewer rounds and 50 % of the bytes."
    )
    found = group(read([tmp_path / "1-0", tmp_path / "1-1", tmp_path / "4-0", tmp_path / "4-1"]), baseline=name)
    assert verdict(found) == (
        "Period 1 reached the accuracy of period 4 (97.0 % against 97.0 %) with 4.0x more rounds and 4x the bytes."
    )


def test_a_baseline_that_there_is_not(tmp_path: Path) -> None:
    ends(tmp_path, {1: [97.0], 8: [97.0]})
    message = "baseline must be one of 'pr-sgd period 1', 'pr-sgd period 8', got 'period 16'"
    with pytest.raises(ValueError, match=message):
        group(read([tmp_path]), baseline="period 16")
    make_run(tmp_path / "b", period=4, finished=False)
    with pytest.raises(ValueError, match="baseline must be finished, pr-sgd period 4 is unfinished, epoch 2 of 2"):
        group(read([tmp_path]), baseline="pr-sgd period 4")


def test_seeds_that_differ_are_in_table_and_verdict(tmp_path: Path) -> None:
    found = ends(tmp_path, {1: [97.0, 97.2, 96.8], 4: [97.0, 97.2, 97.1], 8: [97.0]})
    lines = text_table(found).splitlines()
    assert "train loss  seeds  rounds" in lines[0]
    assert [line[lines[0].index("seeds") :].split()[0] for line in lines[2:]] == ["3", "3", "1"]
    assert verdict(found).endswith("(period 8 has one seed: differences under about a point mean little).")
    assert "seeds" not in text_table(found[:2])


def test_verdict_same_cost(tmp_path: Path) -> None:
    make_run(tmp_path / "a", period=4)
    make_run(tmp_path / "b", period=4, overlap=1)
    assert "with as many rounds and as many bytes" in verdict(grouped(tmp_path))


def test_verdict_when_the_runs_differ_in_more(tmp_path: Path) -> None:
    make_run(tmp_path / "a", accuracies=[0.1, 0.5, 0.97], period=8, epochs=10)
    make_run(tmp_path / "b", accuracies=[0.1, 0.5, 0.97], period=8, epochs=40)
    assert verdict(grouped(tmp_path)).endswith("The runs differ in epochs too, not in averaging alone.")


def test_names_are_not_cut_off(tmp_path: Path) -> None:
    for period in (4, 8):
        for seed in (0, 1):
            folder = tmp_path / f"{period}-{seed}"
            make_run(folder, accuracies=[0.1, 0.5, 0.97], period=period, seed=seed, method="pr-sgd-momentum", overlap=1)
    make_run(tmp_path / "m", accuracies=[0.1, 0.5, 0.97], period=None, method="minibatch-sgd", seed=0)
    make_run(tmp_path / "o", accuracies=[0.1, 0.5, 0.97], period=None, method="one-shot", seed=0)
    lines = text_table(grouped(tmp_path)).splitlines()
    assert all(len(line) <= 80 for line in lines)
    names = ["minibatch-sgd", "pr-sgd-momentum period 4 overlap 1", "pr-sgd-momentum period 8 overlap 1", "one-shot"]
    assert [line.split("  ")[0] for line in lines[2:]] == names


def test_verdict_does_not_hide_seeds_that_diverged(tmp_path: Path) -> None:
    ends(tmp_path, {1: [95.0, 95.0, 95.0], 8: [95.0]})
    for seed in (1, 2):
        folder = tmp_path / f"8-{seed}"
        make_run(folder, accuracies=[0.1, 0.5, 0.1], period=8, seed=seed)
        records = (folder / "records.jsonl").read_text().splitlines()
        [place] = [i for i, line in enumerate(records) if json.loads(line)["kind"] == "evaluation"][-1:]
        records[place] = json.dumps({**json.loads(records[place]), "train_loss": float("nan")})
        (folder / "records.jsonl").write_text("\n".join(records) + "\n")
    found = verdict(grouped(tmp_path))
    assert found.startswith("No other run reached")
    assert found.endswith("Counted in part: period 8 (2 of 3 seeds diverged).")


@pytest.mark.parametrize(
    "changes", [{"split": [1]}, {"period": "8"}, {"lr": "x"}, {"seed": "1"}, {"epochs": 1.5}], ids=str
)
def test_configs_that_cannot_be(tmp_path: Path, changes: dict[str, Any]) -> None:
    make_run(tmp_path / "a")
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=r"config\.json: .* cannot be "):
        read([tmp_path])
