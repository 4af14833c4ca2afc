"""The command line: ``prsgd COMMAND ...``. Each command is a file: parse, call, print."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

import prsgd
from prsgd.cli.parser import LAB, Parser, fail_without_lab, need_lab

COMMANDS = {
    "compare": "train one task with several methods or periods, and report side by side",
    "train": "train one task with one method",
    "report": "one HTML page with every figure, of runs that have been made",
    "timeline": "what every worker did when: the paper's Figures 1 and 2, from a run's trace",
    "methods": "the table of methods: what each does, its parts, where it comes from",
    "doctor": "look at this machine, and under torchrun at the job, before training",
    "plan": "how often to average: what the theory guarantees, what it costs",
    "probe": "the constants that a plan needs, estimated along a short run",
    "calibrate": "measure a real group of processes, as a cluster to model",
    "bench": "against DDP and the other libraries: the same work over the same link",
    "verify": "the paper's lemmas and theorems, measured against their bounds",
    "data": "fetch, check and keep data sets",
    "launch": "start a program's processes, which may come and go, and their lighthouse",
}
"""Each is ``prsgd.cli.NAME`` with ``add(parser)`` and ``run(args)``."""
EXAMPLES = {
    "compare": "prsgd compare --methods minibatch-sgd pr-sgd one-shot --period 8",
    "train": "prsgd train --task digits --workers 8 --period 8 --epochs 20",
    "report": "prsgd report runs/a runs/b",
    "timeline": "prsgd timeline runs/a --rounds 2",
    "methods": "prsgd methods d-psgd --workers 8",
    "doctor": "torchrun --nproc-per-node 2 -m prsgd doctor",
    "plan": "prsgd plan --workers 8 --steps 100k --bandwidth 1Gbit",
    "probe": "prsgd probe --task digits --json > constants.json",
    "calibrate": "prsgd calibrate --processes 2",
    "bench": "prsgd bench --models mlp --links loopback",
    "verify": "prsgd verify",
    "data": "prsgd data get cifar10",
    "launch": "prsgd launch --elastic --workers 4 train.py",
}
"""One of each: what its help shows at the end."""
_UNLESS = "In parentheses is what is used unless you say otherwise."
_EPILOG = f"prsgd COMMAND --help tells more, with an example of each.\nexample: {EXAMPLES['train']}"
DRAWS = {"compare": None, "report": None, "timeline": None, "plan": "plot", "verify": "out", "bench": "out"}
"""Commands that need the lab extra: always, or where this option is given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 if it failed on the way, 2 if it was asked for what cannot be."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder's name need not be text, as on stderr
    parser = Parser(prog="prsgd", description=prsgd.__doc__, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"prsgd {prsgd.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=_sentence(summary), epilog=f"example: {EXAMPLES[name]}"
        )
        if arguments[:1] == [name]:  # the others' options are not needed now
            import_module(f"prsgd.cli.{name}").add(command)
            if any("(" in (action.help or "") for action in command._actions):
                command.epilog = f"{_UNLESS}\n{command.epilog}"
    try:
        args = parser.parse_args(arguments)
        if args.command in DRAWS and ((option := DRAWS[args.command]) is None or vars(args)[option] is not None):
            need_lab(args.command)
        code: int = import_module(f"prsgd.cli.{args.command}").run(args)
        sys.stdout.flush()
    except ModuleNotFoundError as error:  # what only some data need
        if error.name not in LAB:
            raise
        fail_without_lab(args.command, error.name)
    except BrokenPipeError:
        _drop_output()
        return 0  # whoever read our output has seen enough
    except OSError as error:  # what commands read and write they answer for themselves
        _drop_output()
        print(f"prsgd: error: {error.filename or 'the output'}: {error.strerror or error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it may come twice, see running.ONE_PRESS_SECONDS
        print("\nprsgd: stopped at once", file=sys.stderr)
        return 130
    return code


def _drop_output() -> None:
    """What is left of it must not fail once more when the program ends."""
    with suppress(OSError, ValueError):  # no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
