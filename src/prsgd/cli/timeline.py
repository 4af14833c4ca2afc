"""``prsgd timeline DIR``: what every worker of a run did when."""

from __future__ import annotations

import argparse
import json

from prsgd import files
from prsgd.cli.parser import Parser, path, refusing


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=path, metavar="DIR", help="of a run or a comparison")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="how many are drawn (3)")


def run(args: argparse.Namespace) -> int:
    with refusing("timeline"):
        from prsgd._check import whole_number
        from prsgd.cli.display import number_of
        from prsgd.clocks import trace
        from prsgd.report import figures, timeline
        from prsgd.report.read import read
        from prsgd.report.series import names, order

        rounds = whole_number("rounds", args.rounds, at_least=1)
        runs = sorted(read([args.folder]), key=order)
        found = {run.folder: (name, trace.read(run.folder)) for run, name in zip(runs, names(runs))}
        found = {folder: (label, spans) for folder, (label, spans) in found.items() if spans}
        if not found:
            raise ValueError(f"{args.folder} has no trace: it is written when a run ends")
        workers = {run.folder: run.config["workers"] for run in runs}
        drawn = [
            timeline.timeline(label, spans, rounds, workers=workers[folder]) for folder, (label, spans) in found.items()
        ]
        timelines = [one for one in drawn if one is not None]
        for folder, (_, spans) in found.items():
            (folder / files.TRACE).write_text(json.dumps(trace.to_chrome(trace.split(spans))))
        paths = figures.save(args.folder, {"timeline": lambda: timeline.draw(timelines)}) if timelines else []
    for folder, (label, spans) in found.items():
        first = min((span.number for span in spans if span.kind == "step"), default=1)
        since = "" if first <= 1 else f" (from step {first:,} on: a trace keeps the newest, and begins anew on resume)"
        print(f"\n{label}{since}\n{'worker':>6} {'computing':>11} {'waiting':>11} {'averaging':>11} {'idle':>7}")
        shares = trace.shares(trace.split(spans))
        for share, row in zip(shares, timeline.row_names([share.worker for share in shares], workers[folder])):
            times = (share.computing, share.waiting, share.communicating)
            print(f"{row:>6} " + " ".join(f"{t:>9.3f} s" for t in times) + f" {share.idle:>7.1%}")
    print()
    for place in paths:
        print(place)
    print(f"for Perfetto or chrome://tracing: {next(iter(found)) / files.TRACE}")
    if len(found) > 1:
        print(f"(there is one for each of the {number_of(len(found), 'run')}, in its folder)")
    return 0
