"""Dataclasses that are read back from a file: each field is checked by its annotation, and needs no row elsewhere.

    int                  a whole number from 0 to ``MOST``
    float                a number; where a run diverged, it may be infinite or NaN
    Finite               a finite number
    Counted              a finite number >= 0
    str                  a text
    tuple[float, ...]    a list of numbers
    tuple[int, ...]      a list of whole numbers
    ... | None           the same, or null
    Annotated[..., f]    whatever the ``Check`` f lets through

A file may be damaged, or written by others: what cannot be is an error of one line that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from prsgd._check import shown, whole_number, within

MOST = 2**63
"""Of a whole number that is read back."""
LARGEST = 1e100
"""Of a finite number that is read back, unless the reader says otherwise: sums and products of such numbers are floats
still."""

T = TypeVar("T")
Check = Callable[[str, Any, float], Any]
"""Of a field's name, its value, and the largest finite number that is allowed: returns the value, or raises a
ValueError."""


def restored(kind: type[T], values: Mapping[str, Any], *, largest: float = LARGEST) -> T:
    """The ``kind`` that ``dataclasses.asdict`` made ``values`` of, perhaps by way of JSON.

    A field that has a default may be missing. A ValueError names a field that cannot be what it is; a TypeError names
    those that are missing or unknown.

    >>> from prsgd.records import Evaluation
    >>> restored(Evaluation, {"epoch": 1.0, "step": 0.5})
    Traceback (most recent call last):
    ValueError: step must be a whole number >= 0, got 0.5
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{kind.__name__} must be an object, got {shown(values)}")
    checks = checks_of(kind)
    # What is unknown goes on to the constructor, which refuses it.
    return kind(**{key: checks[key](key, value, largest) if key in checks else value for key, value in values.items()})


def checks_of(kind: type) -> Mapping[str, Check]:
    """The check of each field of a dataclass, by its name; a TypeError if an annotation does not tell how to check."""
    return _derived(kind)


@cache  # a report reads many thousands of records; apart from checks_of, since to mypy no ``type[T]`` has a hash
def _derived(kind: type) -> Mapping[str, Check]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _check_of(hints[field.name]) for field in fields(kind)}


def _check_of(hint: Any) -> Check:
    origin = get_origin(hint)
    if origin is Annotated:
        check: Check = hint.__metadata__[0]
        return check
    if origin in (Union, UnionType):
        inner = [part for part in get_args(hint) if part is not NoneType]
        if len(inner) == 1:
            return _or_null(_check_of(inner[0]))
    elif hint in _PLAIN:
        return _PLAIN[hint]
    raise TypeError(f"prsgd._fields does not know how to check a field that is {hint}")


def _or_null(check: Check) -> Check:
    return lambda name, value, largest: None if value is None else check(name, value, largest)


def _whole(name: str, value: Any, _largest: float) -> int:
    return whole_number(name, value, at_least=0, at_most=MOST)


def _number(name: str, value: Any, largest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or largest < abs(value) < math.inf:
        raise ValueError(f"{name} must be a number, got {shown(value)}")
    return value


def _finite(name: str, value: Any, largest: float) -> float:
    found = _number(name, value, largest)
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {found}")
    return found


def _counted(name: str, value: Any, largest: float) -> float:
    within(name, value, 0.0, largest)
    found: float = value  # as it was written: a whole number stays one
    return found


def _text(name: str, value: Any, _largest: float) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {shown(value)}")
    return value


def _numbers(name: str, value: Any, largest: float) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be numbers, got {shown(value)}")
    return tuple(_number(name, part, largest) for part in value)


def _wholes(name: str, value: Any, largest: float) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} must be whole numbers, got {shown(value)}")
    return tuple(_whole(name, part, largest) for part in value)


_PLAIN: dict[Any, Check] = {
    int: _whole,
    float: _number,
    str: _text,
    tuple[float, ...]: _numbers,
    tuple[int, ...]: _wholes,
}

Finite = Annotated[float, _finite]
"""A float that cannot be infinite or NaN, however a run went."""
Counted = Annotated[float, _counted]
"""A float that grows from 0: seconds, epochs."""
