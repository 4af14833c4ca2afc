"""The options that train and compare share, on the command line or in a TOML file."""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path
from typing import Any

from prsgd import _toml
from prsgd._check import shown
from prsgd.cli.parser import Parser, path
from prsgd.lab.methods import METHODS
from prsgd.tasks import MODULES

RUN = (
    "task", "model", "method", "workers", "period", "overlap", "epochs", "steps", "batch_size", "lr", "momentum",
    "weight_decay", "split", "processes", "cluster", "seconds", "weights",
)  # fmt: skip
"""Fields of a Config that are options of the same name."""


def add_run_options(parser: Parser, *, several: bool) -> None:
    """``several``: method, period and overlap take more than one value."""
    many: dict[str, Any] = {"nargs": "+"} if several else {}
    what = parser.add_argument_group("what is trained")
    what.add_argument("--task", help=f"{', '.join(MODULES)} (digits)")
    what.add_argument("--model", help="one of the task's models (its first)")
    what.add_argument("--split", help="who has which data: pool, iid or dirichlet:ALPHA (iid)")
    how = parser.add_argument_group("how")
    names = ("--method", "--methods") if several else ("--method",)
    how.add_argument(
        *names,
        dest="method",
        metavar="NAME",
        help=f"{'all, or ' if several else ''}{', '.join(METHODS)} (pr-sgd); prsgd methods tells what they are",
        **many,
    )
    how.add_argument("--workers", type=int, metavar="N", help="how many (8)")
    usual = "1 4 8 16 32; beside other methods each one's own" if several else "the method's own, mostly 8"
    how.add_argument("--period", type=int, metavar="I", help=f"local steps between two averages ({usual})", **many)
    how.add_argument(
        "--overlap", type=int, metavar="D", help="steps that hide an average's transfer (0; d-psgd 1)", **many
    )
    how.add_argument(
        "--epochs",
        type=int,
        metavar="E",
        help="passes over the data, all workers together (digits 40, synthetic 20, others 10)",
    )
    how.add_argument("--steps", type=int, metavar="T", help="instead of epochs: steps of each worker")
    how.add_argument("--batch-size", type=int, metavar="B", help="of each worker (digits and synthetic 8, others 32)")
    how.add_argument("--lr", type=float, help="divided by 10 at 1/2 and 11/12 of the run (0.1)")
    how.add_argument("--momentum", type=float, metavar="M", help="(0.9)")
    how.add_argument("--weight-decay", type=float, metavar="W", help="(0)")
    mixed = parser.add_argument_group("mixed hardware")
    mixed.add_argument(
        "--cluster",
        metavar="NAME",
        help="model one: a file, or mixed, stragglers, lan-1g, lan-10g, wan, "
        "datacenter, paper; with --processes N of N workers, play it by sleeping",
    )
    mixed.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="of a round of pr-sgd-timed (PERIOD steps of the cluster's slowest worker)",
    )
    mixed.add_argument("--weights", help="each worker counts: uniform, or by its steps (uniform)")


def add_place_options(parser: Parser) -> argparse._ArgumentGroup:
    where = parser.add_argument_group("where")
    where.add_argument("--processes", type=int, metavar="P", help="spread a run's workers over P processes here (1)")
    where.add_argument("--out", type=path, metavar="DIR", help="the run's folder (a new one in runs/)")
    where.add_argument("--resume", type=path, metavar="DIR", help="continue what is in this folder")
    where.add_argument("--overwrite", action="store_true", help="replace the run that --out holds")
    where.add_argument("--config", type=path, metavar="FILE", help="a TOML file with these options as keys")
    where.add_argument("--json", action="store_true", help="print a summary for programs, and nothing else, to stdout")
    where.add_argument("--tensorboard", action="store_true", help="write event files too")
    return where


def new_folder(name: str) -> Path:
    """One in runs/ that is not there yet, called by the time."""
    place = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    return place if not place.exists() else next(other for other in others if not other.exists())


PLACES = ("out", "resume")
SWITCHES = ("overwrite", "json", "tensorboard")


def merged(args: argparse.Namespace, keys: tuple[str, ...]) -> dict[str, Any]:
    """What was given of ``keys``, on the command line or else in the file, whose other options go into ``args``."""
    given = _toml.read(args.config, (*keys, *PLACES, *SWITCHES)) if args.config is not None else {}
    for key in PLACES:
        value = given.pop(key, None)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{key} must be a text, got {shown(value)}")
        if getattr(args, key) is None and value is not None:
            try:
                setattr(args, key, path(value))
            except ValueError as error:
                raise ValueError(f"{key} {error}") from None
    for key in SWITCHES:
        value = given.pop(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, got {shown(value)}")
        setattr(args, key, getattr(args, key) or value)
    typed = {key: getattr(args, key, None) for key in keys}
    return {**given, **{key: value for key, value in typed.items() if value is not None}}
