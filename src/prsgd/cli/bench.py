"""``prsgd bench``: against DDP and the other libraries, the same work over the same link."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from prsgd.cli.parser import Parser, fail, path, refusing

LINKS = ["loopback", "1Gbit", "100Mbit"]
USUAL = ["mlp", "resnet20"]
ASIDE = {"ddp-bf16", "ddp-powersgd"}
"""Contestants that run only if they are named."""
MOST_RANKS, MOST_ROUNDS, MOST_PERIOD = 16, 1000, 10_000


def add(parser: Parser) -> None:
    parser.add_argument("--models", nargs="+", default=USUAL, metavar="M", help=f"({' '.join(USUAL)}) or gpt, mlp-25m")
    parser.add_argument(
        "--links", nargs="+", default=LINKS, metavar="L",
        help=f"({' '.join(LINKS)}); 1Gbit+10ms has a delay; all but loopback need root, and are made and removed here",
    )  # fmt: skip
    parser.add_argument("--contestants", nargs="+", metavar="C", help="(all that are installed); see --list")
    parser.add_argument("--period", type=int, default=8, metavar="I", help="steps between averages (8)")
    parser.add_argument("--ranks", type=int, default=2, metavar="R", help="processes, of one thread each (2)")
    parser.add_argument("--rounds", type=int, default=7, metavar="K", help="in which all take turns (7)")
    parser.add_argument("--out", type=path, metavar="DIR", help="for bench.json, bench.md and figures/bench.png")
    parser.add_argument("--json", action="store_true", help="every lap, for programs")
    parser.add_argument("--list", action="store_true", help="the models and the contestants")


def run(args: argparse.Namespace) -> int:
    """0 if at least one race came to its end."""
    from prsgd._check import one_of, whole_number
    from prsgd.bench import told
    from prsgd.bench.contestants import CONTESTANTS
    from prsgd.bench.links import Link, NoLinkError
    from prsgd.bench.models import MODELS
    from prsgd.bench.race import DropOutError, Race, race

    if args.list:
        rows = {**{f"model {name}": row.summary for name, row in MODELS.items()}}
        rows |= {name: row.summary for name, row in CONTESTANTS.items()}
        print("\n".join(f"{name:17} {summary}" for name, summary in rows.items()))
        return 0
    with refusing("bench"):
        models = [one_of("models", name, MODELS) for name in args.models]
        usual = [name for name in CONTESTANTS if name not in ASIDE]
        contestants = [one_of("contestants", name, CONTESTANTS) for name in args.contestants or usual]
        links = [Link.parse(text) for text in args.links]
        ranks = whole_number("ranks", args.ranks, at_least=2, at_most=MOST_RANKS)
        rounds = whole_number("rounds", args.rounds, at_least=1, at_most=MOST_ROUNDS)
        period = whole_number("period", args.period, at_least=1, at_most=MOST_PERIOD)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
    races: list[Race] = []
    with _terminable():
        for model, link in ((m, k) for m in models for k in links):
            try:
                races.append(race(model, link, contestants, period=period, ranks=ranks, rounds=rounds, tell=_say))
            except (NoLinkError, DropOutError) as problem:
                _say("")
                print(f"left out: {model} over {link.name}: {problem}", file=sys.stderr)
                continue
            _say("")
            if not args.json:
                print(told.text(races[-1]), end="\n\n", flush=True)
            if args.out is not None:  # what there is, should the rest be interrupted
                paths = told.write(races, args.out, shlex.join(["prsgd", *sys.argv[1:]]))
    if not races:
        fail("bench", "no race came to its end", code=1)
    if args.json:
        print(json.dumps({"machine": told.machine(), "races": [r.to_json() for r in races]}))
    else:
        print(told.NOTE)
    if args.out is not None:
        print("\n".join(map(str, paths)), file=sys.stderr if args.json else sys.stdout)
    return 0


def _say(line: str) -> None:
    """What is going on now, on one line that is written over."""
    if sys.stderr.isatty():
        print(f"\r{line[:79]:79}", end="\r" if not line else "", file=sys.stderr, flush=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM leaves nothing behind either: it ends the bench as Ctrl-C does."""

    def on_terminate(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
