"""What is written down of a run comes back from a file as it was, and what cannot be is named."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import pytest

from prsgd._fields import LARGEST, Counted, Finite, checks_of, restored
from prsgd.records import Evaluation, Modelled, Record, Summary

KINDS = [Record, Evaluation, Summary]
RECORD = Record(
    round=1, step=8, period=8, overlap=0, workers=2, bad_workers=0, bytes_sent=100, server_bytes_sent=0,
    wait_seconds=0.25, copy_seconds=0.5, flight_seconds=0.75, lr=0.1, drift=math.inf, loss=None, samples=64,
    step_seconds=(0.1, 0.2), hops=3, modelled=Modelled(2.0, (0.5, 1.0), (0.0, 0.1), (0.2, 0.3), (0.0, 0.0)),
)  # fmt: skip
EVALUATION = Evaluation(epoch=1.0, step=8, train_loss=math.inf, test_loss=1.0, test_score=0.5, seconds=1.0)
SUMMARY = Summary(
    label="pr-sgd", train_loss=0.1, test_loss=1.0, test_score=0.5, best_test_score=0.6, epochs=2.0, steps=16,
    rounds=2, bytes_sent=200, mean_drift=None, seconds=1.0, samples=128, weights_sha256="ab",
)  # fmt: skip
WHOLE = [RECORD, EVALUATION, SUMMARY]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_checked(kind: type) -> None:
    checks = checks_of(kind)
    assert list(checks) == [field.name for field in fields(kind)]
    wrong: list[Any] = [{}, True, 10**400]
    for name, check in checks.items():
        for value in wrong:
            with pytest.raises(ValueError, match=f"^{name} must "):
                check(name, value, LARGEST)


@pytest.mark.parametrize("whole", WHOLE, ids=lambda whole: type(whole).__name__)
def test_it_comes_back_as_it_was(whole: Any) -> None:
    kind = type(whole)
    assert kind.from_dict(asdict(whole)) == whole
    assert kind.from_dict(json.loads(json.dumps(asdict(whole)))) == whole


@pytest.mark.parametrize("whole", WHOLE, ids=lambda whole: type(whole).__name__)
def test_what_is_missing_unknown_or_no_object_is_named(whole: Any) -> None:
    kind, values = type(whole), asdict(whole)
    with pytest.raises(TypeError, match="'of_tomorrow'"):
        kind.from_dict({**values, "of_tomorrow": 1})
    first = fields(kind)[0].name
    with pytest.raises(TypeError, match=f"missing 1 required positional argument: '{first}'"):
        kind.from_dict({name: value for name, value in values.items() if name != first})
    with pytest.raises(TypeError, match=rf"^{kind.__name__} must be an object, got \[1\]$"):
        kind.from_dict([1])


def test_what_has_a_default_may_be_missing() -> None:
    values = asdict(RECORD)
    del values["hops"], values["modelled"]
    found = Record.from_dict(values)
    assert (found.hops, found.modelled) == (0, None)


@pytest.mark.parametrize(
    ("whole", "name", "value", "message"),
    [
        (RECORD, "round", -1, "round must be a whole number >= 0, got -1"),
        (RECORD, "lr", math.nan, "lr must be a finite number, got nan"),
        (RECORD, "step_seconds", [0.1, "x"], "step_seconds must be a number, got 'x'"),
        (RECORD, "step_seconds", 0.1, "step_seconds must be numbers, got 0.1"),
        (RECORD, "modelled", [2.0], "modelled must have seconds and one number per worker, got [2.0]"),
        (EVALUATION, "test_score", "much", "test_score must be a number, got 'much'"),
        (EVALUATION, "train_loss", None, "train_loss must be a number, got None"),
        (SUMMARY, "label", None, "label must be a text, got None"),
        (SUMMARY, "seconds", -1.0, "seconds must be a number from 0 to 1e+100, got -1.0"),
        (SUMMARY, "best_test_score", True, "best_test_score must be a number, got True"),
    ],
)
def test_what_cannot_be_is_named(whole: Any, name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        type(whole).from_dict({**asdict(whole), name: value})
    assert str(refused.value) == message


def test_a_state_may_hold_what_a_report_cannot_add_up() -> None:
    """A model in float64 that diverges has such losses for a while, and its run must go on from its state."""
    values = {**asdict(RECORD), "loss": 1e200}
    assert Record.from_dict(values).loss == 1e200
    with pytest.raises(ValueError, match=r"^loss must be a number, got 1e\+200$"):
        restored(Record, values)


@dataclass(frozen=True)
class Tomorrow:
    """Fields that were thought of later, with no row anywhere."""

    turns: int
    heat: Finite | None
    hours: Counted = 0.0
    parts: tuple[float, ...] | None = None


def test_a_new_field_is_checked_by_its_annotation() -> None:
    assert restored(Tomorrow, {"turns": 2, "heat": None, "parts": [1, 2.5]}) == Tomorrow(2, None, 0.0, (1, 2.5))
    for name, value in [("turns", 0.5), ("heat", math.inf), ("hours", -1), ("parts", "x")]:
        with pytest.raises(ValueError, match=f"^{name} must "):
            restored(Tomorrow, {"turns": 2, "heat": 1.0, name: value})


@dataclass(frozen=True)
class Unclear:
    names: dict[str, int]


def test_an_annotation_that_says_too_little_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"does not know how to check a field that is dict\[str, int\]"):
        checks_of(Unclear)
