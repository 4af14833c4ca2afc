"""``prsgd verify``: what the paper proves, measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap

from prsgd.cli.parser import Parser


def add(parser: Parser) -> None:
    parser.add_argument("--full", action="store_true", help="more seeds, steps and workers: about ten minutes")
    parser.add_argument("--json", action="store_true", help="the claims for programs")


def run(args: argparse.Namespace) -> int:
    """0 if every claim holds, 1 if one does not."""
    from prsgd.theory.verify import FULL, QUICK, claims

    found = []
    if not args.json:
        print(f"{'holds':5} {'measured':>10}    {'bound':>10}   claim")
    for claim in claims(FULL if args.full else QUICK):
        found.append(claim)
        if args.json:
            print(claim.name, file=sys.stderr)
            continue
        sign = ">=" if claim.at_least else "<="
        holds = "yes" if claim.holds else "NO"
        print(f"{holds:5} {claim.measured:>10.4g} {sign} {claim.bound:>10.4g}   {claim.name}")
        for line in textwrap.wrap(claim.note, 46):
            print(f"{'':33}{line}", flush=True)
    missed = [claim.name for claim in found if not claim.holds]
    if args.json:
        print(json.dumps([{**dataclasses.asdict(claim), "holds": claim.holds} for claim in found]))
    else:
        print()
        print(
            f"{len(found) - len(missed)} of {len(found)} claims hold"
            + (f"; not: {'; '.join(missed)}" if missed else "")
        )
    return 1 if missed else 0
