"""Who takes part in a call, of those that the lighthouse has brought together. Pure: no torch, no network.

Every worker that calls tells the same few things of itself, and all that meet hear them of all. So each finds the same
answer by itself, and no message more is needed:

    leaders   have made the most calls, all of them together: they bring their numbers
    behind    are new, or missed a call: they bring nothing, are told the state by the first leader, and then go on
              with the others. They come in at averages only, which ``offers`` says

A worker that was at the call before and is missing is waited for, unless somebody's connection to it is gone, or
somebody has waited for it long enough.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prsgd.errors import MismatchError


@dataclass(frozen=True)
class Caller:
    """One worker that calls."""

    replica: str
    """Its process: the worker's id, and what tells it from one before with the same id."""
    worker: int
    store: str = ""
    """The address of its store."""
    call: str = ""
    """What it calls, the same for all that may call together; empty: it wants to join."""
    calls: int = 0
    """Calls that it has made with the others."""
    newest: str = ""
    """The name of the newest of them, which those have in common that made it together; empty: it is new."""
    launched: int = 0
    """Averages that the state that it loaded had seen."""
    began: float = 0.0
    """When its run began, by the lighthouse's clock; 0: it is in none."""
    min_workers: int = 1
    """With fewer it waits."""
    offers: bool = False
    """Does it call for an average, at which others may come in?"""
    group: str = ""
    """The connections that it has, and between how many; empty: none."""
    size: int = 0
    peers: tuple[int, ...] = ()
    """The workers that were at its newest call."""
    gone: int = 0
    """How many of its connections have ended."""
    is_tired: bool = False
    """Has it waited long enough for those that are missing?"""
    limit: float = 0.0
    """For so many seconds one that hangs may hold it."""
    failures: int = 0
    """How many times in a row it was to come in, and that failed."""
    rests: bool = False
    """Does it give the others time before it tries to come in again?"""

    def told(self) -> dict[str, Any]:
        """As the lighthouse carries it."""
        return asdict(self)

    @classmethod
    def of(cls, told: dict[str, Any]) -> Caller:
        """Back from what was ``told``."""
        return cls(**{**told, "peers": tuple(told["peers"])})


@dataclass(frozen=True)
class Plan:
    """Who takes part in a call."""

    name: str
    """Of the call, like no other's."""
    callers: tuple[Caller, ...]
    """Those that take part, by rank."""
    leaders: tuple[Caller, ...]
    group: str
    """The connections to use, if all have them; empty: new ones."""
    call: str = ""
    calls: int = 0
    """That the leaders have made before."""

    @property
    def members(self) -> tuple[int, ...]:
        """The ids of those that bring their numbers."""
        return tuple(caller.worker for caller in self.leaders)

    @property
    def source(self) -> int:
        """The rank of the one that tells its state."""
        return self.callers.index(self.leaders[0])

    @property
    def behind(self) -> list[int]:
        """The ranks of those that are told."""
        return [rank for rank, caller in enumerate(self.callers) if caller not in self.leaders]

    @property
    def limit(self) -> float:
        """How long each of those that are told may hold the leaders: as one of them may, and longer after each time
        that it failed. All find the same, a newcomer too, which knows nothing of rounds."""
        failures = max((self.callers[rank].failures for rank in self.behind), default=0)
        return float(max(leader.limit for leader in self.leaders) * 2**failures)

    def rank(self, replica: str) -> int | None:
        """Of this process; None: it does not take part."""
        return next((rank for rank, caller in enumerate(self.callers) if caller.replica == replica), None)


def plan(name: str, callers: Sequence[Caller], *, min_workers: int, num_workers: int) -> Plan | None:
    """Who takes part, of those that have met; None: wait for others. All ``num_workers`` are, when a run begins.

    >>> two = [Caller(str(i), i, "", "sum", calls=3, newest="x", offers=True, peers=(0, 1, 2)) for i in range(2)]
    >>> plan("y", two, min_workers=1, num_workers=9) is None  # worker 2 may still come
    True
    >>> from dataclasses import replace
    >>> plan("y", [replace(two[0], gone=1), two[1], Caller("8", 8, "", "")], min_workers=1, num_workers=9).members
    (0, 1)
    """
    min_workers = max([min_workers, *(caller.min_workers for caller in callers)])  # all must find the same
    callers = _one_each(callers)
    known = [caller for caller in callers if caller.newest]
    leaders = _leaders(known) if known else _founders(callers)
    may_come = not known or all(c.offers for c in leaders)
    # Only who wants to join, or does what the leaders do: another call would not fit into their group.
    others = [c for c in callers if c not in leaders and not c.rests]
    late = [c for c in others if known and may_come and c.call in ("", leaders[0].call)]
    taking = sorted([*leaders, *late], key=lambda c: c.replica)
    expected = {peer for c in leaders for peer in c.peers} if known else set(range(num_workers))
    missing = expected - {c.worker for c in callers}
    if missing and not any(c.is_tired or c.gone >= len(missing) for c in leaders):
        return None
    if len(taking) < min_workers and may_come:  # elsewhere nobody could come, and the next average waits
        return None
    if len({c.call for c in leaders}) > 1:
        calls = ", ".join(f"worker {c.worker}: {c.call or 'join'}" for c in leaders)
        raise MismatchError(f"the workers entered different calls ({calls})")
    open_ones = {(c.group, c.size) for c in taking}
    group = taking[0].group if open_ones == {(taking[0].group, len(taking))} else ""
    return Plan(name, tuple(taking), tuple(leaders), group, leaders[0].call, leaders[0].calls)


def _one_each(callers: Sequence[Caller]) -> list[Caller]:
    """One process for each worker: whoever has made the most calls, of those the first."""
    best: dict[int, Caller] = {}
    for caller in sorted(callers, key=lambda c: c.replica):
        if caller.worker not in best or caller.calls > best[caller.worker].calls:
            best[caller.worker] = caller
    return sorted(best.values(), key=lambda c: c.replica)


def _leaders(known: Sequence[Caller]) -> list[Caller]:
    """Of the oldest run, beside which one that found nobody may have begun another: those with the most calls; if they
    did not make the newest together, the most of them that did."""
    oldest = min(caller.began for caller in known)
    known = [caller for caller in known if caller.began == oldest]
    most = max(caller.calls for caller in known)
    first = [caller for caller in known if caller.calls == most]
    newest = Counter(caller.newest for caller in first)
    name = min(newest, key=lambda name: (-newest[name], name))
    return [caller for caller in first if caller.newest == name]


def _founders(callers: Sequence[Caller]) -> list[Caller]:
    """All are new: those begin whose loaded state has seen the most averages, which is none in a fresh run."""
    most = max(caller.launched for caller in callers)
    return [caller for caller in callers if caller.launched == most]
