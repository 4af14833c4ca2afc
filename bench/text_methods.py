"""What each method reaches on the text task, and what it costs: collects finished runs, draws docs/results/text-*.png.

python bench/text_methods.py add RUN [RUN ...]    # folders of `prsgd train` and `prsgd compare`, into text.json
python bench/text_methods.py table --model small --lr 0.003  # for docs/results/text.md
python bench/text_methods.py draw --model small --lr 0.003   # quality against tokens, bytes and seconds

Seconds are modelled for two clusters of equal workers, lan-1g and wan, from the averages that a run made.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rows import Row, put
from rows import read as read_rows

from prsgd import files
from prsgd.cluster.model import load
from prsgd.report.figures.style import COLOURS, DASHES, STYLE
from prsgd.report.places import CLUSTERS, seconds_on
from prsgd.report.read import Run, read
from prsgd.tasks.text import CONTEXT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = Path(__file__).parent.parent / "docs" / "results" / "text.json"
CONFIG = (
    "model", "split", "workers", "epochs", "batch_size", "optimizer", "lr", "outer_lr", "outer_momentum", "seed",
)  # fmt: skip
BASELINE = "minibatch-sgd"


def row_of(run: Run) -> Row:
    """A finished run in numbers, and what it had reached and sent whenever it was looked at."""
    assert run.last is not None
    sent = [average.bytes_sent for average in run.averages]
    return {
        "task": Path(run.config["task"]).stem,
        "label": label(run),
        **{name: run.config[name] for name in CONFIG},
        "steps": run.averages[-1].step,
        "score": run.score(run.last),
        "train_loss": run.last.train_loss,
        "rounds": len({average.round for average in run.averages}),
        "bytes_sent": sum(sent),
        "most_bytes_at_once": max(sent[:-1], default=sent[-1]),
        "seconds": {name: round(seconds_on(run, name), 3) for name in CLUSTERS},
        "curve": [_point(run, seen.step, run.score(seen)) for seen in run.evaluations],
    }


def label(run: Run) -> str:
    """As the report has it, and the outer optimizer's numbers where they were given."""
    given = [f"{word} {run.config[name]:g}" for word, name in (("lr", "outer_lr"), ("momentum", "outer_momentum"))
             if run.config[name] is not None]  # fmt: skip
    return run.label + (f", outer {', '.join(given)}" if given else "")


def _point(run: Run, step: int, score: float) -> Row:
    averages = tuple(average for average in run.averages if average.step <= step)
    begun = averages[-1].step if averages else 0
    so_far = replace(run, averages=averages)
    seconds = {
        name: round(seconds_on(so_far, name) + (step - begun) * load(name, run.config["workers"]).step_seconds, 3)
        for name in CLUSTERS
    }
    return {"step": step, "score": round(score, 5), "bytes_sent": sum(a.bytes_sent for a in averages), **seconds}


def identity(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "model", "split", "steps", "lr", "label", "seed"))


Grouped = dict[str, list[Row]]


def grouped(rows: Sequence[Row]) -> Grouped:
    """By label, mini-batch training first, then as they were put in."""
    found: Grouped = {}
    for row in sorted(rows, key=lambda row: row["label"] != BASELINE):
        found.setdefault(row["label"], []).append(row)
    return found


def table(rows: Sequence[Row], baseline: Sequence[Row]) -> str:
    """A line for each label, the best first; a number for each seed, beside that seed's best ``baseline``."""
    best: dict[int, Row] = {}
    for row in baseline:
        best[row["seed"]] = min(row, best.get(row["seed"], row), key=lambda row: row["score"])

    def above(row: Row) -> float:
        return float(100 * (row["score"] / best[row["seed"]]["score"] - 1))

    heads = (
        "", "bits per byte", "above", "MB sent by each", "most MB at once", "averages", f"s on {', '.join(CLUSTERS)}",
    )  # fmt: skip
    lines = [heads, ["---"] * len(heads)]
    for name, found in sorted(grouped(rows).items(), key=lambda item: fmean(map(above, item[1]))):
        first = found[0]
        share = best[first["seed"]]["bytes_sent"] / first["bytes_sent"]
        lines.append([
            name,
            ", ".join(f"{row['score']:.3f}" for row in found),
            ", ".join(f"{above(row):+.1f}" for row in found) + " %",
            f"{first['bytes_sent'] / 1e6:,.0f} ({'1' if share < 1.01 else f'1/{share:.3g}'})",
            f"{first['most_bytes_at_once'] / 1e6:.3g}",
            f"{first['rounds']:,}",
            ", ".join(f"{first['seconds'][on]:,.0f}" for on in CLUSTERS),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(rows: Sequence[Row], place: Path) -> None:
    """Quality against tokens, bytes and modelled seconds; a line for each label, the mean over its seeds."""
    from matplotlib import style
    from matplotlib.figure import Figure as Drawing

    with style.context(["default", STYLE]):
        drawing = Drawing(figsize=(7.2, 3.1), layout="constrained")
        panels = drawing.subplots(1, 3, sharey=True)
        tokens = rows[0]["workers"] * rows[0]["batch_size"] * CONTEXT / 1e6
        costs: list[tuple[str, Callable[[Row], float]]] = [
            ("million tokens, all workers", lambda point: point["step"] * tokens),
            ("MB sent by each worker", lambda point: point["bytes_sent"] / 1e6),
            ("modelled seconds on wan", lambda point: point["wan"]),
        ]
        for axes, (what, cost) in zip(panels, costs):
            _lines(axes, grouped(rows), cost)
            axes.set_xlabel(what)
            if axes is not panels[0]:
                axes.set_xscale("log")
        ends = [row["curve"][-1]["score"] for row in rows]
        starts = [point["score"] for row in rows for point in row["curve"][1:]]
        low = min(ends)
        panels[0].set_ylim(low - 0.03 * low, min(max(starts), 1.45 * low))
        panels[0].set_ylabel("bits per byte, held out")
        drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        drawing.savefig(place, metadata={"Software": None})


def _lines(axes: Axes, groups: Grouped, cost: Callable[[Row], float]) -> None:
    for style, (name, found) in enumerate(groups.items()):
        points = list(zip(*(row["curve"][1:] for row in found)))
        dashes = DASHES[style // len(COLOURS)]
        axes.plot(
            [fmean(map(cost, at)) for at in points],
            [fmean(point["score"] for point in at) for at in points],
            color=COLOURS[style % len(COLOURS)], linestyle=(0, dashes) if dashes else "-", label=name,
        )  # fmt: skip
        axes.plot(
            fmean(map(cost, points[-1])), fmean(point["score"] for point in points[-1]),
            color=COLOURS[style % len(COLOURS)], marker="o", ms=3,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="What each method reaches, and what it costs.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("add", "table", "draw"):
        command = commands.add_parser(name)
        if name == "add":
            command.add_argument("runs", type=Path, nargs="+")
        else:
            command.add_argument("--model", required=True)
            command.add_argument("--split", default="iid")
            command.add_argument("--lr", type=float, required=True)
            command.add_argument("--only", nargs="+", metavar="LABEL", help="of all labels")
    args = parser.parse_args()
    if args.command == "add":
        finished = [folder for folder in args.runs if (folder / files.SUMMARY).exists()]
        print(put(map(row_of, read(finished)), FILE, identity), "runs are new or changed")
        return
    runs = [row for row in read_rows(FILE) if (row["model"], row["split"]) == (args.model, args.split)]
    rows = [row for row in runs if row["lr"] == args.lr and (not args.only or row["label"] in args.only)]
    if args.command == "table":
        print(table(rows, [row for row in runs if row["label"] == BASELINE]))
    else:
        draw(rows, FILE.with_name(f"text-{args.model}{'' if args.split == 'iid' else '-' + args.split}.png"))


if __name__ == "__main__":
    main()
