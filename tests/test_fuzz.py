"""A few random runs of two ranks against a fleet; ``python -m tests.fuzz`` has as many as there is time for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz import Fuzz, differences
from tests.fuzz_found import FOUND
from tests.fuzz_run import run_fleet
from tests.fuzz_scenario import Scenario, draw, read

SEEDS = [
    *(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 19, 21, 24),
    *(26, 27, 29, 30, 31, 32, 33, 35, 40, 45, 51, 55, 67, 69, 82, 109, 111, 135),
    *(39, 48, 49, 84),
    *(47, 117, 137, 148, 159),
    *(65, 74, 90, 174, 269, 643, 829, 1073, 1678, 2046),
]
"""Among them every averaging, schedule, overlap (also one that is chosen) and kind of trouble; each has two ranks."""


@pytest.fixture(scope="module")
def fuzz() -> Iterator[Fuzz]:
    with Fuzz() as running:
        yield running


def check(fuzz: Fuzz, scenario: Scenario) -> None:
    problems = fuzz.check(scenario)
    assert not problems, "\n".join([repr(scenario), *problems])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_run(fuzz: Fuzz, seed: int) -> None:
    check(fuzz, draw(seed))


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(fuzz: Fuzz, name: str) -> None:
    check(fuzz, FOUND[name])


def test_a_scenario_can_be_pasted() -> None:
    for seed in range(100):
        assert read(repr(draw(seed))) == draw(seed)


def test_a_run_that_ends_elsewhere_is_noticed(fuzz: Fuzz) -> None:
    """A fleet with one batch more, looking elsewhere."""
    scenario, other = (Scenario(batches=(4, n), looks=((n - 1, "after"),)) for n in (4, 5))
    crew = fuzz.crew(2)
    crew.send(scenario, run_fleet(scenario).looks)
    found = {problem.split(":")[0] for problem in differences(scenario, run_fleet(other), crew.receive())}
    assert found >= {"a look shows other parameters", "parameters differ", "number of records"}
