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
from typing import Any

from prsgd._check import one_of, positive, whole_number
from prsgd.cli.parser import Parser, fail, path, refusing

LINKS = ["loopback", "1Gbit", "100Mbit"]
USUAL = ["mlp", "resnet20"]
ASIDE = {"ddp-bf16", "ddp-fp16", "ddp-powersgd", "prsgd-period-auto", "prsgd-diloco"}
"""Contestants that run only if they are named."""
MOST_RANKS, MOST_ROUNDS, MOST_PERIOD = 16, 1000, 10_000


def add(parser: Parser) -> None:
    models = f"what is trained ({' '.join(USUAL)}); also gpt, mlp-25m"
    parser.add_argument("--models", nargs="+", default=USUAL, metavar="M", help=models)
    parser.add_argument(
        "--links", nargs="+", default=LINKS, metavar="L",
        help=f"over what ({' '.join(LINKS)}); 1Gbit+10ms has a delay; all but loopback need root, and are made and "
        "removed here",
    )  # fmt: skip
    parser.add_argument("--contestants", nargs="+", metavar="C", help="who (all that are installed); see --list")
    parser.add_argument("--period", type=int, default=8, metavar="I", help="steps between averages (8)")
    parser.add_argument("--ranks", type=int, default=2, metavar="R", help="processes, of one thread each (2)")
    parser.add_argument("--rounds", type=int, default=7, metavar="K", help="how often all take their turn (7)")
    parser.add_argument(
        "--accuracy", type=float, metavar="A",
        help="time until the test accuracy is A, of a task of the lab: --models digits/cnn",
    )  # fmt: skip
    parser.add_argument("--lr", type=float, default=0.02, help="with --accuracy: the learning rate (0.02)")
    parser.add_argument("--seeds", type=int, default=3, metavar="S", help="with --accuracy: how many (3)")
    parser.add_argument("--look", type=int, default=16, metavar="I", help="with --accuracy: test every I steps (16)")
    parser.add_argument("--steps", type=int, default=2000, metavar="T", help="with --accuracy: give up after T (2000)")
    parser.add_argument("--out", type=path, metavar="DIR", help="for bench.json, bench.md and figures/bench.png")
    parser.add_argument("--json", action="store_true", help="every lap, for programs")
    parser.add_argument("--list", action="store_true", help="the models and the contestants")


def run(args: argparse.Namespace) -> int:
    """0 if at least one race came to its end."""
    from prsgd.bench import told
    from prsgd.bench.climb import CLIMBERS, Climb, climb, parse
    from prsgd.bench.contestants import CONTESTANTS
    from prsgd.bench.links import Link, NoLinkError
    from prsgd.bench.models import MODELS, check
    from prsgd.bench.race import DropOutError, Race, race

    if args.list:
        rows = {**{f"model {name}": row.summary for name, row in MODELS.items()}}
        rows |= {name: row.summary for name, row in CONTESTANTS.items()}
        print("\n".join(f"{name:17} {summary}" for name, summary in rows.items()))
        return 0
    with refusing("bench"):
        numbers = _numbers(args)
        models = [check(name) for name in args.models]
        usual = CLIMBERS if args.accuracy is not None else [name for name in CONTESTANTS if name not in ASIDE]
        contestants = list(dict.fromkeys(args.contestants or usual))
        for text in contestants:
            name = parse(text, args.period)[0] if args.accuracy is not None else text
            one_of("contestants", name, CONTESTANTS, listed_by="prsgd bench --list")
        links = [Link.parse(text) for text in args.links]
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
    found: list[Race | Climb] = []
    with _terminable():
        for model, link in ((m, k) for m in models for k in links):
            try:
                start = climb if args.accuracy is not None else race
                found.append(start(model, link, contestants, tell=_say, **numbers))
            except (NoLinkError, DropOutError) as problem:
                _say("")
                print(f"left out: {model} over {link.name}: {problem}", file=sys.stderr)
                continue
            _say("")
            if not args.json:
                print(told.text(found[-1]), end="\n\n", flush=True)
            if args.out is not None:  # what there is, should the rest be interrupted
                paths = told.write(found, args.out, shlex.join(["prsgd", *sys.argv[1:]]))
    if not found:
        fail("bench", "no race came to its end", code=1)
    if args.json:
        print(json.dumps(told.content(found)))
    elif args.accuracy is None:
        print(told.NOTE)
    if args.out is not None:
        print("\n".join(map(str, paths)), file=sys.stderr if args.json else sys.stdout)
    return 0


def _numbers(args: argparse.Namespace) -> dict[str, Any]:
    """What a race or a climb is told beside who runs where."""
    found: dict[str, Any] = {
        "ranks": whole_number("ranks", args.ranks, at_least=2, at_most=MOST_RANKS),
        "period": whole_number("period", args.period, at_least=1, at_most=MOST_PERIOD),
    }
    rounds = whole_number("rounds", args.rounds, at_least=1, at_most=MOST_ROUNDS)
    if args.accuracy is None:
        return {**found, "rounds": rounds}
    if not 0 < args.accuracy <= 1:
        raise ValueError(f"accuracy must be above 0 and at most 1, got {args.accuracy}")
    for name in args.models:
        if "/" not in name:
            raise ValueError(f"to an accuracy: models must be of the lab's tasks, as digits/cnn, got {name!r}")
    seeds = whole_number("seeds", args.seeds, at_least=1, at_most=MOST_ROUNDS)
    look_every = whole_number("look", args.look, at_least=1)
    most_steps = whole_number("steps", args.steps, at_least=look_every)
    found |= {"look_every": look_every, "most_steps": most_steps}
    return {**found, "target": args.accuracy, "lr": positive("lr", args.lr), "seeds": range(seeds)}


def _say(line: str) -> None:
    """What is going on now, on one line that is written over."""
    if sys.stderr.isatty():
        print(f"\r{line[:79]:79}", end="\r" if not line else "", file=sys.stderr, flush=True)


@contextmanager
def _terminable() -> Iterator[None]:
    """The first of these signals ends the bench, and no other disturbs it while it removes what it has made."""
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]

    def on_terminate(_: int, __: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = [signal.signal(number, on_terminate) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)
