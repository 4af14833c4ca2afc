"""``prsgd verify``: what the paper proves, measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap

from prsgd.cli.parser import Parser, path, refusing


def add(parser: Parser) -> None:
    parser.add_argument("--full", action="store_true", help="more seeds, steps and workers: minutes")
    parser.add_argument("--json", action="store_true", help="the claims for programs")
    parser.add_argument("--out", type=path, metavar="DIR", help="for a page with the figures: verify.html")


def run(args: argparse.Namespace) -> int:
    """0 if every claim holds, 1 if one does not."""
    from prsgd.theory.verify import FULL, QUICK, claims

    if args.out is not None:
        with refusing("verify"):
            args.out.mkdir(parents=True, exist_ok=True)
    effort = FULL if args.full else QUICK
    found = []
    if not args.json:
        print(f"{'holds':5} {'measured':>10}    {'bound':>10}   claim")
    for claim in claims(effort):
        found.append(claim)
        if args.json:
            print(claim.name, file=sys.stderr)
            continue
        sign = ">=" if claim.at_least else "<="
        holds = "yes" if claim.holds else "NO"
        print(f"{holds:5} {claim.measured:>10.4g} {sign} {claim.bound:>10.4g}   {claim.name}")
        spread = f"measured ± {claim.error:.2g}; " if claim.error else ""
        for line in textwrap.wrap(spread + claim.note, 46):
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
    if args.out is not None:
        from prsgd.report import verified

        with refusing("verify"):
            place = verified.write(found, effort, args.out)
        print(place, file=sys.stderr if args.json else sys.stdout)
    return 1 if missed else 0
