"""What a period costs, against the length of the run: collects finished runs, and draws docs/results/length.png.

python bench/length.py add RUN [RUN ...]   # folders of `prsgd train` and `prsgd compare`, into the JSON file
python bench/length.py draw                # the figure, and the table for docs/results/length.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rows import Row, put, read

from prsgd import files
from prsgd.report.figures.style import COLOURS, DASHES, MARKERS, STYLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESULTS = Path(__file__).parent.parent / "docs" / "results"
CONFIG = ("task", "model", "method", "workers", "period", "epochs", "batch_size", "lr", "momentum", "split", "seed")
SUMMARY = (
    "train_loss", "test_loss", "test_accuracy", "best_test_accuracy", "steps", "rounds", "bytes_sent", "mean_drift",
    "weights_sha256",
)  # fmt: skip
POINT = 1.0
"""Of test accuracy, in per cent: a period that loses no more is called harmless."""


def _of(summary: Row, name: str) -> Any:
    """A summary calls its scores by no metric's name."""
    return summary[name] if name in summary else summary[name.replace("accuracy", "score")]


def add(folders: Iterable[Path], place: Path) -> int:
    """Put the finished runs among ``folders`` into the file; returns how many changed something."""
    return put((_row(folder) for folder in folders if (folder / files.SUMMARY).exists()), place, _identity)


def _row(folder: Path) -> Row:
    config, summary = (json.loads((folder / name).read_text()) for name in (files.CONFIG, files.SUMMARY))
    return {name: config[name] for name in CONFIG} | {name: _of(summary, name) for name in SUMMARY}


def _identity(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in ("model", "method", "split", "epochs", "period", "seed"))


def lost(rows: Sequence[Row], name: str) -> dict[str, dict[int, float]]:
    """By method and epochs: how far ``name`` is above period 1's of the same seeds, in the mean over the seeds."""
    baseline = {(r["epochs"], r["seed"]): r[name] for r in rows if r["method"] == "pr-sgd" and r["period"] == 1}
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        at = row["epochs"], row["seed"]
        if at in baseline:
            found.setdefault(label(row), {}).setdefault(at[0], []).append(row[name] - baseline[at])
    return {key: {epochs: fmean(seeds) for epochs, seeds in sorted(by.items())} for key, by in found.items()}


def label(row: Row) -> str:
    name = "" if row["method"] == "pr-sgd" else str(row["method"]).removeprefix("pr-sgd-")
    return f"{name} period {row['period']}".strip() if row["period"] is not None else name


def harmless(accuracy: dict[str, dict[int, float]], epochs: int) -> float:
    """The period that loses ``POINT`` at this length, between those that were measured, on a logarithmic scale."""
    found = [(1, 0.0)] + [
        (int(key.split()[1]), -100 * by[epochs])
        for key, by in accuracy.items()
        if key.startswith("period") and key != "period 1" and epochs in by
    ]
    found.sort()
    for (low, before), (high, after) in pairwise(found):
        if after > POINT:
            share = (POINT - before) / (after - before) if after > before else 0.0
            return float(low * (high / low) ** max(0.0, share))
    return float(found[-1][0])


def draw(rows: Sequence[Row], place: Path) -> None:
    """Accuracy lost and loss gained by each period, and the harmless period beside Corollary 1's, by length."""
    from matplotlib import style
    from matplotlib.figure import Figure as Drawing

    rows = [row for row in rows if row["method"] in ("pr-sgd", "pr-sgd-auto")]
    accuracy, loss = lost(rows, "test_accuracy"), lost(rows, "train_loss")
    workers, steps = rows[0]["workers"], {row["epochs"]: row["steps"] for row in rows}
    with style.context(["default", STYLE]):
        drawing = Drawing(figsize=(7.2, 2.7), layout="constrained")
        left, middle, right = drawing.subplots(1, 3)
        _lines(left, {key: {e: -100 * v for e, v in by.items()} for key, by in accuracy.items()}, "points lost")
        left.set_title("Test accuracy lost against period 1")
        _lines(middle, loss, "training loss")
        middle.set_title("Training loss above period 1's")
        lengths = sorted({epochs for by in accuracy.values() for epochs in by})
        right.plot(lengths, [harmless(accuracy, e) for e in lengths], color=COLOURS[0], marker="o", ms=4)
        corollary = [steps[e] ** 0.25 / workers**0.75 for e in lengths]
        right.plot(lengths, corollary, color=COLOURS[6], linestyle="--", label=r"Corollary 1: $T^{1/4} / N^{3/4}$")
        right.lines[0].set_label(f"loses {POINT:g} point here")
        right.set_yscale("log", base=2)
        right.set_title("The longest harmless period")
        right.set_ylabel("period")
        for axes in (left, middle, right):
            axes.set_xscale("log")
            axes.set_xticks(lengths, [str(e) for e in lengths])
            axes.minorticks_off()
            axes.set_xlabel("epochs of the whole run")
        right.set_yticks(*zip(*((p, str(p)) for p in (1, 2, 4, 8, 16, 32))))
        right.set_ylim(0.9, 40)
        right.legend(loc="upper left")
        drawing.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=6)
        drawing.savefig(place, metadata={"Software": None})


def _lines(axes: Axes, curves: dict[str, dict[int, float]], words: str) -> None:
    for style, (key, by) in enumerate(sorted(curves.items(), key=lambda item: (len(item[0]), item[0]))):
        if key != "period 1":
            dashes = (0, DASHES[style % len(DASHES)]) if DASHES[style % len(DASHES)] else "-"
            marker, colour = MARKERS[style % len(MARKERS)], COLOURS[style % len(COLOURS)]
            axes.plot(list(by), list(by.values()), color=colour, linestyle=dashes, marker=marker, ms=3, label=key)
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_ylabel(words)


def table(rows: Sequence[Row]) -> str:
    """Markdown: test accuracy in per cent by length and period, the mean over seeds, with how many there were, and
    rounds as a share of the steps."""
    lengths = sorted({row["epochs"] for row in rows})
    keys = sorted({label(row) for row in rows}, key=lambda key: (len(key), key))
    lines = ["| | " + " | ".join(f"{e} epochs" for e in lengths) + " |", "|---" * (len(lengths) + 1) + "|"]
    for key in keys:
        cells = []
        for epochs in lengths:
            found = [100 * r["test_accuracy"] for r in rows if label(r) == key and r["epochs"] == epochs]
            spread = f" ± {(max(found) - min(found)) / 2:.1f}" if len(found) > 1 else ""
            rounds = fmean([r["rounds"] / r["steps"] for r in rows if label(r) == key and r["epochs"] == epochs] or [0])
            cells.append(f"{fmean(found):.1f}{spread} ({len(found)}), {100 * rounds:.3g} %" if found else "")
        lines.append(f"| {key} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a period costs, against the length of the run.")
    parser.add_argument("--file", type=Path, default=RESULTS / "length.json")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("add").add_argument("runs", type=Path, nargs="+")
    drawing = commands.add_parser("draw")
    drawing.add_argument("--model", default="resnet8")
    drawing.add_argument("--split", default="iid")
    args = parser.parse_args()
    if args.command == "add":
        print(add(args.runs, args.file), "runs are new or changed")
        return
    rows = [row for row in read(args.file) if (row["model"], row["split"]) == (args.model, args.split)]
    draw(rows, args.file.with_suffix(".png"))
    print(table(rows))


if __name__ == "__main__":
    main()
