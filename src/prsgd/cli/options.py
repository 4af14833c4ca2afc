"""The options that train and compare share, on the command line or in a TOML file."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prsgd import _toml
from prsgd._check import shown
from prsgd.cli.parser import Parser, number, path, whole_or_auto
from prsgd.lab.methods import METHODS
from prsgd.tasks import MODULES

WHAT, HOW, MIXED, WHERE = "what is trained", "how", "mixed hardware", "where"
"""The groups of options in a help text, in this order."""


@dataclass(frozen=True)
class Option:
    """One option of train and compare: ``--batch-size`` on the command line, ``batch_size`` in a file."""

    name: str
    """A field of a Config, unless the value is a path or a switch."""
    group: str
    help: str
    metavar: str | None = None
    kind: Callable[[str], Any] = str
    """What reads it; ``bool`` is for a switch."""
    several: bool = False
    """Does it take more than one value in a comparison?"""
    plural: str | None = None
    """Another name for it in a comparison."""
    help_in_comparison: str | None = None
    """Where it differs."""
    in_file: bool = True

    def add(self, parser: argparse._ActionsContainer, *, several: bool) -> None:
        """Let ``parser`` take it, in a comparison (``several``) or in one run."""
        names = [f"--{self.name.replace('_', '-')}"]
        if several and self.plural is not None:
            names.append(self.plural)
        more: dict[str, Any] = {"action": "store_true"} if self.kind is bool else {"type": self.kind}
        if self.metavar is not None:
            more["metavar"] = self.metavar
        if several and self.several:
            more["nargs"] = "+"
        told = self.help_in_comparison if several and self.help_in_comparison is not None else self.help
        parser.add_argument(*names, dest=self.name, help=told, **more)


_METHODS = f"{', '.join(METHODS)} (pr-sgd); prsgd methods tells what they are"
_OVERLAPS = "; ".join(["0", *(f"{name} {method.overlap}" for name, method in METHODS.items() if method.overlap)])
_SWITCHING = " or ".join(name for name, method in METHODS.items() if method.switches)
_OUTER = ", ".join(name for name, method in METHODS.items() if method.is_outer)
_BY_CLOCK = " or ".join(name for name, method in METHODS.items() if method.by_clock)

OPTIONS = (
    Option("task", WHAT, f"{', '.join(MODULES)} (digits); or a file of your own, mytask.py (docs/own-task.md)"),
    Option("model", WHAT, "one of the task's models (its first)"),
    Option("data", WHAT, "train on this file instead, of any bytes (text)", "FILE"),
    Option("split", WHAT, "who has which data: pool, iid, dirichlet:ALPHA or, of text, era (iid)"),
    Option("method", HOW, _METHODS, "NAME", several=True, plural="--methods", help_in_comparison=f"all, or {_METHODS}"),
    Option("workers", HOW, "how many (8)", "N", int),
    Option(
        "period",
        HOW,
        "local steps between two averages (the method's own, mostly 8)",
        "I",
        int,
        several=True,
        help_in_comparison="local steps between two averages (1 4 8 16 32; beside other methods each one's own)",
    ),
    Option(
        "overlap",
        HOW,
        f"steps that hide an average's transfer, or auto: as many as hide it ({_OVERLAPS})",
        "D",
        whole_or_auto,
        several=True,
    ),
    Option("fragments", HOW, "parts in which the model travels, one after the other (1; streaming-diloco 4)", "F", int),
    Option("switch", HOW, f"when {_SWITCHING} switches: after T steps, or a fraction of the run (0.5)", "T", number),
    Option("outer_lr", HOW, f"of the outer optimizer of {_OUTER} (0.7; slowmo and sparseloco 1)", "LR", float),
    Option("outer_momentum", HOW, "of the same (0.9; slowmo 0.7, sparseloco 0)", "M", float),
    Option(
        "epochs",
        HOW,
        "passes over the data, all workers together (digits 40, synthetic 20, text 1, others 10)",
        "E",
        int,
    ),
    Option("steps", HOW, "instead of epochs: steps of each worker", "T", int),
    Option(
        "look", HOW, "steps of each worker between two evaluations, with checkpoints (an epoch; text 100)", "I", int
    ),
    Option("batch_size", HOW, "of each worker (digits, synthetic and text 8, others 32)", "B", int),
    Option("accumulate", HOW, "parts in which a batch goes through the model, one after another (1)", "A", int),
    Option("optimizer", HOW, "sgd or adamw (sgd; text adamw)", "NAME"),
    Option("lr", HOW, "learning rate, at its highest (0.1; adamw 0.001)", kind=float),
    Option(
        "recipe",
        HOW,
        "how the lr falls: drops, divided by 10 at 1/2 and 11/12 of the run, or cosine, to a tenth of it (drops; adamw "
        "cosine)",
        "NAME",
    ),
    Option("warmup", HOW, "steps in which the lr rises, or a fraction of the run (0; adamw 0.05)", "T", number),
    Option("momentum", HOW, "of sgd; adamw's first beta (0.9)", "M", float),
    Option("weight_decay", HOW, "of the optimizer (0; adamw 0.1)", "W", float),
    Option("clip", HOW, "the largest norm of a worker's gradient, 0: any (0; adamw 1)", "C", float),
    Option(
        "cluster",
        MIXED,
        "model one: a file, or mixed, stragglers, lan-1g, lan-10g, wan, datacenter, paper; with --processes N of N "
        "workers, play it by sleeping",
        "NAME",
    ),
    Option("seconds", MIXED, f"of a round of {_BY_CLOCK} (PERIOD steps of the cluster's slowest worker)", "S", float),
    Option("weights", MIXED, "uniform or steps: each worker counts alike, or by its steps (uniform)", "NAME"),
    Option("processes", WHERE, "spread a run's workers over P processes here (1)", "P", int),
    Option("out", WHERE, "the run's folder (a new one in runs/)", "DIR", path),
    Option("resume", WHERE, "continue what is in this folder", "DIR", path),
    Option("overwrite", WHERE, "replace the run that --out holds", kind=bool),
    Option("config", WHERE, "a TOML file with these options as keys", "FILE", path, in_file=False),
    Option("json", WHERE, "print a summary for programs, and nothing else, to stdout", kind=bool),
    Option("tensorboard", WHERE, "write event files too", kind=bool),
)
PLACES = tuple(option.name for option in OPTIONS if option.kind is path and option.in_file)
SWITCHES = tuple(option.name for option in OPTIONS if option.kind is bool)
RUN = tuple(option.name for option in OPTIONS if option.kind not in (path, bool))
"""Fields of a Config that are options of the same name."""


def add_run_options(parser: Parser, *, several: bool) -> None:
    """What makes a run; ``several``: of many, where some options take more than one value."""
    for title in (WHAT, HOW, MIXED):
        _add_group(parser, title, several=several)


def add_place_options(parser: Parser) -> argparse._ArgumentGroup:
    """Where it runs, and what is left of it; returns the group, for more of the kind."""
    return _add_group(parser, WHERE, several=False)


def _add_group(parser: Parser, title: str, *, several: bool) -> argparse._ArgumentGroup:
    group = parser.add_argument_group(title)
    for option in OPTIONS:
        if option.group == title:
            option.add(group, several=several)
    return group


def new_folder(name: str) -> Path:
    """One in runs/ that is not there yet, called by the time."""
    place = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    return place if not place.exists() else next(other for other in others if not other.exists())


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
