"""docs/figures/overlap.png: what an overlap does, as a timeline. ``python tools/overlap_figure.py`` draws it anew."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

PERIOD, STEP, TRANSFER, STEPS = 4, 1.0, 1.6, 12  # in the time of one step
BLUE, GREY, ORANGE = "#0072b2", "#c8c8c8", "#d55e00"


def timeline(overlap: int) -> tuple[list[float], list[tuple[float, float]], list[tuple[float, float]], float]:
    """When each step begins, when an average travels and when the worker waits for it; and the end."""
    now, begins, flights, waits = 0.0, [], [], []
    for step in range(1, STEPS + 1):
        begins.append(now)
        now += STEP
        if (step + overlap) % PERIOD == 0:  # the round closes: its average is launched
            flights.append((now, now + TRANSFER))
        if step % PERIOD == 0 and now < flights[-1][1]:  # it is due in this step
            waits.append((now, flights[-1][1]))
            now = flights[-1][1]
    return begins, flights, waits, now


def draw(axes: Axes, overlap: int, end: float) -> None:
    begins, flights, waits, _ = timeline(overlap)
    for number, begin in enumerate(begins, start=1):
        axes.broken_barh([(begin + 0.03, STEP - 0.06)], (1.0, 0.8), color=BLUE)
        axes.text(begin + STEP / 2, 1.4, str(number), ha="center", va="center", color="white", fontsize=8)
    axes.broken_barh([(a, b - a) for a, b in waits], (1.0, 0.8), color=GREY)
    axes.broken_barh([(a, b - a) for a, b in flights], (0.0, 0.8), color=ORANGE)
    for a, b in flights:
        axes.text((a + b) / 2, 0.4, "average", ha="center", va="center", color="white", fontsize=8)
    axes.set(xlim=(0, end), ylim=(-0.1, 2.0), yticks=[0.4, 1.4], yticklabels=["on the way", "worker"], xticks=[])
    axes.set_title(f"period {PERIOD}, overlap {overlap}", fontsize=9, loc="left")
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0, labelsize=8)


def main() -> None:
    mpl.use("Agg")
    figure, rows = plt.subplots(3, 1, figsize=(7, 3.4), layout="constrained")
    end = timeline(0)[3]
    for axes, overlap in zip(rows, (0, 1, 2)):
        draw(axes, overlap, end)
    figure.savefig(Path(__file__).parents[1] / "docs" / "figures" / "overlap.png", dpi=130, facecolor="white")


if __name__ == "__main__":
    main()
