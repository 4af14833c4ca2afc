"""One worker's timetable: by hand, and by properties that hold for all rounds, overlaps and clocks."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prsgd.core import pace as module
from prsgd.core.pace import Landed, Pace
from prsgd.schedules.base import Round

Rounds = Callable[[int], Round]
Overlaps = Sequence[int]
"""By round: what its overlap is to be, over and over."""


def walk(
    pace: Pace,
    rounds: Rounds,
    num_steps: int,
    step_seconds: Sequence[float] = (1.0,),
    overlaps: Overlaps | None = None,
) -> list[Landed]:
    """A worker that is alone in its process: what it closes is launched at once, and lands when it has to."""
    seconds, landed = 0.0, []

    def begin() -> None:
        pace.open(rounds(pace.rounds), seconds, overlaps[pace.rounds % len(overlaps)] if overlaps else None)

    def turn() -> None:
        if pace.may_open:
            begin()
        overlap = pace.due(seconds)
        if overlap is not None and not pace.boards:
            if pace.snap is not None:
                landed.append(pace.land())
            assert pace.snap is None
            if pace.close(overlap):
                begin()
            assert pace.boards
            assert pace.snap is not None
            pace.snap.launched = True
            if pace.snap.lands_at == pace.steps:
                landed.append(pace.land())
                turn()

    turn()
    for step in range(num_steps):
        seconds += step_seconds[step % len(step_seconds)]
        if pace.lands_now:
            landed.append(pace.land(in_step=True))
        pace.steps += 1
        turn()
    return landed


@given(period=st.integers(1, 9), overlap=st.integers(0, 9), num_steps=st.integers(0, 60))
def test_landings_of_every_fall_on_the_multiples(period: int, overlap: int, num_steps: int) -> None:
    overlap = min(overlap, period)
    landed = walk(Pace(overlap), lambda _: Round(steps=period), num_steps)
    assert [one.step for one in landed] == list(range(period, num_steps + 1, period))
    assert all(one.period == period and one.overlap == overlap for one in landed)


CHANGING = st.one_of(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 9).map(lambda d: [d]))
"""Overlaps by round: always the same, or above 0 and another in each round."""


@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8), overlaps=CHANGING, num_steps=st.integers(0, 60))
def test_rounds_of_any_length_land_where_they_end(lengths: list[int], overlaps: list[int], num_steps: int) -> None:
    """An overlap above a round's length is cut to it, and every landing is at the end of its round, whatever the
    overlaps of other rounds."""
    pace = Pace(overlaps[0])
    landed = walk(pace, lambda done: Round(steps=lengths[done % len(lengths)]), num_steps, overlaps=overlaps)
    end = 0
    for done, one in enumerate(landed):
        length, overlap = lengths[done % len(lengths)], overlaps[done % len(overlaps)]
        end += length
        assert one == Landed(step=end, period=length, overlap=min(overlap, length))
    assert end <= num_steps < end + lengths[len(landed) % len(lengths)]


@given(
    seconds=st.floats(0.05, 8.0),
    times=st.lists(st.floats(0.01, 3.0), min_size=1, max_size=6),
    overlaps=CHANGING,
    most=st.one_of(st.none(), st.integers(1, 5)),
)
def test_rounds_by_the_clock_have_at_least_one_step(
    seconds: float, times: list[float], overlaps: list[int], most: int | None
) -> None:
    overlap = max(overlaps)
    landed = walk(Pace(overlaps[0]), lambda _: Round(steps=most, seconds=seconds), 40, times, overlaps)
    assert all(one.period >= 1 for one in landed)
    assert all(one.overlap <= overlaps[done % len(overlaps)] for done, one in enumerate(landed))
    steps = [one.step for one in landed]
    assert steps == sorted(steps)
    in_time = sum(times[step % len(times)] for step in range(40)) // (seconds + max(times))
    assert len(landed) >= (40 // most if most else in_time) - overlap - 1  # and they do end


@given(lengths=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=2, max_size=4), overlaps=CHANGING)
def test_a_worker_that_waits_is_always_released(lengths: list[list[int]], overlaps: list[int]) -> None:
    """Several workers of one process: nobody takes two snapshots before a launch, and nobody waits for ever."""
    paces = [Pace(overlaps[0]) for _ in lengths]
    launches = 0
    for _ in range(60):
        while True:
            for pace, own in zip(paces, lengths):
                if pace.may_open:
                    pace.open(Round(steps=own[pace.rounds % len(own)]), 0.0, overlaps[pace.rounds % len(overlaps)])
                due = pace.due(0.0)
                if due is not None and not pace.boards:
                    assert pace.snap is None
                    assert not pace.close(due)
            if not all(pace.boards for pace in paces):
                break
            launches += 1
            for pace in paces:
                assert pace.snap is not None
                pace.snap.launched = True
                if pace.snap.lands_at == pace.steps:
                    pace.land()
        waiting = [pace.waits(0.0) for pace in paces]
        assert not all(waiting)  # somebody steps, and closes in the end
        for pace, waits in zip(paces, waiting):
            if not waits:
                if pace.lands_now:
                    pace.land(in_step=True)
                pace.steps += 1
    assert launches >= 60 // (sum(max(own) for own in lengths) + max(overlaps))


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), overlaps=CHANGING, at=st.integers(0, 30))
def test_equal_inputs_give_equal_timetables_also_after_a_stop(lengths: list[int], overlaps: list[int], at: int) -> None:
    def rounds(done: int) -> Round:
        return Round(steps=lengths[done % len(lengths)])

    one, other = Pace(overlaps[0]), Pace(overlaps[0])
    first = walk(one, rounds, at, overlaps=overlaps)
    assert first == walk(other, rounds, at, overlaps=overlaps)
    assert one == other
    again = Pace(overlaps[0])
    again.load_state_dict(one.state_dict(5.0), 7.0)
    assert again.opened_seconds == one.opened_seconds + 2.0
    again.opened_seconds = one.opened_seconds
    assert again == one


def test_the_example_of_the_design() -> None:
    """period 4: 4, 8, 12; never at step 1."""
    assert [one.step for one in walk(Pace(0), lambda _: Round(steps=4), 14)] == [4, 8, 12]


def test_a_worker_that_answers_brings_what_it_has() -> None:
    pace = Pace(2)
    pace.open(Round(steps=8), 0.0)
    pace.steps = 3
    pace.answer()
    assert not pace.boards
    assert not pace.waits(0.0)
    assert pace.land() == Landed(step=3, period=3, overlap=0)


@pytest.mark.parametrize("name", ["torch", "time"])
def test_it_knows_neither_torch_nor_a_clock(name: str) -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert name not in imported
