"""Weights by which a worker that is suddenly far off does not count: after EDiT (Cheng et al. 2025).

With g_i the norm of worker i's change since the workers last agreed, and of the logarithms of what was told before

    a_i, s_i    mean and deviation of worker i's own          A_i, S_i    of all others'

worker i is left out of an average if log g_i > L_i = max(a_i + z s_i, A_i + z S_i): beyond z deviations of its own past
and of the others'. To come back it has to be within half of its own, a_i + z s_i / 2, or within the others'. It knows
g_i before the average starts, and the rest from averages before, so nothing more is to be asked.
Logarithms, because what makes changes larger (an lr, a longer round) makes them larger by a factor.

Nobody knows whether the others have jumped too, as all do when the lr is raised. So the weight of one that is left out
is not 0 but epsilon e^(L_i - log g_i). Beside anybody who counts that is nothing; if all are far off, they count by
1 / g_i, and no one moves the mean by more than the others. So they do in the first average, of which nobody knows what
is usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from prsgd._check import positive
from prsgd.averaging.weights import AnyWeights, Brought, Weights, found

EPSILON = 2.0**-60
"""The weight of one at the limit that is left out: less than float64 adds to the others' sum."""
LEAST = 1e-36
"""A weight below this is 0: float32 would hardly know it, and the row of a weight of 0 is not read."""
MOST = 1e30
"""What is told of a norm, at most: it travels in float32."""
HUGE = math.log(1e6)
"""No model changes so much: whose buffers are not believed even where nobody knows what is usual."""
RATE = 0.2
"""How much the newest average counts in a mean of the past."""
UNSURE = 1.0
"""The deviation that is assumed at first, and after all have jumped: changes grow while momentum does, and with an
overlap the first round is shorter."""
SUREST = 1 / 3
"""The deviation that is assumed at least: with a threshold of 3, e times the usual is never too much."""


@dataclass(frozen=True)
class steady(Weights):  # noqa: N801 - a word in the user's sentence
    """Leave a worker out of an average if its change is beyond ``threshold`` deviations of what it has done before, and
    of what the others have: that of a broken machine, or of one that diverges, not that of a liar (docs/robust.md).

    It is given the others' mean and fresh optimizer state. All others count as in ``of``. With a ``penalty`` p a change
    of norm g counts by e^(-p g) besides: EDiT's rule is p = 1.

    >>> steady()
    steady(threshold=3.0, penalty=0.0, of='uniform')
    >>> usual = (0.0, 0.0, 0.25, 0.25, 0.0, 0.0)  # two workers' log norms: means, variances; is it left out?
    >>> [steady().weigh(Brought(0, 8, 256, usual, _change=lambda norm=norm: norm)) > 1e-9 for norm in (0.1, 4.4, 4.5)]
    [True, True, False]
    """

    tells: ClassVar[bool] = True
    measures: ClassVar[bool] = True

    threshold: float = 3.0
    penalty: float = 0.0
    of: AnyWeights = "uniform"

    def __post_init__(self) -> None:
        positive("threshold", self.threshold)
        if self.penalty != 0:
            positive("penalty", self.penalty)
        if found(self.of).tells:
            raise ValueError(f"of must be weights that tell nothing themselves, got {self.of!r}")

    def weigh(self, brought: Brought) -> float:
        weight, norm = found(self.of).weigh(brought), brought.change
        if not norm:
            return weight
        limit = self._limit(brought)
        if limit is None:
            return min(weight / norm, MOST)
        beyond = math.log(norm) - limit
        if beyond <= 0:
            return weight * self._penalized(norm, brought.told)
        weight *= EPSILON * math.exp(-beyond)
        return weight if weight >= LEAST else 0.0

    def tell(self, brought: Brought) -> float:
        """The norm, negative if it is beyond the limit; 0 if there is none."""
        norm = min(brought.change or 0.0, MOST)
        limit = self._limit(brought)
        return -norm if norm and (limit is None or math.log(norm) > limit) else norm

    def distrusts(self, brought: Brought) -> bool:
        limit = self._limit(brought)
        return bool(brought.change) and math.log(brought.change or 1.0) > (HUGE if limit is None else limit)

    def hear(self, known: tuple[float, ...], told: tuple[float, ...]) -> tuple[float, ...]:
        """The means of all workers' log norms, their variances, and who was left out.

        A norm beyond the limit is not believed, and what is usual stays, unless most workers' are: then they have all
        jumped, and begin anew from there.
        """
        past = _Past.of(known) if known else _Past(*([0.0] * len(told) for _ in range(3)))
        logs, beyond = _logs(told), _beyond(told)
        jumped = 2 * len(beyond) > len(logs)
        moves = []
        for i, log in logs.items():
            past.out[i] = float(i in beyond and not jumped)
            if past.out[i]:
                continue
            if i in beyond or not past.variances[i]:
                past.means[i], past.variances[i] = min(log, self._highest(logs)), UNSURE**2
            else:
                off = log - past.means[i]
                past.means[i] += RATE * off
                past.variances[i] = (1 - RATE) * (past.variances[i] + RATE * off * off)
                moves.append(RATE * off)
        for i in beyond if moves and not jumped else ():  # what is usual for it moves with what is for the others
            past.means[i] += sum(moves) / len(moves)
        return (*past.means, *past.variances, *past.out)

    def left_out(self, told: tuple[float, ...]) -> tuple[int, ...]:
        """Those beyond the limit; where all are, those that are far above the median."""
        logs, beyond = _logs(told), _beyond(told)
        if len(beyond) < len(logs):
            return tuple(sorted(beyond))
        return tuple(i for i, log in logs.items() if log > self._highest(logs))

    def _highest(self, logs: dict[int, float]) -> float:
        """What is believed of norms of which nobody knows what is usual."""
        return sorted(logs.values())[(len(logs) - 1) // 2] + self.threshold * UNSURE

    def _limit(self, brought: Brought) -> float | None:
        """Of the worker's log norm; None if nobody knows what is usual."""
        past, own = _Past.of(brought.told), brought.worker
        everybody = range(len(past.means))
        limits = []
        for workers in ([i for i in everybody if i == own], [i for i in everybody if i != own]):
            usual = past.usual(workers)
            if usual is not None:
                halved = workers == [own] and past.out[own]
                limits.append(usual[0] + usual[1] * self.threshold / (2 if halved else 1))
        return max(limits, default=None)

    def _penalized(self, norm: float, told: tuple[float, ...]) -> float:
        """e^(-penalty norm), relative to that of a usual norm, which all know: only proportions matter."""
        past = _Past.of(told)
        usual = past.usual(range(len(past.means)))
        if not self.penalty or usual is None:
            return 1.0
        return math.exp(max(-30.0, min(30.0, self.penalty * (math.exp(usual[0]) - norm))))


class _Past(NamedTuple):
    """What is known of all workers' log norms."""

    means: list[float]
    variances: list[float]
    """0 for one of which nothing is known."""
    out: list[float]
    """1 for one that was left out of the last average."""

    @classmethod
    def of(cls, known: tuple[float, ...]) -> _Past:
        n = len(known) // 3
        return cls(*(list(known[start : start + n]) for start in (0, n, 2 * n)))

    def usual(self, workers: Iterable[int]) -> tuple[float, float] | None:
        """Mean and deviation of what these workers did; None if nothing is known of them."""
        known = [i for i in workers if self.variances[i]]
        if not known:
            return None
        mean = sum(self.means[i] for i in known) / len(known)
        variance = sum(self.variances[i] + (self.means[i] - mean) ** 2 for i in known) / len(known)
        return mean, max(math.sqrt(variance), SUREST)


def _logs(told: tuple[float, ...]) -> dict[int, float]:
    """By worker that told a norm."""
    return {i: math.log(abs(norm)) for i, norm in enumerate(told) if norm}


def _beyond(told: tuple[float, ...]) -> set[int]:
    return {i for i, norm in enumerate(told) if norm < 0}
