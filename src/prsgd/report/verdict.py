"""What the comparison says, in a sentence or two that follow from the numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prsgd import metrics
from prsgd.metrics import Metric
from prsgd.report.series import Group, Measured, Row, baseline, differing, rows


def verdict(groups: Sequence[Group]) -> str:
    """Which run got by with the least communication, against the baseline: the one that communicated most, unless
    another was named.

    A run reached the baseline if it is not behind by more than the metric's ``least`` (0.2 points of accuracy), or by
    two standard errors of the difference if that is more, but never by more than its ``most`` (0.5 points). Runs that
    are not finished are left out, and named.
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
    """A finished group's numbers."""

    name: str
    score: Measured
    loss: float
    diverged: bool
    """Did any of its seeds?"""
    metric: Metric
    rounds: float
    megabytes: float

    @classmethod
    def of(cls, row: Row) -> _Found:
        assert row.train_loss is not None
        assert row.rounds is not None
        assert row.megabytes is not None
        assert row.score is not None
        diverged = "diverged" in row.state
        metric = metrics.find(row.metric)
        return cls(row.name, row.score, row.train_loss.mean, diverged, metric, row.rounds, row.megabytes)

    @property
    def value(self) -> str:
        return self.metric.value.format(self.score.mean)

    @property
    def quality(self) -> str:
        return self.metric.amount.format(self.value)

    @property
    def least(self) -> float:
        """The difference from this baseline that counts as none."""
        return self.metric.least * (abs(self.score.mean) if self.metric.relative else 1.0)

    def behind(self, base: _Found) -> float:
        difference = base.score.mean - self.score.mean
        return difference if self.metric.higher_is_better else -difference

    def tolerance(self, base: _Found) -> float:
        if min(self.score.seeds, base.score.seeds) < 2:
            return base.least
        most = base.least * self.metric.most / self.metric.least
        return min(most, max(base.least, 2 * math.sqrt(self.score.squared_error + base.score.squared_error)))

    def reached(self, base: _Found) -> bool:
        return self.behind(base) <= self.tolerance(base) + 1e-9

    def beat(self, base: _Found) -> bool:
        errors = 2 * math.sqrt(self.score.squared_error + base.score.squared_error)
        return -self.behind(base) > max(base.least, errors) + 1e-9


def _compare(base: _Found, others: Sequence[_Found]) -> list[str]:
    metric = base.metric
    good = [other for other in others if other.reached(base) and not other.diverged]
    if not good:
        near = min(others, key=lambda other: other.behind(base))
        loses = f"ends at {near.value}" if metric.relative else f"loses {near.behind(base):.1f} points"
        return [
            f"No other run reached the {metric.name} of {base.name} ({base.value}).",
            f"{_capital(near.name)} came nearest: it {loses}, with {_cost(near, base)}.",
        ]
    chosen = min(good, key=lambda other: (other.megabytes, other.behind(base)))
    values = f"{chosen.value} against {base.value}"
    if chosen.beat(base):
        sentences = [f"{_capital(chosen.name)} {metric.better} {base.name} ({values}), with {_cost(chosen, base)}."]
    else:
        if chosen.behind(base) > base.least + 1e-9:
            values = f"within the seeds' spread, {values}"
        sentences = [
            f"{_capital(chosen.name)} reached the {metric.name} of {base.name} ({values}) with {_cost(chosen, base)}."
        ]
    if metric.higher_is_better and chosen.loss > 1.1 * base.loss:
        sentences.append(f"Its training loss ended higher: {chosen.loss:.3g} against {base.loss:.3g}.")
    best = min(good, key=lambda other: other.behind(base))
    if best.behind(base) < chosen.behind(base) and best.beat(base):
        sentences.append(f"{_capital(best.name)} was {metric.best}: {best.value}, with {_cost(best, base)}.")
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
    small = base.metric.difference
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
