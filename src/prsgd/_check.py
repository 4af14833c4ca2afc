"""Arguments checked once, at the edge, with errors that name argument, value and what is allowed."""

from __future__ import annotations

import difflib
import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Literal

MOST_SHOWN = 80
"""Characters of a value that a message repeats: an error is one line that can be read."""
MOST_LISTED = 200
"""Characters of the choices that it lists."""


def whole_number(name: str, value: object, *, at_least: int, at_most: int | None = None) -> int:
    """``value`` as an int, or a ValueError.

    >>> whole_number("period", 4, at_least=1)
    4
    >>> whole_number("period", 0, at_least=1)
    Traceback (most recent call last):
    ValueError: period must be a whole number >= 1, got 0
    >>> whole_number("looks", 5000, at_least=2, at_most=1000)
    Traceback (most recent call last):
    ValueError: looks must be at most 1,000, got 5000
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # it has no index
        number = None
    if number is None or number < at_least:
        raise ValueError(f"{name} must be a whole number >= {at_least}, got {shown(value)}")
    if at_most is not None and number > at_most:
        raise ValueError(f"{name} must be at most {at_most:,}, got {shown(value)}")
    return number


def whole_number_or_auto(
    name: str, value: object, *, at_least: int, at_most: int | None = None
) -> int | Literal["auto"]:
    """The same, or the word for one that is chosen as the run goes.

    >>> whole_number_or_auto("overlap", "auto", at_least=0)
    'auto'
    >>> whole_number_or_auto("overlap", "fast", at_least=0)
    Traceback (most recent call last):
    ValueError: overlap must be a whole number >= 0, or "auto", got 'fast'
    """
    if isinstance(value, str) and value == "auto":
        return "auto"
    try:
        return whole_number(name, value, at_least=at_least, at_most=at_most)
    except ValueError as error:
        least = f">= {at_least}"
        raise ValueError(str(error).replace(f"{least},", f'{least}, or "auto",', 1)) from None


def positive(name: str, value: object) -> float:
    """``value`` as a finite float above 0, or a ValueError.

    >>> positive("lr_scale", -1)
    Traceback (most recent call last):
    ValueError: lr_scale must be a finite number > 0, got -1
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number > 0, got {shown(value)}")
    return float(value)


def within(name: str, value: object, low: float, high: float) -> float:
    """``value`` as a float from ``low`` to ``high``, or a ValueError.

    >>> within("smoothness", 1e308, 1e-30, 1e30)
    Traceback (most recent call last):
    ValueError: smoothness must be a number from 1e-30 to 1e+30, got 1e+308
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def from_zero_to(name: str, value: object, top: float) -> None:
    """A ValueError unless ``value`` is a number in [0, top).

    >>> from_zero_to("momentum", 1.0, 1.0)
    Traceback (most recent call last):
    ValueError: momentum must be in [0, 1), got 1.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < top:
        raise ValueError(f"{name} must be in [0, {top:g}), got {shown(value)}")


def one_of(name: str, value: object, allowed: Iterable[str], *, listed_by: str = "") -> str:
    """``value`` if it is one of ``allowed``, or a ValueError; ``listed_by``: what shows all, if they are many.

    >>> one_of("optimizer_state", "keep", ("keep", "average", "reset"))
    'keep'
    >>> one_of("task", "digit", ("cifar10", "digits"))
    Traceback (most recent call last):
    ValueError: task must be one of 'cifar10', 'digits', got 'digit': did you mean 'digits'?
    """
    allowed = tuple(allowed)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(
            f"{name} must be one of {_listed(allowed, listed_by)}, got {shown(value)}{nearest(value, allowed)}"
        )
    return value


def _listed(allowed: Sequence[str], listed_by: str) -> str:
    """The choices, or the first ones and how many more there are.

    >>> _listed(["ring", "torus"], "prsgd graphs")
    "'ring', 'torus'"
    >>> _listed(["a" * 78, "b" * 78, "c" * 78, "d" * 78], "prsgd graphs").partition("b' and ")[2]
    '2 more (for all: prsgd graphs)'
    """
    names = [shown(name) for name in allowed]
    if len(", ".join(names)) <= MOST_LISTED:
        return ", ".join(names)
    first = [name for name, end in zip(names, accumulate(len(name) + 2 for name in names)) if end <= MOST_LISTED]
    where = f" (for all: {listed_by})" if listed_by else ""
    return f"{', '.join(first)} and {len(names) - len(first)} more{where}"


def nearest(value: object, allowed: Iterable[str]) -> str:
    """A hint to put behind a message, or nothing.

    >>> nearest("perod", ["period", "overlap"])
    ": did you mean 'period'?"
    """
    close = difflib.get_close_matches(value, list(allowed), n=1) if isinstance(value, str) else []
    return f": did you mean {close[0]!r}?" if close else ""


def shown(value: object) -> str:
    """A value as a message repeats it.

    >>> shown("x"), shown(10**100)
    ("'x'", '10000000000000000000000000000000000000... and so on (101 characters)')
    """
    text = repr(value)
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[: MOST_SHOWN // 2 - 2]}... and so on ({len(text)} characters)"


def function_of(name: str, value: object, what: str) -> None:
    """A ValueError unless ``value`` can be called with one argument, which is told as ``what``.

    >>> function_of("on_record", print, "a Record")
    >>> function_of("on_record", 5, "a Record")
    Traceback (most recent call last):
    ValueError: on_record must be a function of a Record, got int
    >>> function_of("on_record", lambda record, step: None, "a Record")
    Traceback (most recent call last):
    ValueError: on_record must take one argument, a Record
    """
    if not callable(value):
        raise ValueError(f"{name} must be a function of {what}, got {type(value).__name__}")
    if not takes(value, None):
        raise ValueError(f"{name} must take one argument, {what}")


def takes(function: Callable[..., object], *values: object) -> bool:
    """Can it be called with these? What does not tell, as some of C's, is given the benefit of the doubt.

    >>> takes(print, "a line"), takes(lambda values: None, {}, 0), takes(lambda values, *, step: None, {}, 0)
    (True, False, False)
    """
    import inspect  # which a command line that needs no function does without

    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(*values)
    except TypeError:
        return False
    return True
