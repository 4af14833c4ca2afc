"""What a process hosts: the user's own model, which is one worker, a fleet of several, or a shard of one worker's model
(``sharded.py``). The loop asks, and never knows which it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

from torch import nn

from prsgd.comm.team import Lone, Team
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.names import bare
from prsgd.replicas.rows import Rows, trainable


class Host(Protocol):
    """The hosted workers, by place."""

    modules: Sequence[nn.Module]
    rows: Rows
    """Their parameters that train."""
    team: Team
    """The processes that are a hosted worker together: mostly this one alone."""
    lies_in_rows: bool
    """Do rows travel as they lie in memory, so that the layout must be the same everywhere?"""

    @property
    def stopped(self) -> Set[int]:
        """The ids of those that were said to have run out of data."""
        ...

    def takes_part(self, i: int) -> bool:
        """Is worker i in this optimizer.step(), if it may step at all?"""
        ...

    def skip(self, i: int) -> None:
        """Let the optimizer pass over worker i: a zero gradient would still move momentum and weight decay."""
        ...

    def show_waiting(self, ids: Set[int]) -> None:
        """These wait for others of this process."""
        ...

    def check(self) -> None:
        """Raise an error if the parameters are no longer where they were."""
        ...

    def hold(self, on_stop: Callable[[], None]) -> None:
        """A run begins; ``on_stop`` is called when a worker is said to have run out of data."""
        ...

    def reopen(self) -> None:
        """All workers have data again."""
        ...

    def show_consensus(self, shown: bool) -> None:
        """The first module holds the average of all workers, or its own model again."""
        ...

    def release(self) -> None:
        """The run is over."""
        ...


class OwnModel(Host):
    """The user's module, its tensors left where they are: one worker, for which every optimizer.step() is a step."""

    lies_in_rows = False

    def __init__(self, model: nn.Module, team: Team | None = None) -> None:
        self.modules, self.rows, self.team = (model,), Rows([trainable(bare(model))], None), team or Lone()

    @property
    def stopped(self) -> Set[int]:
        return frozenset()

    def takes_part(self, i: int) -> bool:
        return True

    def skip(self, i: int) -> None:
        self.rows.forget_gradient(i)

    def show_waiting(self, ids: Set[int]) -> None:
        """A lone worker waits inside its step, so there is nobody to show."""

    def check(self) -> None:
        self.rows.refresh()

    def hold(self, on_stop: Callable[[], None]) -> None:
        """Its data end when the run does."""

    def reopen(self) -> None:
        """Nothing was stopped."""

    def show_consensus(self, shown: bool) -> None:
        """The user knows, and may well save it."""

    def release(self) -> None:
        """The run is over."""
        self.team.close()


class WholeFleet(Host):
    """The workers of a ``Fleet`` that live in this process."""

    lies_in_rows = True

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self.modules, self.team = fleet, fleet.modules, Lone()
        self.rows = Rows([fleet.named_parameters(worker) for worker in fleet.workers], fleet.rows)

    @property
    def stopped(self) -> Set[int]:
        return self._fleet.stopped

    def takes_part(self, i: int) -> bool:
        return any(p.grad is not None for p in self.rows.workers[i].values())

    def skip(self, i: int) -> None:
        self.rows.forget_gradient(i)

    def show_waiting(self, ids: Set[int]) -> None:
        self._fleet.idle = set(ids)

    def check(self) -> None:
        self._fleet.check_rows()

    def hold(self, on_stop: Callable[[], None]) -> None:
        self._fleet.on_stop = on_stop

    def reopen(self) -> None:
        self._fleet.stopped = set()

    def show_consensus(self, shown: bool) -> None:
        self._fleet.shows_consensus = shown

    def release(self) -> None:
        self._fleet.on_stop, self._fleet.idle, self._fleet.stopped = None, set(), set()
