"""Joins what several calls of `prsgd bench --out` wrote: one JSON with every lap, the tables, and the figures.

python bench/join.py FOLDER [FOLDER ...]    # into docs/results: bench.json and two figures, of the first
                                            # race of each kind; the tables are printed
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from prsgd.bench import told
from prsgd.bench.race import Race
from prsgd.report.figures import save

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="Joins what several calls of `prsgd bench --out` wrote.")
    parser.add_argument("folders", type=Path, nargs="+", help="each with a bench.json")
    parser.add_argument("--into", type=Path, default=RESULTS)
    args = parser.parse_args()
    files = [folder / "bench.json" for folder in args.folders]
    commands: list[str] = []
    for file in files:
        content = json.loads(file.read_text())
        told_by = content["commands"] if "commands" in content else [content["command"]]
        commands += [re.sub(r" --out \S+", "", command) for command in told_by]
    found = [part for file in files for part in told.read(file)]
    (args.into / "bench.json").write_text(json.dumps({"commands": commands, **told.content(found)}) + "\n")
    first = {(part.model, part.link, part.ranks, isinstance(part, Race)): part for part in reversed(found)}
    with TemporaryDirectory() as folder:
        for drawn in save(Path(folder), told.figures([part for part in found if part in first.values()])):
            if drawn.suffix == ".png":
                shutil.copy(drawn, args.into / ("bench.png" if drawn.stem == "bench" else f"bench-{drawn.name}"))
    print("\n\n".join(told.tables(found)))


if __name__ == "__main__":
    main()
