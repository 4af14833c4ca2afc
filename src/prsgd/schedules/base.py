"""When to average, and at which learning rate.

A schedule is a value. Before each round the loop asks it, for each worker, how long the round lasts.
The names are lower case because users read them as words: ``LocalSGD(..., schedule=every(8))``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from prsgd._check import positive, whole_number
from prsgd.records import Record


@dataclass(frozen=True)
class Now:
    """What a schedule knows when a round opens.

    >>> import prsgd
    >>> prsgd.growing().open(Now(worker=0, num_workers=2, round=27, step=40, lr=0.1, last=None)).steps  # 27^(1/3) / 2
    2
    """

    worker: int
    num_workers: int
    round: int
    """The round that opens, counted from 1."""
    step: int
    """Steps this worker has taken so far."""
    lr: float
    last: Record | None
    """The newest complete record: that of the average before the last one."""
    learned: Mapping[str, float] = field(default_factory=dict)
    """What a schedule that ``Learns`` has made of the records so far."""


@dataclass(frozen=True)
class Round:
    """A round to come: it closes after ``steps`` or ``seconds``, whichever is first; neither: when the run ends.

    ``lr`` None leaves the learning rate to the user.

    >>> Round(steps=8), Round(seconds=0.5)
    (Round(steps=8, seconds=None, lr=None), Round(steps=None, seconds=0.5, lr=None))
    """

    steps: int | None = None
    seconds: float | None = None
    lr: float | None = None
    reason: str = field(default="", repr=False)
    """Why it is longer or shorter than the one before; for the record of its average."""

    def __post_init__(self) -> None:
        if self.steps is not None:
            object.__setattr__(self, "steps", whole_number("Round.steps", self.steps, at_least=1))
        if self.seconds is not None:
            positive("Round.seconds", self.seconds)
        if self.lr is not None:
            positive("Round.lr", self.lr)


@runtime_checkable
class Schedule(Protocol):
    """When to average: any object with these two methods.

    >>> class Alternating:
    ...     def open(self, now):
    ...         return Round(steps=2 if now.round % 2 else 6)
    ...     def check(self, num_workers, overlap):
    ...         if overlap > 2:
    ...             raise ValueError(f"overlap must be at most 2, got {overlap}")
    >>> import torch, prsgd
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with prsgd.LocalSGD(model, optimizer, schedule=Alternating()) as local:
    ...     for _ in range(16):
    ...         optimizer.zero_grad()
    ...         model(torch.ones(1, 1)).sum().backward()
    ...         optimizer.step()
    >>> [record.step for record in local.records]
    [2, 8, 10, 16]
    """

    def open(self, now: Now) -> Round:
        """How long the round ``now.round`` of worker ``now.worker`` lasts."""
        ...

    def check(self, num_workers: int, overlap: int) -> None:
        """Raise a ValueError if this schedule cannot serve so many workers or such an overlap."""
        ...


class ByClock(Schedule):
    """A schedule whose rounds last so many seconds: workers may have different numbers of steps, and of averages."""


class SharesSpeed(Schedule):
    """A schedule that must know every worker's seconds a step: the averages' headers carry them."""


OWN_MOMENTUM = "own_momentum"


class Learns(Schedule):
    """A schedule that goes by what happened: how far the workers drift apart, and how much their gradients scatter.

    The averages' headers carry both numbers, and every process shows every record to ``learn``, also one whose workers
    have run out of data, so that all workers' rounds stay alike. For that ``learn`` may go by ``round``, ``workers``,
    ``drift``, ``loss``, ``samples``, ``noise``, ``momentum`` and ``lr`` (the workers' mean at that average), which are
    the same in every process; ``step``, ``period`` and ``overlap`` are a process's own, and 0 where its workers had no
    data. In the beginning ``own_momentum`` is known: 1 if workers keep theirs at an average, else 0; unless the
    averaging lets workers start apart or count differently.
    """

    def learn(self, learned: Mapping[str, float], record: Record, lr: float) -> Mapping[str, float]:
        """What is to be known when later rounds open, from what was known and a record that is complete now.

        ``lr`` is the mean of all workers' at the newest average, which is the one after that of the record.
        """
        return learned

    def cut_short(self, learned: Mapping[str, float], round: int) -> Mapping[str, float]:
        """The same when an epoch has ended, by an average that cut this round short: its record is not shown."""
        return learned
