"""Time to accuracy: every contestant trains a task of the lab over the same link until it is good enough.

Only training counts: looking at the test samples is done with the clock stopped. Teams take turns as in a race.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from prsgd.bench.links import Link, made
from prsgd.bench.race import DropOutError, team
from prsgd.bench.rank import Orders

PERIOD_MARK = "@"
"""Between a contestant and its period: prsgd@16."""


CLIMBERS = (
    "ddp", "ddp-bf16", "ddp-fp16", "ddp-powersgd", "averager@8", "accelerate@8", "torchft@8", "prsgd@4", "prsgd@8",
    "prsgd@16", "prsgd-auto@8", "prsgd-period-auto", "prsgd-diloco@8",
)  # fmt: skip
"""Who runs unless others are named."""


@dataclass(frozen=True)
class Point:
    """How far one has come."""

    steps: int
    seconds: float
    """Of training."""
    accuracy: float


@dataclass
class Climb:
    """What came out, of one task over one link."""

    model: str
    link: str
    ranks: int
    target: float
    points: dict[str, list[list[Point]]] = field(default_factory=dict)
    """By contestant, one list a seed."""
    left_out: dict[str, str] = field(default_factory=dict)

    def seconds(self, contestant: str) -> list[float | None]:
        """Until the target was reached, seed by seed; None: it was not."""
        found = []
        for points in self.points[contestant]:
            found.append(next((p.seconds for p in points if p.accuracy >= self.target), None))
        return found

    def median_seconds(self, contestant: str) -> float | None:
        """None unless all seeds reached the target."""
        found = [s for s in self.seconds(contestant) if s is not None]
        return median(found) if len(found) == len(self.points[contestant]) else None

    def best(self, contestant: str) -> float:
        """The highest accuracy that was seen, the mean of the seeds."""
        best = [max(p.accuracy for p in points) for points in self.points[contestant]]
        return sum(best) / len(best)

    def ranking(self) -> list[str]:
        """The first to arrive first."""
        never = float("inf")
        return sorted(self.points, key=lambda name: never if (s := self.median_seconds(name)) is None else s)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Climb:
        points = {
            name: [[Point(**point) for point in points] for points in seeds]
            for name, seeds in content["points"].items()
        }
        return cls(**{**content, "points": points})


def parse(text: str, usual_period: int) -> tuple[str, int]:
    """A contestant and its period.

    >>> parse("prsgd@16", 8), parse("ddp", 8)
    (('prsgd', 16), ('ddp', 8))
    """
    name, _, period = text.partition(PERIOD_MARK)
    if period and not (period.isdigit() and int(period)):
        raise ValueError(f"a contestant's period must be a whole number >= 1, got {text!r}")
    return name, int(period) if period else usual_period


def climb(
    model: str,
    link: Link,
    contestants: Sequence[str],
    *,
    target: float,
    period: int = 8,
    lr: float = 0.01,
    ranks: int = 2,
    seeds: Sequence[int] = (0,),
    look_every: int = 16,
    most_steps: int = 2000,
    tell: Callable[[str], object] = str,
) -> Climb:
    """Let them climb, seed by seed, until each has reached the target or taken ``most_steps``."""
    found = Climb(model, link.name, ranks, target)
    for seed in seeds:
        with made(link, ranks) as places, ExitStack() as stack:
            teams = {}
            for text in contestants:
                if text in found.left_out:
                    continue
                name, own = parse(text, period)
                tell(f"{model}, {link.name}: {text} gets ready")
                try:
                    orders = Orders(contestant=name, model=model, period=own, seed=seed, lr=lr)
                    teams[text] = stack.enter_context(team(orders, places))
                    found.points.setdefault(text, []).append([])
                except DropOutError as problem:
                    found.left_out[text] = str(problem)
                    found.points.pop(text, None)
            shuffle = random.Random(seed).shuffle
            while teams:
                order = list(teams)
                shuffle(order)
                for text in order:
                    points = found.points[text][-1]
                    before = points[-1] if points else Point(0, 0.0, 0.0)
                    tell(f"{model}, {link.name}: seed {seed}, {text}, {100 * before.accuracy:.1f} %")
                    try:
                        lap = teams[text].take(look_every)
                        accuracy = teams[text].accuracy()
                    except DropOutError as problem:
                        found.left_out[text] = f"seed {seed}, step {before.steps}: {problem}"
                        teams.pop(text).end()
                        del found.points[text]
                        continue
                    points.append(Point(before.steps + look_every, before.seconds + lap.seconds, accuracy))
                    if accuracy >= target or points[-1].steps >= most_steps:
                        teams.pop(text).end()
    return found
