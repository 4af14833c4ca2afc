"""What the comparison says, in a sentence or two that follow from the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prsgd.report.series import Group, Measured, Row, baseline, differing, rows

LEAST_POINTS = 0.2
"""Of test accuracy, in percent: what is nearer than this counts as equal, however alike the seeds are."""
MOST_POINTS = 0.5
"""What is further behind has not reached it, however much the seeds differ: noise is no excuse."""
LEAST_LOSS_SHARE = 0.02
"""The same for the training loss, where a task has no accuracy: of the baseline's loss."""


def verdict(groups: Sequence[Group]) -> str:
    """Which run got by with the least communication, against the baseline: the one that communicated most, unless
    another was named.

    A run reached the baseline if it is not behind by more than 0.2 points, or by two standard errors of the difference
    if that is more, but never by more than 0.5 points. Runs that are not finished are left out, and named.
    """
    base = baseline(groups)
    if base is None:
        return "No run is finished yet, so there is nothing to conclude."
    left_out = _left_out(groups)
    found = {id(group): _Found.of(row) for group, row in zip(groups, rows(groups)) if group.finished}
    first = found.pop(id(base))
    if not found:
        return f"{_capital(first.name)} reached {first.quality} in {_rounds(first.rounds)}.{left_out}"
    others = list(found.values())
    text = " ".join(_compare(first, others)).removesuffix(".")
    return f"{text}{_one_seed(first, others)}.{_unlike(groups)}{left_out}"


@dataclass(frozen=True)
class _Found:
    """A finished group's numbers. ``score``: higher is better."""

    name: str
    score: Measured
    loss: float
    diverged: bool
    """Did any of its seeds?"""
    by_accuracy: bool
    rounds: float
    megabytes: float

    @classmethod
    def of(cls, row: Row) -> _Found:
        assert row.train_loss is not None
        assert row.rounds is not None
        assert row.megabytes is not None
        loss = row.train_loss
        score = row.test_accuracy or Measured(-loss.mean, loss.spread, loss.seeds)
        return cls(
            row.name,
            score,
            loss.mean,
            "diverged" in row.state,
            row.test_accuracy is not None,
            row.rounds,
            row.megabytes,
        )

    @property
    def value(self) -> str:
        return f"{self.score.mean:.1f} %" if self.by_accuracy else f"{-self.score.mean:.3g}"

    @property
    def quality(self) -> str:
        return f"a test accuracy of {self.value}" if self.by_accuracy else f"a training loss of {self.value}"

    @property
    def least(self) -> float:
        """The difference from this baseline that counts as none."""
        return LEAST_POINTS if self.by_accuracy else LEAST_LOSS_SHARE * abs(self.score.mean)

    def behind(self, base: _Found) -> float:
        return base.score.mean - self.score.mean

    def tolerance(self, base: _Found) -> float:
        if min(self.score.seeds, base.score.seeds) < 2:
            return base.least
        most = base.least * MOST_POINTS / LEAST_POINTS
        return min(most, max(base.least, 2 * math.sqrt(self.score.squared_error + base.score.squared_error)))

    def reached(self, base: _Found) -> bool:
        return self.behind(base) <= self.tolerance(base) + 1e-9

    def beat(self, base: _Found) -> bool:
        errors = 2 * math.sqrt(self.score.squared_error + base.score.squared_error)
        return -self.behind(base) > max(base.least, errors) + 1e-9


def _compare(base: _Found, others: Sequence[_Found]) -> list[str]:
    what = "accuracy" if base.by_accuracy else "training loss"
    good = [other for other in others if other.reached(base) and not other.diverged]
    if not good:
        near = min(others, key=lambda other: other.behind(base))
        loses = f"loses {near.behind(base):.1f} points" if base.by_accuracy else f"ends at {near.value}"
        return [
            f"No other run reached the {what} of {base.name} ({base.value}).",
            f"{_capital(near.name)} came nearest: it {loses}, with {_cost(near, base)}.",
        ]
    chosen = min(good, key=lambda other: (other.megabytes, other.behind(base)))
    values = f"{chosen.value} against {base.value}"
    if chosen.beat(base):
        better = "was more accurate than" if base.by_accuracy else "reached a lower training loss than"
        sentences = [f"{_capital(chosen.name)} {better} {base.name} ({values}), with {_cost(chosen, base)}."]
    else:
        if chosen.behind(base) > base.least + 1e-9:
            values = f"within the seeds' spread, {values}"
        sentences = [
            f"{_capital(chosen.name)} reached the {what} of {base.name} ({values}) with {_cost(chosen, base)}."
        ]
    if base.by_accuracy and chosen.loss > 1.1 * base.loss:
        sentences.append(f"Its training loss ended higher: {chosen.loss:.3g} against {base.loss:.3g}.")
    best = max(good, key=lambda other: other.score.mean)
    if best.score.mean > chosen.score.mean and best.beat(base):
        most = "the most accurate" if base.by_accuracy else "the best"
        sentences.append(f"{_capital(best.name)} was {most}: {best.value}, with {_cost(best, base)}.")
    return sentences


def _cost(other: _Found, base: _Found) -> str:
    fewer = base.rounds / other.rounds if other.rounds else math.inf
    if math.isinf(fewer):
        rounds = "no rounds at all"
    elif fewer >= 1.05:
        rounds = f"{fewer:.1f}x fewer rounds" if fewer < 100 else f"{fewer:.0f}x fewer rounds"
    else:
        rounds = "as many rounds" if fewer > 0.95 else f"{1 / fewer:.1f}x more rounds"
    if not base.megabytes:
        return rounds
    share = 100 * other.megabytes / base.megabytes
    if share > 100.5:
        return f"{rounds} and {share / 100:.3g}x the bytes"
    return f"{rounds} and {'as many bytes' if share >= 99.5 else f'{share:.3g} % of the bytes'}"


def _one_seed(base: _Found, others: Sequence[_Found]) -> str:
    alone = [found.name for found in (base, *others) if found.score.seeds == 1]
    if not alone:
        return ""
    small = "differences under about a point" if base.by_accuracy else "small differences"
    if len(alone) == len(others) + 1:
        return f" (one seed: {small} mean little)"
    who = f"{' and '.join(alone)} {'has' if len(alone) == 1 else 'have'}" if len(alone) <= 3 else "some runs have"
    return f" ({who} one seed: {small} mean little)"


def _unlike(groups: Sequence[Group]) -> str:
    keys = differing(run for group in groups for run in group.runs)
    if not keys:
        return ""
    return f" The runs differ in {' and '.join(k.replace('_', ' ') for k in keys)} too, not in averaging alone."


def _left_out(groups: Sequence[Group]) -> str:
    names = [f"{group.name} ({group.state})" for group in groups if not group.finished]
    partly = [f"{group.name} ({group.state})" for group in groups if group.finished and group.state]
    text = f" Not counted: {'; '.join(names)}." if names else ""
    return text + (f" Counted in part: {'; '.join(partly)}." if partly else "")


def _rounds(count: float) -> str:
    return "1 round" if count == 1 else f"{count:,.0f} rounds"


def _capital(text: str) -> str:
    """Of a sentence's first word; a method's name stays as it is typed.

    >>> _capital("period 8"), _capital("pr-sgd period 8")
    ('Period 8', 'pr-sgd period 8')
    """
    return text[:1].upper() + text[1:] if text.startswith("period ") else text
