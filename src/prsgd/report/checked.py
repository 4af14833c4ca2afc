"""Records, evaluations and summaries from JSON that others may have written: every field is checked.

A damaged or hostile value is a ValueError of one line that names the field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from prsgd._check import shown, whole_number
from prsgd.records import LARGEST, MOST, Evaluation, Modelled, Record, Summary


def record(values: Mapping[str, Any]) -> Record:
    """Back from ``dataclasses.asdict`` by way of JSON.

    >>> record({"round": 0.5})
    Traceback (most recent call last):
    ValueError: round must be a whole number >= 0, got 0.5
    """
    return Record(**_all(RECORD, values))


def evaluation(values: Mapping[str, Any]) -> Evaluation:
    """The same for what was seen between two epochs."""
    return Evaluation(**_all(EVALUATION, values))


def summary(values: Mapping[str, Any]) -> Summary:
    """The same for how a run ended."""
    return Summary(**_all(SUMMARY, values))


def _all(checks: Mapping[str, Check], values: Mapping[str, Any]) -> dict[str, Any]:
    """What is missing counts as null, which most fields refuse; what we do not know is left out."""
    return {name: check(name, values.get(name)) for name, check in checks.items()}


Check = Callable[[str, Any], Any]
"""Of a field's name and its value: returns the value, or raises."""


def whole(name: str, value: Any) -> int:
    return whole_number(name, value, at_least=0, at_most=MOST)


def number(name: str, value: Any) -> float:
    """Of a run that diverged it may be infinite or NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or LARGEST < abs(value) < math.inf:
        raise ValueError(f"{name} must be a number, got {shown(value)}")
    return value


def finite(name: str, value: Any) -> float:
    found = number(name, value)
    if not math.isfinite(found):
        raise ValueError(f"{name} must be a finite number, got {found}")
    return found


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {shown(value)}")
    return value


def maybe(check: Check) -> Check:
    """The same, or nothing."""
    return lambda name, value: None if value is None else check(name, value)


def numbers(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{name} must be numbers, got {shown(value)}")
    return tuple(number(name, part) for part in value)


def modelled(name: str, value: Any) -> Modelled:
    try:
        found = Modelled.from_dict(value)
        times = (found.seconds, *found.computing, *found.waiting, *found.communicating, *found.hidden)
        if not all(abs(time) <= LARGEST for time in times):
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must have seconds and one number per worker, got {shown(value)}") from None
    return found


RECORD: dict[str, Check] = {
    "round": whole,
    "step": whole,
    "period": whole,
    "overlap": whole,
    "workers": whole,
    "bad_workers": whole,
    "bytes_sent": whole,
    "server_bytes_sent": whole,
    "wait_seconds": finite,
    "copy_seconds": finite,
    "flight_seconds": finite,
    "lr": finite,
    "drift": maybe(number),
    "loss": maybe(number),
    "samples": whole,
    "step_seconds": maybe(numbers),
    "hops": whole,
    "modelled": maybe(modelled),
}
EVALUATION: dict[str, Check] = {
    "epoch": finite,
    "step": whole,
    "train_loss": number,
    "test_loss": number,
    "test_accuracy": maybe(finite),
    "seconds": finite,
    "modelled_seconds": maybe(finite),
}
SUMMARY: dict[str, Check] = {
    "label": text,
    "train_loss": number,
    "test_loss": number,
    "test_accuracy": maybe(finite),
    "best_test_accuracy": maybe(finite),
    "epochs": finite,
    "steps": whole,
    "rounds": whole,
    "bytes_sent": whole,
    "mean_drift": maybe(number),
    "seconds": finite,
    "samples": whole,
    "weights_sha256": text,
    "first_train_loss": number,
    "modelled_seconds": maybe(finite),
}
