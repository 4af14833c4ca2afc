"""What came out of races: a table for terminals, one for pages, a file with every lap, a figure."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prsgd
from prsgd.bench.contestants import CONTESTANTS, NONE, is_ours
from prsgd.bench.race import Race
from prsgd.report.figures import save
from prsgd.report.figures.style import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

PACKAGES = ("torch", "accelerate", "torchft-nightly", "numpy")


NOTE = """\
throughput   of that without communication, the median of the rounds
one average  what steps with one take beyond the others; DDP has none without
processor    time that communication takes of it in one period, per rank"""


def text(race: Race) -> str:
    """For a terminal of 80 columns."""
    head = f"{race.model} over {race.link}, {race.ranks} ranks, period {race.period}"
    lines = [head, f"{'':17} throughput   (rounds)  one average  processor"]
    for name in race.ranking():
        shares = race.shares(name)
        spread = f"{100 * min(shares):.0f}-{100 * max(shares):.0f}"
        share = f"{name:17} {100 * race.share(name):8.1f} % {spread:>10}"
        sync = "" if name == NONE or CONTESTANTS[name].every_step else f"{1e3 * race.sync_seconds(name):.3g} ms"
        processor = "" if name == NONE else f"{1e3 * race.processor_seconds(name):.3g} ms"
        lines.append(f"{share} {sync:>12} {processor:>10}".rstrip())
    lines += [f"{name:17} left out: {why}" for name, why in race.left_out.items()]
    return "\n".join(lines)


def markdown(races: Sequence[Race]) -> str:
    """One table: a row for each contestant, a column for each race; the best of each in bold."""
    names = [name for name in CONTESTANTS if any(name in race.laps for race in races)]
    lines = [
        "| | " + " | ".join(f"{race.model}, {race.link}, period {race.period}" for race in races) + " |",
        "|---" * (len(races) + 1) + "|",
    ]
    for name in names:
        cells = []
        for race in races:
            if name not in race.laps:
                cells.append("")
                continue
            share = f"{race.share(name):.3f}"
            cells.append(f"**{share}**" if name == next(n for n in race.ranking() if n != NONE) else share)
        lines.append(f"| {CONTESTANTS[name].summary} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What a reader has to know of where it was measured."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    kind = next((line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")), "")
    return {
        "cores": os.cpu_count(),
        "processor": kind or platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "prsgd": prsgd.__version__,
        **found,
    }


def _cpuinfo() -> Iterable[str]:
    place = Path("/proc/cpuinfo")
    return place.read_text().splitlines() if place.exists() else ()


def write(races: Sequence[Race], folder: Path, command: str) -> list[Path]:
    """bench.json with every lap, bench.md with the table, and the figure; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"command": command, "machine": machine(), "races": [race.to_json() for race in races]}
    kept = folder / "bench.json"
    kept.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = folder / "bench.md"
    page.write_text(markdown(races) + "\n", encoding="utf-8")
    return [kept, page, *save(folder, {"bench": lambda: draw(races)})]


def read(place: Path) -> list[Race]:
    """The races of a bench.json."""
    return [Race.from_json(content) for content in json.loads(place.read_text(encoding="utf-8"))["races"]]


def draw(races: Sequence[Race]) -> Drawing:
    """Bars: the share of the throughput without communication, one panel a race."""
    from matplotlib.figure import Figure as Drawing

    names = [n for n in reversed(CONTESTANTS) if n != NONE and any(n in race.laps for race in races)]
    drawing = Drawing(figsize=(0.9 + 1.9 * len(races), 0.7 + 0.2 * len(names)), layout="constrained")
    for axes, race in zip(drawing.subplots(1, len(races), sharey=True, squeeze=False)[0], races):
        shares = [race.share(name) if name in race.laps else 0.0 for name in names]
        colours = [COLOURS[0] if is_ours(name) else COLOURS[6] for name in names]
        axes.barh(range(len(names)), shares, color=colours, height=0.7)
        for place, share in enumerate(shares):
            if share:
                axes.text(share + 0.02, place, f"{share:.2f}", va="center", fontsize=6.5)
        axes.set_title(f"{race.model}, {race.link}, period {race.period}")
        axes.set_xlim(0, 1.15)
        axes.set_xlabel("throughput / without communication")
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="y", visible=False)
    return drawing
