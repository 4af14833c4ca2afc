"""Random runs: ranks over gloo against a fleet in one process, looked at or not, stopped or not.

    python -m tests.fuzz --seeds 500            # scenarios 0 to 499; exit code 1 if one fails
    python -m tests.fuzz --found                # the smallest forms of those that failed once
    python -m tests.fuzz --scenario "Scenario(averaging='outer()', batches=(2, 6), looks=((4, 'after'),))"

What must hold: nobody hangs, dies or raises (but a DivergedError, on all, when no model is finite); the ranks end with
one finite model, the fleet's; looks show all the same and change nothing; a stopped run goes on as if it had not been.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import Tensor

from tests.fuzz_crew import Crew
from tests.fuzz_found import FOUND
from tests.fuzz_outcome import NUMBERS, Outcome
from tests.fuzz_run import run_fleet
from tests.fuzz_scenario import Scenario, draw, read, simpler

LEAVES_AHEAD = True
"""Compare a fleet with ranks also where a worker runs out of data while its closed round waits for others to close?"""
SHRINK_SECONDS = 60.0


class Fuzz:
    """Scenarios one after another, with the same ranks as long as they live."""

    def __init__(self) -> None:
        self._crews: dict[int, Crew] = {}

    def __enter__(self) -> Fuzz:
        return self

    def __exit__(self, *_: object) -> None:
        for crew in self._crews.values():
            crew.close()

    def crew(self, num_ranks: int) -> Crew:
        """So many ranks, which wait for a scenario."""
        return self._crews.setdefault(num_ranks, Crew(num_ranks))

    def check(self, scenario: Scenario) -> list[str]:
        """What does not hold, "property: detail", the first first."""
        crew = self.crew(scenario.ranks)
        fleet = run_fleet(scenario)
        crew.send(scenario, fleet.looks)
        unseen = run_fleet(scenario, looks=False) if scenario.looks else fleet
        resumed = run_fleet(scenario, resume=True) if scenario.resume_at else fleet
        ranks = crew.receive()
        problems = [*_errors(scenario, fleet, ranks)]
        if not problems and not fleet.error:
            ahead = " (one left ahead)" if fleet.ahead else ""
            problems += [f"{_kind(p)}{ahead}{p[len(_kind(p)) :]}" for p in differences(scenario, fleet, ranks)]
        if fleet.error and not problems:  # nobody has a finite model
            return []
        healthy = not any(rank.error for rank in ranks)
        if fleet.looks:
            problems += _changes("looking changes the fleet", fleet, unseen)
            if healthy:
                crew.send(scenario)
                for a, b in zip(ranks, crew.receive()):
                    problems += _changes("looking changes ranks", a, b)
        if scenario.resume_at:
            problems += _changes("resuming changes the fleet", fleet, resumed)
        if fleet.rest is not None and healthy and all(set(r.parameters) - fleet.rest.gone for r in ranks):
            crew.send(scenario, fleet.looks, fleet.rest)
            for a, b in zip(ranks, crew.receive()):
                problems += _changes("resuming changes ranks", a, b)
        return problems

    def shrink(self, scenario: Scenario, problem: str) -> Scenario:
        """A simpler scenario that fails in the same way."""
        until = time.monotonic() + SHRINK_SECONDS
        going_on = True
        while going_on:
            going_on = False
            for candidate in simpler(scenario):
                if time.monotonic() > until:
                    return scenario
                found = self.check(candidate)
                if found and _kind(found[0]) == _kind(problem):
                    scenario, going_on = candidate, True
                    break
        return scenario


def _errors(scenario: Scenario, fleet: Outcome, ranks: Sequence[Outcome]) -> Iterator[str]:
    # A fleet without overlap clears the rows that are not finite, so it is asked what it counted, too.
    lost = fleet.lost or f"({scenario.num_workers} are not finite)" in fleet.error
    spoilt = {worker for worker, *_ in scenario.nans}
    if fleet.error and not (_diverged(fleet) and lost and len(spoilt) == scenario.num_workers):
        yield f"the fleet raises {_type(fleet)}: {fleet.error}"
    if any(rank.error and not (_diverged(fleet) and _may_end(scenario, rank)) for rank in ranks):
        kinds = sorted({_type(rank) for rank in ranks} - {""})
        yield f"ranks fail, {' and '.join(kinds)}: {' | '.join(rank.error or 'fine' for rank in ranks)}"
    elif fleet.error and not all(rank.error for rank in ranks):
        yield f"some ranks go on after {_type(fleet)}: {' | '.join(rank.error or 'fine' for rank in ranks)}"


def _may_end(scenario: Scenario, rank: Outcome) -> bool:
    """When no model is finite: a rank learns it from an average, or, with one under way, from another that has left."""
    return _diverged(rank) or (scenario.overlap > 0 and rank.error.startswith("PeerError"))


def differences(scenario: Scenario, fleet: Outcome, ranks: Sequence[Outcome]) -> Iterator[str]:
    """Between the ranks of a scenario and its fleet, or among them."""
    half = "float16" in scenario.averaging and scenario.num_workers > 2  # sums round, in an order of their own
    exact = scenario.num_workers == 2
    close = _equal if exact else _within(5e-2 if half else 1e-6 if scenario.optimizer in ("adam", "two") else 1e-10)
    parameters = {w: row for rank in ranks for w, row in rank.parameters.items()}
    buffers = {w: found for rank in ranks for w, found in rank.buffers.items()}
    for w in range(scenario.num_workers):
        if not all(bool(t.isfinite().all()) for t in (parameters[w], fleet.parameters[w])):
            yield f"not finite at the end: worker {w}"
        if any(bool(t.isnan().any()) for t in (*buffers[w], *fleet.buffers[w])):
            yield f"not a number in the buffers at the end: worker {w}"
        if not parameters[w].any() or not fleet.parameters[w].any():
            yield f"a model of zeros: worker {w}"
    for outcome in (fleet, *ranks):
        if outcome.spoilt:
            yield f"a look spoils {outcome.spoilt}"
    if fleet.ahead and not LEAVES_AHEAD:
        return
    for rank, outcome in enumerate(ranks):
        if outcome.looks:
            yield f"the harness: rank {rank} did not come to look at {outcome.looks}"
    yield from _looks(fleet, ranks, close)
    for who, rows, kept in (("ranks", parameters, buffers), ("the fleet's workers", fleet.parameters, fleet.buffers)):
        for w in range(1, scenario.num_workers):
            if not torch.equal(rows[w], rows[0]):
                yield f"{who} end with different parameters: worker {w} from 0 by {_distance(rows[w], rows[0])}"
            for k, (a, b) in enumerate(zip(kept[w], kept[0])):
                if not torch.equal(a, b):
                    yield f"{who} end with different buffers: worker {w}, buffer {k}: {_shown(a, b)}"
    for w in range(scenario.num_workers):
        if not close(parameters[w], fleet.parameters[w]):
            yield f"parameters differ: worker {w} by {_distance(parameters[w], fleet.parameters[w])}"
        for k, (a, b) in enumerate(zip(buffers[w], fleet.buffers[w])):
            if not close(a, b):
                yield f"buffers differ: worker {w}, buffer {k}: {_shown(a, b)}"
        ours, theirs = fleet.state[w], next(rank.state[w] for rank in ranks if w in rank.state)
        if len(ours) != len(theirs) or not all(close(a, b) for a, b in zip(ours, theirs)):
            yield f"optimizer state differs: worker {w}"
    yield from _records(scenario, fleet, ranks, half=half)


def _looks(fleet: Outcome, ranks: Sequence[Outcome], close: Callable[[Tensor, Tensor], bool]) -> Iterator[str]:
    for rank, outcome in enumerate(ranks):
        hosted = set(outcome.parameters)
        called = [k for k, look in enumerate(fleet.looks) if hosted - look.gone]
        for k, (row, buffers) in zip(called, outcome.seen):
            expected, kept = fleet.seen[k]
            if not close(row, expected):
                yield f"a look shows other parameters: rank {rank}, {fleet.looks[k]}, by {_distance(row, expected)}"
            for i, (a, b) in enumerate(zip(buffers, kept)):
                if not close(a, b):
                    yield f"a look shows other buffers: rank {rank}, {fleet.looks[k]}, buffer {i}: {_shown(a, b)}"


def _records(scenario: Scenario, fleet: Outcome, ranks: Sequence[Outcome], *, half: bool) -> Iterator[str]:
    near = 1e-2 if half else 1e-6 if scenario.optimizer in ("adam", "two") else 1e-9
    unknown = any(word in scenario.averaging for word in ("gossip", "quantized", "sparse", "float16"))
    for rank, outcome in enumerate(ranks):
        if len(outcome.records) != len(fleet.records):
            yield f"number of records: rank {rank} has {len(outcome.records)}, the fleet {len(fleet.records)}"
            return
    for k, expected in enumerate(fleet.records):
        found = [rank.records[k] for rank in ranks]
        for name in NUMBERS:
            values = [record[name] for record in found]
            own = name in ("step", "period", "overlap")  # a process's; the fleet has the largest
            if (max(values) if own else values) != (expected[name] if own else [expected[name]] * len(values)):
                yield f"records' {name}: round {k + 1}: ranks {values}, the fleet {expected[name]}"
        for name in ("loss", "drift", "noise"):
            for record in found:
                a, b = record[name], expected[name]
                if name == "drift" and unknown and (a is None or half):
                    continue
                if (a is None) != (b is None) or (a is not None and not math.isclose(a, b, rel_tol=near, abs_tol=near)):
                    yield f"records' {name}: round {k + 1}: a rank {a}, the fleet {b}"


def _changes(what: str, a: Outcome, b: Outcome) -> Iterator[str]:
    """Two runs that must be the same to the last bit."""
    if _type(a) != _type(b):
        yield f"{what}, error: {a.error or 'none'} and {b.error or 'none'}"
    if a.error or b.error:
        return
    for w in a.parameters:
        if not _equal(a.parameters[w], b.parameters[w]):
            yield f"{what}, parameters: worker {w} by {_distance(a.parameters[w], b.parameters[w])}"
        if not all(_equal(x, y) for x, y in zip(a.buffers[w], b.buffers[w], strict=True)):
            yield f"{what}, buffers: worker {w}"
        if len(a.state[w]) != len(b.state[w]) or not all(_equal(x, y) for x, y in zip(a.state[w], b.state[w])):
            yield f"{what}, optimizer state: worker {w}"
    if len(a.records) != len(b.records):
        yield f"{what}, number of records: {len(a.records)} and {len(b.records)}"
    for one, other in zip(a.records, b.records):
        for name, value in one.items():
            # With gossip records wait until all meet, and sums over three ranks are then rounded in another order.
            near = isinstance(value, float) and math.isclose(value, other[name] or math.nan, rel_tol=1e-14)
            if value != other[name] and not near:
                yield f"{what}, records' {name}: round {one['round']}: {value} and {other[name]}"


def _within(tolerance: float) -> Callable[[Tensor, Tensor], bool]:
    return lambda a, b: torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7), b.nan_to_num(7))


def _distance(a: Tensor, b: Tensor) -> str:
    return f"{float((a.double() - b.double()).abs().max()):.2g}"


def _shown(a: Tensor, b: Tensor) -> str:
    return f"{a.item()} and {b.item()}" if a.dim() == 0 else f"by {_distance(a, b)}"


def _type(outcome: Outcome) -> str:
    return outcome.error.split(":")[0]


def _diverged(outcome: Outcome) -> bool:
    return outcome.error.startswith("DivergedError")


def _kind(problem: str) -> str:
    return problem.split(":")[0]


Failure = tuple[str, Scenario, list[str]]


def run(cases: Sequence[tuple[str, Scenario]], *, shrink: bool) -> list[Failure]:
    """Check the named scenarios, and print those that fail on the way."""
    torch.set_num_threads(1)
    failures: list[Failure] = []
    with Fuzz() as fuzz:
        for name, scenario in cases:
            problems = fuzz.check(scenario)
            if not problems:
                continue
            print(f"{name}: {scenario}", *problems[:12], sep="\n    ", flush=True)
            if shrink:
                scenario = fuzz.shrink(scenario, problems[0])
                print(f"    smaller: {scenario}", flush=True)
            failures.append((name, scenario, problems))
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, help="so many at the same time, each with ranks of its own")
    parser.add_argument("--scenario", action="append", default=[], help="run this one instead, as it was printed")
    parser.add_argument("--found", action="store_true", help="run those that failed once, in their smallest form")
    parser.add_argument("--no-shrink", action="store_true", help="print scenarios as they were drawn")
    options = parser.parse_args(arguments)
    cases = [("given", read(text)) for text in options.scenario]
    cases += FOUND.items() if options.found else ()
    if not cases:
        cases = [(f"seed {seed}", draw(seed)) for seed in range(options.first, options.first + options.seeds)]
    began, call = time.monotonic(), partial(run, shrink=not options.no_shrink)
    if options.jobs == 1:
        failures = call(cases)
    else:
        with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
            failures = [
                f for part in pool.map(call, [cases[k :: options.jobs] for k in range(options.jobs)]) for f in part
            ]
    print(f"{len(cases)} scenarios in {time.monotonic() - began:.0f} s, {len(failures)} failed")
    grouped: dict[str, list[str]] = defaultdict(list)
    for name, scenario, problems in failures:
        grouped[_kind(problems[0])].append(f"{name}: {scenario}")
    for kind, lines in sorted(grouped.items(), key=lambda item: -len(item[1])):
        print(f"{kind} ({len(lines)})", *lines, sep="\n    ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
