"""``prsgd methods``: the table of methods."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from prsgd.cli.parser import Parser, refusing
from prsgd.lab.methods import METHODS, Method, Settings, find

WIDTH = 80
MOST_WORKERS = 1000
"""A spectral gap takes the eigenvalues of a matrix of all pairs."""


NUM_STEPS = 1000
"""Of the run that the parts are shown for."""


def add(parser: Parser) -> None:
    parser.add_argument("name", nargs="*", metavar="NAME", help="these (all)")
    parser.add_argument(
        "--workers", type=int, default=8, metavar="N", help="for what depends on how many there are (8)"
    )
    parser.add_argument("--json", action="store_true", help="print it for programs")


def run(args: argparse.Namespace) -> int:
    with refusing("methods"):
        rows = {name: _row(find(name), args.workers) for name in args.name or METHODS}
    if args.json:
        print(json.dumps(rows))
        return 0
    for name, row in rows.items():
        print(f"{name}  ({row['reference']})")
        for text in (row["words"], row["parts"], *row["notes"]):
            print(textwrap.fill(text, WIDTH, initial_indent="    ", subsequent_indent="    "))
        print()
    print("prsgd train --method NAME takes one, prsgd compare --methods several, or all.")
    return 0


def _row(method: Method, workers: int) -> dict[str, Any]:
    from prsgd._check import whole_number
    from prsgd.averaging.gossip import gossip

    whole_number("workers", workers, at_least=1, at_most=MOST_WORKERS)
    parts = method.build(Settings(period=method.period or 1, num_steps=NUM_STEPS))
    notes = [f"in a run of {NUM_STEPS:,} steps"] if method.switches else []
    if isinstance(parts.averaging, gossip):
        gap = parts.averaging.spectral_gap(workers)
        notes.append(f"spectral gap {gap:.3f} with {workers} workers: 1 is the exact mean, near 0 mixes slowly")
    overlap = f", overlap={method.overlap}" if method.overlap else ""
    return {
        "words": method.words,
        "reference": method.reference,
        "parts": f"{parts}{overlap}",
        "period": method.period,
        "overlap": method.overlap,
        "notes": notes,
    }
