"""Arguments: argparse with one-line errors that suggest the nearest name."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from prsgd._check import MOST_SHOWN, nearest
from prsgd.comm import job
from prsgd.errors import PrsgdError


class Parser(argparse.ArgumentParser):
    """One line on an error, and no abbreviated options: they would change meaning when options are added."""

    def __init__(self, prog: str, description: str | None = None, epilog: str | None = None, **options: Any) -> None:
        options |= {"allow_abbrev": False, "formatter_class": _Help}
        super().__init__(prog, description=description, epilog=epilog, **options)
        # What is a value and no option: argparse would say of "--latency -5ms" that it expects an argument.
        self._negative_number_matcher = re.compile(r"-(\d|\.\d|inf|nan)")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            known = [option for parser in self._all() for option in parser._option_string_actions]
            self.error(f"unknown argument {unknown[0]!r}{nearest(unknown[0].split('=')[0], known)}")
        return found

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument COMMAND: invalid choice: '(.*?)'", message)
        if choice:
            names = [name for action in self._choices() for name in action]
            message = f"unknown command {choice[1]!r}{nearest(choice[1], names) or ': ' + ', '.join(names)}"
        wrong = re.fullmatch(r"(argument .*?): invalid (\w+) value: (.*)", message, re.DOTALL)
        if wrong and wrong[2] in _KINDS:
            value = wrong[3] if len(wrong[3]) <= MOST_SHOWN else f"{wrong[3][:MOST_SHOWN]}..."
            message = f"{wrong[1]}: must be {_KINDS[wrong[2]]}, got {value}"
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _choices(self) -> Iterator[dict[str, Parser]]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                yield action.choices

    def _all(self) -> Iterator[Parser]:
        yield self
        for choices in self._choices():
            yield from choices.values()


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "number": "a number",
    "path": "a path",
    "whole_or_auto": "a whole number or auto",
}
"""What argparse calls by the names of the functions that read it."""


def path(text: str) -> Path:
    """A path as an option's value: an empty one would be the folder we are in, which nobody means.

    >>> path("runs/a")
    PosixPath('runs/a')
    """
    if not text or "\0" in text:
        raise ValueError(f"must be a path, got {text!r}")
    return Path(text)


def number(text: str) -> float:
    """A whole number stays one: where steps and fractions of a run are both allowed, 1 is a step and 1.0 is neither.

    >>> number("440"), number("0.5")
    (440, 0.5)
    """
    try:
        return int(text)
    except ValueError:
        return float(text)


def whole_or_auto(text: str) -> int | str:
    """
    >>> whole_or_auto("4"), whole_or_auto("auto")
    (4, 'auto')
    """
    return text if text == "auto" else int(text)


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=80)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Names such as pr-sgd-timed stay whole: half of one on each line reads like two."""
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Each line by itself: an example is not to be filled up with what stands before it."""
        return "\n".join(super(_Help, self)._fill_text(line, width, indent) for line in text.split("\n"))


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Before anything is trained: what is wrong with the arguments, the data or the folder is one line and exit 2."""
    try:
        yield
    except (ValueError, PrsgdError) as error:
        fail(command, str(error), code=2)
    except OSError as error:
        fail(command, f"{error.filename or 'file'}: {error.strerror or error}", code=2)


LAB = {"rich": "rich", "jinja2": "jinja2", "matplotlib": "matplotlib", "PIL": "pillow"}
"""What the extra of that name installs: as it is imported, and as it is called."""


def need_lab(command: str) -> None:
    """One line and exit 2 where the extra is not installed: before anything is trained, not when it is to be drawn."""
    for module in LAB:
        if find_spec(module) is None:
            fail_without_lab(command, module)


def fail_without_lab(command: str, module: str) -> NoReturn:
    why = f"this command needs the lab extra: pip install 'prsgd[lab]' ({LAB[module]} is missing)"
    fail(command, why, code=2)


def fail(command: str, message: str, *, code: int) -> NoReturn:
    if not job.is_first():
        time.sleep(FIRST_SECONDS)
    print(f"prsgd {command}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)


FIRST_SECONDS = 30.0
"""Under torchrun all processes fail alike: the first says it, and its end ends the others. One that left before would
end the first before that has said anything; one that is still here has an error of its own."""
