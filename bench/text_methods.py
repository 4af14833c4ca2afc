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
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from rows import Row, put
from rows import read as read_rows

from prsgd import files
from prsgd.cluster.model import load
from prsgd.report.figures.style import COLOURS, DASHES, STYLE
from prsgd.report.places import CLUSTERS, seconds_on
from prsgd.report.read import Run, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = Path(__file__).parent.parent / "docs" / "results" / "text.json"
CONFIG = (
    "model", "split", "workers", "steps", "epochs", "batch_size", "optimizer", "lr", "outer_lr", "outer_momentum",
    "seed",
)  # fmt: skip
BASELINE = "minibatch-sgd"
CONTEXT = 128
"""Tokens in a sample of the text task."""


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
    """A line for each label: means over the seeds, beside the ``baseline`` of the same seeds that was best."""
    heads = (
        "method", "at the end", "against mini-batch", "seeds", "MB sent", "share", "most MB at once", "rounds",
        *(f"s on {name}" for name in CLUSTERS),
    )  # fmt: skip
    best: dict[int, Row] = {}
    for row in baseline:
        best[row["seed"]] = min(row, best.get(row["seed"], row), key=lambda row: row["score"])
    lines = [
        heads,
        ["---"] * len(heads),
        *([name, *_cells(of, best)] for name, of in grouped(rows).items()),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(found: Sequence[Row], baseline: dict[int, Row]) -> list[str]:
    scores = [row["score"] for row in found]
    spread = f" ± {stdev(scores):.3f}" if len(scores) > 1 else ""
    pairs = [(row, baseline[row["seed"]]) for row in found if row["seed"] in baseline]
    above = f"{100 * (fmean(a['score'] / b['score'] for a, b in pairs) - 1):+.1f} %" if pairs else ""
    share = f"1/{1 / fmean(a['bytes_sent'] / b['bytes_sent'] for a, b in pairs):,.3g}" if pairs else ""
    sent, most = (fmean(row[name] for row in found) / 1e6 for name in ("bytes_sent", "most_bytes_at_once"))
    return [
        f"{fmean(scores):.3f}{spread}", above, str(len(found)), f"{sent:,.4g}", share, f"{most:.3g}",
        f"{fmean(row['rounds'] for row in found):,.0f}",
        *(f"{fmean(row['seconds'][name] for row in found):,.0f}" for name in CLUSTERS),
    ]  # fmt: skip


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
