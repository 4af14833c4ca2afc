"""One worker among others that come and go: calls that are made again until all who take part in one have made it.

A call asks the lighthouse who is there (``lighthouse``, ``quorum``), opens connections if others take part than before,
tells those the state that are behind, does what the call is for, and ends with a vote: one number more around the
group, which comes through only if all have what they called for. If anything fails on the way the connections are
dropped, which makes the others fail too, and it begins anew with those that are left. Who fails in the vote after
others have seen it pass made one call fewer than they: at the next one it is behind.

Everything here happens in a thread of its own, and travels beside the steps of a worker that overlaps.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in torch's own export list

from prsgd._warn import warn
from prsgd.comm import parcel
from prsgd.comm.connection import Connection, Rendezvous
from prsgd.comm.joining import store_at
from prsgd.comm.lighthouse import Lighthouse
from prsgd.comm.quorum import Caller, Plan, plan
from prsgd.comm.works import Errands, OwnError, first_line
from prsgd.errors import MismatchError, PeerError, UsageError

FLOOR_SECONDS = 1.5
"""No limit is below that: a machine that is busy with something else takes so long now and then."""
TIMES, TRANSFER_TIMES = 3, 5
"""Others are waited for so many times as long as the last rounds took, and a transfer may take so many times as long as
the last ones did; twice as long after each that failed."""
UNKNOWN_SECONDS = 60.0
"""The limit while nothing is known of rounds."""
REST_SECONDS, REST_TIMES, MOST_DOUBLINGS = 0.5, 2, 6
"""A worker whose coming in has failed rests at least so long, or so many times as long as it held the others, before it
tries again; twice as long, and it is waited for twice as long, after each that failed, so many times at most."""
START_SECONDS = 10.0
"""How long all workers are waited for when a run begins, after the first."""
CONNECT_SECONDS = 5.0
ALONE_SECONDS = 5.0
"""How long the lighthouse may be away when the workers' connections are gone too."""
AGAIN_SECONDS = 0.02


@dataclass(frozen=True)
class Met:
    """A call that was made."""

    plan: Plan
    state: dict[str, Any] | None
    """What this worker was told, if it was behind."""


State = Callable[[], Mapping[str, Any]]
"""Makes what a worker is told that is behind."""
Run = Callable[["Group", Plan], None]
"""What a call is for, over a group of those who take part; a PeerError if it cannot be done."""


class Group:
    """The connections of those that take part in a call, and for how long to wait for them."""

    def __init__(self, connection: Connection, device: torch.device, limit_seconds: float) -> None:
        self._connection, self._device, self.limit = connection, device, timedelta(seconds=limit_seconds)

    def do(self, launch: Callable[[dist.ProcessGroup], dist.Work]) -> None:
        """Start it and wait for it; a PeerError if somebody fails, or does not answer in time."""
        work = self._connection.start(launch, self._device, CONNECT_SECONDS)
        try:
            work.wait(self.limit)
        except RuntimeError as error:
            raise PeerError(first_line(error)) from None


class Membership:
    """The calls of one worker. ``min_workers`` must be there; ``timeout_seconds`` is given, or goes by the rounds."""

    def __init__(
        self,
        caller: Caller,
        lighthouse: str,
        address: str,
        *,
        num_workers: int,
        min_workers: int,
        timeout_seconds: float | None,
    ) -> None:
        self._min_workers, self._given_seconds, self._address = min_workers, timeout_seconds, address
        self._plan_of = partial(plan, min_workers=min_workers, num_workers=num_workers)
        self._rounds: deque[float] = deque(maxlen=9)
        self._transfers: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=9))
        self._heard_seconds = UNKNOWN_SECONDS
        """The limit of those that told this worker the state."""
        self._met_at: float | None = None
        self._averaged_at: float | None = None
        self._calling = False
        self._closed = threading.Event()
        self._lighthouse = Lighthouse(lighthouse, caller.replica, self._is_well)
        self._store = store_at(address, 0, 1, timeout=timedelta(seconds=CONNECT_SECONDS))
        self._self = replace(caller, store=f"{address}:{self._store.port}")
        self._errands = Errands()
        self._connection: Connection | None = None
        self._plan: Plan | None = None
        self._rests_until, self._failure = 0.0, ""
        """Why this worker did not come in, the last time."""
        self.seen = "nobody called"
        """Who was there when this worker asked last."""

    @property
    def limit_seconds(self) -> float:
        """How long the others are waited for."""
        if self._given_seconds is not None:
            return self._given_seconds
        return max(FLOOR_SECONDS, TIMES * median(self._rounds)) if len(self._rounds) > 1 else self._heard_seconds

    def call(self, what: str, run: Run, device: torch.device, state: State | None, launched: int = 0) -> Future[None]:
        """Make a call; what came of it is in ``met`` then. ``state``: what those are told that come in with it."""
        if self._closed.is_set():
            raise UsageError("the communicator was closed")
        self.met: Met | None = None
        ours = replace(self._self, call=what, offers=state is not None, launched=launched)
        return self._errands.run(lambda: self._make(ours, run, device, state))

    def close(self) -> None:
        """Leave: the others' calls fail at once, and they go on without this one."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._lighthouse.close()
        self._errands.close()
        if self._connection is not None:
            self._connection.close()
        self._errands.join(2 * CONNECT_SECONDS)

    def _make(self, ours: Caller, run: Run, device: torch.device, state: State | None) -> None:
        began = time.monotonic()
        self._calling = True
        try:
            for failures in itertools.count():
                found = self._meet(ours, began)
                limit = found.limit if found.behind else self._transfer_limit(found.call) * 2**failures
                met_at = time.monotonic()
                try:
                    told = self._attempt(found, run, device, state, limit)
                except PeerError as error:
                    # The others wait longer than this one knows for a connection that it cannot open.
                    held = CONNECT_SECONDS if self._connection is None else min(limit, time.monotonic() - met_at)
                    self._drop()
                    if self._is_behind(found):
                        self._rest(held, error)
                    continue
                self._note(found, ours.offers)
                self.met = Met(found, told)
                return
        except (PeerError, MismatchError, UsageError) as error:
            raise OwnError(error) from None
        finally:
            self._calling = False

    def _meet(self, ours: Caller, began: float) -> Plan:
        """Who takes part, as soon as all are there that are waited for."""
        first_try, gone, unseen_since, told = True, self._self.gone, None, False
        while not self._closed.is_set():
            if not first_try:
                time.sleep(AGAIN_SECONDS)
                gone = max(gone, 0 if self._connection is None else self._connection.lost_links())
            own, since = self._self, max(began, self._rests_until)
            patience = self._patience(began) if own.newest else START_SECONDS
            caller = replace(
                ours, calls=own.calls, newest=own.newest, peers=own.peers, group=own.group, size=own.size, gone=gone,
                began=own.began, is_tired=time.monotonic() - since > patience, failures=own.failures,
                limit=max(self.limit_seconds, self._transfer_limit(ours.call)),
                rests=time.monotonic() < self._rests_until,
            )  # fmt: skip
            first_try = False
            try:
                asked = self._lighthouse.ask(caller)
            except OSError as error:
                unseen_since = unseen_since or time.monotonic()
                if self._plan is not None and self._connection is not None:
                    return self._without_lighthouse(self._plan, caller)
                if time.monotonic() - unseen_since > ALONE_SECONDS:
                    raise PeerError(
                        f"the lighthouse at {self._lighthouse.address} is gone, and so is a worker ({error})"
                    ) from None
                continue
            unseen_since = None
            if asked is None:
                continue
            name, callers = asked
            self.seen = self._told_of(callers)
            found = self._plan_of(name, callers)
            if found is not None and found.rank(own.replica) is not None:
                return found
            if not told and len(callers) < self._min_workers and time.monotonic() - began > START_SECONDS:
                told = True
                warn(f"worker {own.worker} waits: {self.seen}", RuntimeWarning)
            if found is not None and found.leaders[0].offers and ours.call not in ("", found.call):
                raise PeerError(
                    f"the others have gone on without this worker, which was at {ours.call!r}: start it again"
                )
        raise UsageError("the communicator was closed")

    def _told_of(self, callers: Sequence[Caller]) -> str:
        """For whoever has waited too long."""
        own = self._self
        if any(c.worker == own.worker and c.replica != own.replica for c in callers):
            return f"another process is worker {own.worker} already"
        if self._failure:
            return f"the others have begun, and this worker could not come in ({self._failure})"
        return f"{len(callers)} of at least {self._min_workers} workers called"

    def _without_lighthouse(self, last: Plan, caller: Caller) -> Plan:
        """Nobody knows who else is there: those of the call before go on among themselves, as long as all are."""
        callers = last.callers
        return Plan(f"{last.name}+", callers, callers, self._self.group, caller.call, self._self.calls)

    def _attempt(
        self, found: Plan, run: Run, device: torch.device, state: State | None, limit_seconds: float
    ) -> dict[str, Any] | None:
        own = found.rank(self._self.replica)
        assert own is not None
        connection = self._connected(found, own)
        told = None
        # One after the other is told, and who hangs meanwhile is found out by the one that tells it.
        wait_seconds = limit_seconds if own == found.source else limit_seconds * (1 + len(found.behind))
        group = Group(connection, device, wait_seconds)
        if found.behind and own == found.source:
            assert state is not None
            self._tell(group, found.behind, state())
        elif own in found.behind:
            told = self._listen(group, found.source)
        began = time.monotonic()
        run(group, found)
        vote = torch.ones(1, dtype=torch.int64, device=device)
        group.do(lambda g: g.allreduce([vote]))
        if not found.behind:
            self._transfers[found.call].append(time.monotonic() - began)
        return told

    def _transfer_limit(self, call: str) -> float:
        known = self._transfers[call]
        if self._given_seconds is not None or not known:
            return self.limit_seconds
        return max(FLOOR_SECONDS, TRANSFER_TIMES * median(known))

    def _is_behind(self, found: Plan) -> bool:
        return found.rank(self._self.replica) in found.behind

    def _rest(self, held_seconds: float, error: PeerError) -> None:
        """This worker could not come in: the others go on without it meanwhile."""
        self._failure = str(error)
        self._self = replace(self._self, failures=min(self._self.failures + 1, MOST_DOUBLINGS))
        rest = max(REST_SECONDS, REST_TIMES * held_seconds) * 2**self._self.failures
        self._rests_until = time.monotonic() + rest

    def _connected(self, found: Plan, own: int) -> Connection:
        if self._connection is not None and found.group and found.group == self._self.group:
            return self._connection
        self._drop()
        self._self = replace(self._self, gone=0)
        store = self._store if own == 0 else _client(found.callers[0].store)
        rendezvous = Rendezvous(store, found.name, self._address)
        self._connection = Connection(range(len(found.callers)), own, None, rendezvous)
        self._self = replace(self._self, group=found.name, size=len(found.callers))
        return self._connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._self = replace(self._self, group="", size=0, gone=connection.lost_links())
            connection.close()

    def _note(self, found: Plan, is_average: bool) -> None:
        """It was made, by all."""
        now = time.monotonic()
        if self._is_behind(found):
            self._heard_seconds = max(leader.limit for leader in found.leaders)
            self._failure, self._averaged_at = "", None  # it was in no round of theirs
        if is_average:
            if self._averaged_at is not None:
                self._rounds.append(now - self._averaged_at)
            self._averaged_at = now
        self._met_at, self._plan = now, found
        peers = tuple(caller.worker for caller in found.callers)
        run_began = found.leaders[0].began or self._self.began or _moment(found.name)
        self._self = replace(
            self._self, calls=found.calls + 1, newest=found.name, peers=peers, gone=0, began=run_began, failures=0
        )

    def _is_well(self) -> bool:
        """Is the lighthouse to wait for this worker? Not if it should have called long ago."""
        if self._met_at is None:  # it may load its data for long, and nobody is to wait for that
            return self._calling
        return self._calling or time.monotonic() - self._met_at < self.limit_seconds

    def _patience(self, began: float) -> float:
        """How long one that called at ``began`` waits for the others: its own round tells of theirs, and schedules make
        rounds longer."""
        if self._given_seconds is not None or self._averaged_at is None:
            return self.limit_seconds
        return max(self.limit_seconds, min(UNKNOWN_SECONDS, TIMES * (began - self._averaged_at)))

    def _tell(self, group: Group, behind: list[int], state: Mapping[str, Any]) -> None:
        words, numbers = parcel.packed(state)
        sizes = torch.tensor([len(words), len(numbers)])
        for rank in behind:
            for part in (sizes, words, numbers):
                group.do(lambda g, part=part, rank=rank: g.send([part], rank, 0))  # type: ignore[misc]

    def _listen(self, group: Group, source: int) -> dict[str, Any]:
        def heard(part: Tensor) -> Tensor:
            group.do(lambda g: g.recv([part], source, 0))
            return part

        num_words, num_bytes = heard(torch.empty(2, dtype=torch.int64)).tolist()
        words, numbers = (heard(torch.empty(size, dtype=torch.uint8)) for size in (num_words, num_bytes))
        return parcel.unpacked(words, numbers)


def _moment(name: str) -> float:
    """When the lighthouse brought a call together, by the call's name.

    >>> _moment("7.1763.500000000+")
    1763.5
    """
    _, seconds, nanos = name.rstrip("+").split(".")
    return int(seconds) + int(nanos) / 1e9


def _client(store: str) -> TCPStore:
    host, _, port = store.rpartition(":")
    with contextlib.suppress(RuntimeError, dist.DistError):
        return TCPStore(host, int(port), None, False, timedelta(seconds=CONNECT_SECONDS), wait_for_workers=False)
    raise PeerError(f"the store at {store} does not answer")
