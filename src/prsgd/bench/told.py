"""What came out of races: a table for terminals, one for pages, a file with every lap, a figure."""

from __future__ import annotations

import json
import os
import platform
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import prsgd
from prsgd.bench.climb import Climb
from prsgd.bench.contestants import CONTESTANTS, MEASURES, NONE, is_ours
from prsgd.bench.race import Race
from prsgd.bench.rank import PARTS
from prsgd.report.figures import save
from prsgd.report.figures.style import COLOURS, DASHES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

PACKAGES = ("torch", "accelerate", "torchft-nightly", "numpy")


NOTE = """\
throughput   of that without communication, the median of the rounds
one average  what steps with one take beyond the others; DDP has none without
processor    time that communication takes of it in one period, per rank"""


PART_WORDS = {"copy": "copying", "wait": "waiting", "flight": "in flight"}


def text(found: Race | Climb) -> str:
    """For a terminal of 80 columns."""
    return _text_of_race(found) if isinstance(found, Race) else _text_of_climb(found)


def _text_of_race(race: Race) -> str:
    head = f"{race.model} over {race.link}, {race.ranks} ranks, period {race.period}"
    lines = [head, f"{'':17} throughput   (rounds)  one average  processor"]
    for name in race.ranking():
        shares = race.shares(name)
        spread = f"{100 * min(shares):.0f}-{100 * max(shares):.0f}"
        share = f"{name:17} {100 * race.share(name):8.1f} % {spread:>10}"
        sync = "" if name == NONE or CONTESTANTS[name].every_step else f"{1e3 * race.sync_seconds(name):.3g} ms"
        processor = "" if name == NONE else f"{1e3 * race.processor_seconds(name):.3g} ms"
        lines.append(f"{share} {sync:>12} {processor:>10}".rstrip())
    lines.append(f"others had {race.others_load:.2f} of the machine's processors meanwhile")
    return "\n".join([*lines, *_left_out(race.left_out, 17), *_text_of_parts(race)])


def _text_of_parts(race: Race) -> list[str]:
    """Where an average of ours spends its time."""
    known = {name: parts for name in race.ranking() if (parts := race.parts(name))}
    lines = [
        f"{name:17} " + " ".join(f"{1e3 * parts[part]:9.3g} ms" for part in PARTS) for name, parts in known.items()
    ]
    head = f"{'of one average':17} " + " ".join(f"{PART_WORDS[part]:>12}" for part in PARTS)
    return ["", head, *lines] if lines else []


def _text_of_climb(climb: Climb) -> str:
    lines = [
        f"{climb.model} over {climb.link}, {climb.ranks} ranks, to {100 * climb.target:g} % of the test samples",
        f"{'':22} {'seconds':>9} {'steps':>7} {'best':>8}",
    ]
    for name in climb.ranking():
        seconds = climb.median_seconds(name)
        steps = median(points[-1].steps for points in climb.points[name])
        said = "not all" if seconds is None else f"{seconds:.2f}"
        lines.append(f"{name:22} {said:>9} {steps:>7g} {100 * climb.best(name):>6.1f} %")
    return "\n".join([*lines, *_left_out(climb.left_out, 22)])


def _left_out(reasons: Mapping[str, str], width: int) -> list[str]:
    """Their names, and why."""
    lines = [f"{name:{width}} left out: {why}" for name, why in reasons.items()]
    return [textwrap.fill(line, 80, subsequent_indent=" " * (width + 1)) for line in lines]


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
            best = next((n for n in race.ranking() if n not in MEASURES), None)
            cells.append(f"**{share}**" if name == best else share)
        lines.append(f"| {CONTESTANTS[name].summary} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown_of_parts(races: Sequence[Race]) -> str:
    """Where an average of ours spends its time: a row for each contestant that tells, a column for each race."""
    names = [name for name in CONTESTANTS if any(name in race.laps and race.parts(name) for race in races)]
    words = ", ".join(PART_WORDS[part] for part in PARTS)
    lines = [
        f"| ms of one average: {words} | " + " | ".join(f"{race.model}, {race.link}" for race in races) + " |",
        "|---" * (len(races) + 1) + "|",
    ]
    for name in names:
        found = [race.parts(name) if name in race.laps else {} for race in races]
        cells = [", ".join(f"{1e3 * parts[part]:.3g}" for part in PARTS) if parts else "" for parts in found]
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


def content(found: Sequence[Race | Climb]) -> dict[str, Any]:
    """Every lap and every look."""
    races, climbs = _apart(found)
    told = {"races": [r.to_json() for r in races], "climbs": [c.to_json() for c in climbs]}
    return {"machine": machine(), **{kind: parts for kind, parts in told.items() if parts}}


def write(found: Sequence[Race | Climb], folder: Path, command: str) -> list[Path]:
    """bench.json with every lap, bench.md with the tables, and the figures; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "bench.json"
    kept.write_text(json.dumps({"command": command, **content(found)}, indent=1) + "\n", encoding="utf-8")
    page = folder / "bench.md"
    page.write_text("\n\n".join(tables(found)) + "\n", encoding="utf-8")
    return [kept, page, *save(folder, figures(found))]


def tables(found: Sequence[Race | Climb]) -> list[str]:
    """Markdown: one of all races, one of where their averages spend time, and one of each climb."""
    races, climbs = _apart(found)
    return ([markdown(races), markdown_of_parts(races)] if races else []) + [*map(_markdown_of_climb, climbs)]


def figures(found: Sequence[Race | Climb]) -> dict[str, Callable[[], Drawing]]:
    """By name; drawn when they are called."""
    races, climbs = _apart(found)
    made: dict[str, Callable[[], Drawing]] = {}
    if races:
        made["bench"] = lambda: draw(races)
    if climbs:
        made["accuracy"] = lambda: draw_climbs(climbs)
    return made


def read(place: Path) -> list[Race | Climb]:
    """What a bench.json tells."""
    told = json.loads(place.read_text(encoding="utf-8"))
    races = [Race.from_json(part) for part in told.get("races", ())]
    return [*races, *(Climb.from_json(part) for part in told.get("climbs", ()))]


def _apart(found: Sequence[Race | Climb]) -> tuple[list[Race], list[Climb]]:
    return [f for f in found if isinstance(f, Race)], [f for f in found if isinstance(f, Climb)]


def _markdown_of_climb(climb: Climb) -> str:
    head = f"{climb.model}, {climb.link}, {climb.ranks} ranks, to {100 * climb.target:g} %"
    lines = [f"| {head} | seconds | steps | best accuracy |", "|---|---|---|---|"]
    for name in climb.ranking():
        seconds = ", ".join(
            "never" if s is None else f"{s:.3g}" if s < 100 else f"{s:.0f}" for s in climb.seconds(name)
        )
        steps = ", ".join(str(points[-1].steps) for points in climb.points[name])
        lines.append(f"| {name} | {seconds} | {steps} | {100 * climb.best(name):.1f} % |")
    return "\n".join(lines)


def _grid(number: int, side_by_side: int) -> tuple[int, int]:
    """Rows and columns for so many panels: what does not fit beside the others goes below."""
    columns = min(number, side_by_side)
    return -(-number // columns), columns


def _panels(drawing: Drawing, number: int, grid: tuple[int, int], *, sharey: bool = False) -> list[Axes]:
    """The first so many of the grid; the others are left empty."""
    axes = list(drawing.subplots(*grid, sharey=sharey, squeeze=False).flat)
    for unused in axes[number:]:
        unused.remove()
    return axes[:number]


def draw(races: Sequence[Race]) -> Drawing:
    """Bars: the share of the throughput without communication, one panel a race. What only measures is pale."""
    from matplotlib.figure import Figure as Drawing

    names = [n for n in reversed(CONTESTANTS) if n != NONE and any(n in race.laps for race in races)]
    rows, columns = _grid(len(races), 3)
    drawing = Drawing(figsize=(0.9 + 1.9 * columns, rows * (0.7 + 0.2 * len(names))), layout="constrained")
    panels = _panels(drawing, len(races), (rows, columns), sharey=True)
    for axes, race in zip(panels, races):
        shares = [race.share(name) if name in race.laps else 0.0 for name in names]
        colours = ["0.75" if name in MEASURES else COLOURS[0] if is_ours(name) else COLOURS[6] for name in names]
        axes.barh(range(len(names)), shares, color=colours, height=0.7)
        for place, share in enumerate(shares):
            if share:
                axes.text(share + 0.02, place, f"{share:.2f}", va="center", fontsize=6.5)
        axes.set_title(f"{race.model}, {race.link}, period {race.period}")
        axes.set_xlim(0, 1.15)
        axes.set_xlabel("share of the throughput")
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="y", visible=False)
    return drawing


def draw_climbs(climbs: Sequence[Climb]) -> Drawing:
    """Lines: accuracy against the seconds of training, one panel a climb, the first seed of each contestant."""
    from matplotlib.figure import Figure as Drawing

    names = list(dict.fromkeys(name for climb in climbs for name in climb.points))
    rows, columns = _grid(len(climbs), 2)
    drawing = Drawing(figsize=(0.9 + 3.0 * columns, 0.7 + 2.5 * rows), layout="constrained")
    panels = _panels(drawing, len(climbs), (rows, columns))
    for axes, climb in zip(panels, climbs):
        for name, seeds in climb.points.items():
            style = names.index(name)
            dashes = DASHES[style % len(DASHES)]
            axes.plot(
                [p.seconds for p in seeds[0]],
                [100 * p.accuracy for p in seeds[0]],
                color=COLOURS[style % len(COLOURS)],
                linestyle=(0, dashes) if dashes else "-",
                label=name,
            )
        axes.axhline(100 * climb.target, color="black", linewidth=0.6)
        axes.set_xscale("log")
        axes.set_title(f"{climb.model}, {climb.link}, {climb.ranks} ranks")
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("test accuracy (%)")
    lines = {line.get_label(): line for axes in panels for line in axes.get_lines()}
    drawing.legend([lines[name] for name in names], names, loc="outside lower center", ncols=4)
    return drawing
