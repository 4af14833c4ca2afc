"""``prsgd data list | get NAME | path NAME``."""

from __future__ import annotations

import argparse
import sys

from prsgd.cli.parser import Parser, path, refusing


def add(parser: Parser) -> None:
    actions = parser.add_subparsers(
        dest="action", metavar="list|get|path", required=True, parser_class=Parser, help="what to do"
    )
    actions.add_parser("list", help="the data sets, and which are here")
    get = actions.add_parser("get", help="fetch one, check it and keep it")
    get.add_argument("name", help="of the data set")
    get.add_argument("--from", dest="given", type=path, metavar="PATH", help="a file or folder that you have already")
    where = actions.add_parser("path", help="where one is kept")
    where.add_argument("name", help="of the data set")


def run(args: argparse.Namespace) -> int:
    with refusing("data"):
        from prsgd.data import datasets

        if args.action == "list":
            print("digits         embedded  handwritten digits 8x8 (Alpaydin, Kaynak 1998)")
            for name, source in datasets.SOURCES.items():
                state = "here" if datasets.path(name).exists() else "not here"
                print(f"{name:<14} {state:<9} {source.summary}")
            return 0
        if args.name == "digits":
            raise ValueError("digits are part of prsgd: there is nothing to fetch, and no file of their own")
        if args.action == "path":
            place = datasets.path(args.name)
            if not place.exists():
                raise ValueError(f"{args.name} is not here yet: prsgd data get {args.name}")
            print(place)
            return 0
        datasets.path(args.name)  # is it known?
        print(f"fetching {args.name} ..." if args.given is None else f"reading {args.given} ...", file=sys.stderr)
        print(datasets.get(args.name, given=args.given))
    return 0
