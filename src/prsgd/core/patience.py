"""How long to wait for an average, unless the user says: by what rounds have taken so far."""

from __future__ import annotations

import time

from prsgd.errors import AverageTimeout

LONGEST = 600.0
"""Seconds; also until something is known."""
SHORTEST = 120.0
TIMES = 20.0
"""The longest round so far: what has happened once, as an evaluation in one process alone, may happen again."""
SURE = 3
"""Rounds that have to be known."""


class Patience:
    """Knows the seconds from one average's arrival to the next one's.

    >>> patience = Patience(None)
    >>> patience.seconds()
    600.0
    >>> for at in (0.0, 5.0, 10.0, 20.0):
    ...     patience.arrived(at)
    >>> patience.seconds(now=21.0), patience.seconds(now=40.0), Patience(7.0).seconds()
    (200.0, 400.0, 7.0)
    """

    def __init__(self, given_seconds: float | None) -> None:
        self._given = given_seconds
        self._last: float | None = None
        self._longest, self._rounds = 0.0, 0

    def arrived(self, now: float | None = None) -> None:
        """An average has."""
        now = time.monotonic() if now is None else now
        if self._last is not None:
            self._longest, self._rounds = max(self._longest, now - self._last), self._rounds + 1
        self._last = now

    def seconds(self, now: float | None = None) -> float:
        """How long the next one may keep this process waiting, from now on: what its own steps have taken since the
        last one is so much of a round too, and schedules make rounds longer."""
        if self._given is not None:
            return self._given
        if self._last is None or self._rounds < SURE:
            return LONGEST
        now = time.monotonic() if now is None else now
        return min(LONGEST, max(SHORTEST, TIMES * max(self._longest, now - self._last)))

    @property
    def longest_seconds(self) -> float:
        """However long rounds take: for ``consensus()``, and at the end."""
        return LONGEST if self._given is None else self._given

    def explain(self, error: AverageTimeout) -> AverageTimeout:
        """Where the limit is none that the user has given."""
        if self._given is not None or self._rounds < SURE:
            return error
        why = f"the longest round so far took {self._longest:.3g} s; timeout_seconds= sets another limit"
        return AverageTimeout(f"{error} ({why})")
