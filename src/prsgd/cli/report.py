"""``prsgd report DIR...``: one HTML page, figures and tables of runs that are there."""

from __future__ import annotations

import argparse

from prsgd.cli.options import new_folder
from prsgd.cli.parser import Parser, path, refusing


def add(parser: Parser) -> None:
    parser.add_argument("folders", nargs="+", type=path, metavar="DIR", help="of runs or comparisons")
    parser.add_argument(
        "--out", type=path, metavar="DIR", help="where the page goes (DIR; of several a new one in runs/)"
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help='what the others are compared with, such as "pr-sgd period 1" (mini-batch SGD, or what sent most)',
    )


def run(args: argparse.Namespace) -> int:
    with refusing("report"):
        from prsgd.report import page

        out = new_folder("report") if args.out is None and page.is_several(args.folders) else args.out
        print(page.write(args.folders, out, baseline=args.baseline))
    return 0
