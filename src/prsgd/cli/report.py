"""``prsgd report DIR...``: one HTML page, figures and tables of runs that are there."""

from __future__ import annotations

import argparse
from pathlib import Path

from prsgd.cli.parser import Parser, refusing


def add(parser: Parser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="of runs or comparisons")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the page goes (the first DIR)")


def run(args: argparse.Namespace) -> int:
    with refusing("report"):
        from prsgd.report import page

        print(page.write(args.folders, args.out))
    return 0
