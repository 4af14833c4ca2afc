"""How to combine: the seam between the loop and a way of averaging.

Every averaging answers one question: given the hosted workers' snapshots, to which *target* does each worker move?
The loop then does ``x_i += target_i - snap_i``. An averaging is a value; what it remembers from average to average is
``Memory``, which the loop keeps, saves, and hands to every launch. How a run ends, how workers that are done answer,
and how a model that is not finite is replaced is the loop's business: no averaging knows of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from prsgd.averaging.weights import Brought
from prsgd.comm.base import Communicator, Work
from prsgd.schedules.base import ByClock, Learns, Schedule, SharesSpeed

Memory = Mapping[str, Any]
"""What an averaging remembers: plain numbers and tensors by name."""
DIGIT = 4096
"""Whole numbers travel in digits of this base: sums of 4096 of them are exact in float32."""


class Sums(NamedTuple):
    """Small numbers that are summed over all workers with every average."""

    weight: float = 0.0
    workers: float = 0.0
    """Workers whose models count."""
    done: float = 0.0
    """Workers that have run out of data, and answer whatever the others do."""
    bad: float = 0.0
    """Workers whose models are not finite."""
    consensus: float = 0.0
    """Workers that called ``consensus()`` instead of averaging."""
    drift: float = 0.0
    """Of the last average: squared distances of the snapshots from it, and how many."""
    drifts: float = 0.0
    loss: float = 0.0
    """Of the last round: sum of the losses, and how many; samples."""
    losses: float = 0.0
    lr: float = 0.0
    """Of those that are not done, whose lr may have stopped where they did."""
    saved: float = 0.0
    """How often the running workers' states were saved since the last average."""
    mark: float = 0.0
    """Of the models that count: two numbers below ``DIGIT``, the same for models that are alike to the last bit and
    hardly ever for others. A process whose workers are not alike tells -1."""
    other_mark: float = 0.0
    samples: int = 0

    def mean_lr(self, num_workers: int) -> float:
        """Of those that are not done."""
        return self.lr / max(1.0, num_workers - self.done)

    def are_alike(self, own: Sums) -> bool:
        """Were the models that counted alike? These are the sums over all workers, ``own`` are this process's."""
        marks = (self.mark, own.mark), (self.other_mark, own.other_mark)
        known = own.workers > 0 and own.mark >= 0
        return known and all(total * own.workers == self.workers * mine for total, mine in marks)

    def packed(self) -> tuple[float, ...]:
        """As they travel: the samples, which can be more than float32 counts, in three digits."""
        rest, low = divmod(self.samples, DIGIT)
        high, middle = divmod(rest, DIGIT)
        return (*self[:-1], low, middle, high)

    @classmethod
    def unpacked(cls, numbers: Sequence[float]) -> Sums:
        """Back from sums of what was ``packed``."""
        *known, low, middle, high = numbers
        return cls._make([*known, round(low) + DIGIT * (round(middle) + DIGIT * round(high))])


SUMS_WIDTH = len(Sums._fields) + 2
"""How many numbers ``Sums.packed`` has."""
NOISE_WIDTH = 3
"""How many ``Header.noise`` has, where a schedule asks for it."""


@dataclass(frozen=True)
class Header:
    """What travels beside the hosted workers' parameter rows, and what an averaging needs to know of them.

    >>> none = torch.zeros(0)
    >>> header = Header(Sums(), exact=none, extras=none, counts=(True, True), steps=(4, 2), samples=(32, 16))
    >>> [(brought.worker, brought.steps) for brought in header.brought]
    [(0, 4), (1, 2)]
    """

    sums: Sums
    exact: Tensor
    """(K,): numbers of the hosted workers that are summed as they are: BatchNorm statistics and other buffers."""
    extras: Tensor
    """Numbers averaged as the models are, (n, E) as sent and (E,) as landed: optimizer state."""
    counts: tuple[bool, ...] = ()
    """Per hosted worker: does its model count? One with nothing new, or not finite, does not; its row is not read."""
    bad: tuple[bool, ...] = ()
    """Per hosted worker: is its model not finite?"""
    steps: tuple[int, ...] = ()
    """Per hosted worker: steps that no average has seen."""
    samples: tuple[int, ...] = ()
    """Per hosted worker: samples logged in the round."""
    flat: Tensor | None = None
    """Room for one collective: (P + E + tail,) with the dtype to sum in, reused by every average."""
    step_seconds: tuple[float, ...] = ()
    """By worker id, 0 where not hosted, as sent; of all workers as landed. Empty unless the schedule asks for them, or
    the overlap is to be chosen."""
    flights: tuple[float, ...] = ()
    """The same of the last average's seconds that steps have to hide; empty unless the overlap is to be chosen."""
    noise: tuple[float, ...] = ()
    """How much gradients scattered, summed over looks, the number of looks, and the momentum summed over them. Empty
    unless the schedule asks."""
    skipped: tuple[int, ...] = ()
    """Per hosted worker: steps that it skipped since the last average; empty unless it hears neighbours only."""

    workers: tuple[int, ...] = ()
    """Per hosted worker: its id."""
    losses: tuple[Callable[[], float | None], ...] = ()
    """Per hosted worker: asks for the mean loss of its round."""
    tells: tuple[float, ...] = ()
    """By worker id, 0 where not hosted, as sent; of all workers as landed. Empty unless the averaging ``tells``."""
    told: tuple[float, ...] = ()
    """What all told so with the average before, or what the averaging has kept of it."""
    changes: tuple[Callable[[], float | None], ...] = ()
    """Per hosted worker: asks how far its model is from where the workers last agreed."""
    whole_length: Callable[[float], float] = float
    """The length of a row of whole models, of that of the part of it that lies here; all processes of a worker ask."""

    @property
    def brought(self) -> list[Brought]:
        """What the hosted workers bring, for their weights."""
        n = len(self.counts)
        ids, losses, changes = (
            self.workers or range(n), self.losses or (_unknown,) * n, self.changes or (_unknown,) * n
        )  # fmt: skip
        each = zip(ids, self.steps, self.samples, losses, changes, self.counts)
        return [
            Brought(id, steps, samples, self.told, loss, change if counts else _unknown)
            for id, steps, samples, loss, change, counts in each
        ]

    def numbers(self) -> Tensor:
        """What the loop tells, to be summed as it is."""
        by_worker = (*self.step_seconds, *self.flights, *self.tells)
        return self.exact.new_tensor((*self.sums.packed(), *self.noise, *by_worker))

    def tail(self) -> Tensor:
        """All that is summed as it is: the numbers, and the buffers."""
        return torch.cat([self.numbers(), self.exact]) if self.exact.numel() else self.numbers()

    def weighing(self, weight: float) -> Header:
        """With the weight of all hosted workers together."""
        return _changed(self, sums=self.sums._replace(weight=weight))

    def landed(self, extras: Tensor, tail: Tensor, exact: Tensor | None = None) -> Header:
        """The header of all workers, from what came back; ``exact`` unless it is the rest of the tail."""
        widths = SUMS_WIDTH, len(self.noise), len(self.step_seconds), len(self.flights), len(self.tells)
        ends = list(accumulate(widths))
        numbers = tail[: ends[-1]].tolist()
        noise, step_seconds, flights, tells = (tuple(numbers[a:b]) for a, b in pairwise(ends))
        return _changed(
            self,
            extras=extras,
            sums=Sums.unpacked(numbers[: ends[0]]),
            noise=noise,
            step_seconds=step_seconds,
            flights=flights,
            tells=tells,
            exact=tail[ends[-1] :] if exact is None else exact,
        )


def _changed(header: Header, **fields: Any) -> Header:
    """``dataclasses.replace``, but for its time: every average does this twice, and there is nothing to check anew."""
    changed = object.__new__(Header)
    vars(changed).update(vars(header), **fields)
    return changed


def _unknown() -> None:
    return None


@dataclass(frozen=True)
class Landing:
    """An average that has arrived.

    >>> none = torch.zeros(0)
    >>> mean = Landing(torch.ones(3), Header(Sums(), exact=none, extras=none), bytes_sent=12)
    >>> replace(mean, target=2 * mean.target).target  # what an averaging may make of it
    tensor([2., 2., 2.])
    """

    target: Tensor | None
    """(P,) the same for all, or (n, P) for each hosted worker; None: nobody had anything new, stay."""
    header: Header
    bytes_sent: int
    """Per worker."""
    server_bytes_sent: int = 0
    """By a parameter server, where there is one."""
    hops: int = 0
    """Messages one after another that it took; 0: as many as a sum takes."""
    hears: tuple[tuple[int, ...], ...] | None = None
    """By hosted worker: those whose models it waited for; None: all."""
    copy_seconds: float = 0.0
    """Spent on making the target after it had arrived."""
    memory: Memory | None = None
    """What the averaging remembers from now on, if this average counts; None: what it did."""
    exact: Tensor | None = None
    """(P,) the weighted mean of all models that count, in full precision and known to every process; None: unless the
    loop asks for it by a sum of its own, at the end of a run and in ``consensus()``."""
    mean: Tensor | None = None
    """(P,) the same where only this process knows it. The drift is measured from either."""
    shared: bool = True
    """Did all hear of all? If not (gossip), no buffers are pooled, the header's last-round numbers are the hosted
    workers' own, and the records wait until all meet."""

    def beside(self, other: Landing | Work[Any]) -> Landing:
        """This one, with the bytes of another that was needed for it."""
        sent, by_server = self.bytes_sent + other.bytes_sent, self.server_bytes_sent + other.server_bytes_sent
        return replace(self, bytes_sent=sent, server_bytes_sent=by_server)


@dataclass(frozen=True)
class Setting:
    """What an averaging is asked to work with."""

    num_workers: int
    overlap: int = 0
    """1 where it is to be chosen: it is never 0 there."""
    optimizer_state: str = "keep"
    shares_speed: bool = False
    """Does the schedule need the seconds that every worker takes for a step?"""
    by_clock: bool = False
    """Do its rounds last so many seconds?"""
    learns: bool = False
    """Does the schedule need the workers' drift, and how much their gradients scatter?"""
    hides: bool = False
    """Is the overlap to be chosen so that it hides the transfer?"""
    elastic: bool = False
    """Do workers come and go?"""
    team: int = 1
    """How many processes are one worker."""
    has_shards: bool = False
    """Has each of them a part of the model?"""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        num_workers: int,
        overlap: int | Literal["auto"],
        optimizer_state: str,
        *,
        elastic: bool = False,
    ) -> Setting:
        """With what the schedule brings along."""
        return cls(
            num_workers,
            1 if overlap == "auto" else overlap,
            optimizer_state,
            shares_speed=isinstance(schedule, SharesSpeed),
            by_clock=isinstance(schedule, ByClock),
            learns=isinstance(schedule, Learns),
            hides=overlap == "auto",
            elastic=elastic,
        )

    def require(self, averaging: Averaging) -> None:
        """Raise a ValueError that says why the averaging cannot work with this setting."""
        averaging.check(self)
        if self.elastic and not averaging.is_one_sum:
            raise ValueError(
                f"where workers come and go an average must be one sum, made or not, and {averaging!r} is more than "
                "that: use mean() without a wire, outer() or easgd()"
            )
        if self.team > 1 and averaging.hears_neighbours_only:
            raise ValueError(
                f"with {averaging!r} a worker must be one process, since which steps it skipped is seen in its own "
                f"gradients, and this one is {self.team}: use mean(), outer() or easgd()"
            )
        if self.has_shards and not averaging.takes_shards:
            raise ValueError(
                f"{averaging!r} looks at whole models, and each process has a shard of one: use mean(), outer() or "
                "easgd() (an averaging of your own that treats every number by itself says so: takes_shards = True)"
            )
        if self.learns and not averaging.knows_drift:
            raise ValueError(
                "the schedule goes by the workers' drift, their distance from the mean of all models, and with "
                f"{averaging!r} no process knows that mean: use mean(), or a schedule such as every(8)"
            )


class Averaging(ABC):
    """How to combine the workers' models: a value, of which only ``launch`` must be written.

    Here each worker goes half of the way to the mean of those that count:

    >>> import prsgd
    >>> from prsgd.averaging.summed import summed
    >>> class HalfWay(prsgd.Averaging):
    ...     def launch(self, memory, comm, snap, header):
    ...         mean = summed(comm, snap, header, [float(counts) for counts in header.counts])
    ...         return prsgd.Then(mean, lambda found: self.half_way(snap, found))
    ...     def half_way(self, snap, found):
    ...         return found if found.target is None else replace(found, target=(snap + found.target) / 2)
    >>> fleet = prsgd.Fleet(torch.nn.Linear(1, 1, bias=False), 2)
    >>> optimizer = torch.optim.SGD(fleet.parameters(), lr=0.5)
    >>> with prsgd.LocalSGD(fleet, optimizer, schedule=prsgd.every(1), averaging=HalfWay()) as local:
    ...     losses = fleet.backward(lambda out, y: (out * y).sum(), torch.ones(2, 1, 1), torch.tensor([[1.0], [3.0]]))
    ...     optimizer.step()  # now they are 1 apart, and meet half-way
    ...     round(float((fleet.modules[0].weight - fleet.modules[1].weight).detach()), 6)
    0.5
    """

    hears_neighbours_only: ClassVar[bool] = False
    """Are its landings not ``shared``?"""

    def __repr__(self) -> str:  # in messages; that of a dataclass names its fields too
        return f"{type(self).__name__}()"

    @property
    def knows_drift(self) -> bool:
        """Do all processes learn the exact mean, from which the drift is measured?"""
        return not self.hears_neighbours_only

    @property
    def is_one_sum(self) -> bool:
        """Is one all-reduce all that it sends?"""
        return not self.hears_neighbours_only

    @property
    def takes_shards(self) -> bool:
        """Does it work on any part of the models as on the whole, so that each process can average its shards?"""
        return False

    @property
    def parts_evenly(self) -> bool:
        """Do all workers restart from one point and count alike, so that noise alone parts them all by as much?"""
        return False

    def check(self, setting: Setting) -> None:  # noqa: B027 - most work with everything
        """Raise a ValueError that says why it cannot work with this setting."""

    @property
    def tells(self) -> bool:
        """Has each worker a number to ``tell`` all others?"""
        return False

    def tell(self, brought: Brought) -> float:
        """A number that all workers know one average later, as ``header.told``."""
        return 0.0

    def hear(self, known: tuple[float, ...], told: tuple[float, ...]) -> tuple[float, ...]:
        """What ``header.told`` is next: ``told`` are the workers' numbers that travelled with an average, ``known`` is
        what it was until then."""
        return told

    def distrusts(self, brought: Brought) -> bool:
        """Are the worker's buffers to be left out of the average?"""
        return False

    def left_out(self, told: tuple[float, ...]) -> tuple[int, ...]:
        """The workers that were left out of the average with which ``told`` travelled: like one whose model is not
        finite they are given the mean and fresh optimizer state."""
        return ()

    def measure(self, memory: Memory, snap: Tensor) -> tuple[Callable[[], float | None], ...]:
        """Per hosted worker: asks how far its row of ``snap`` (n, P) is from where the workers last agreed; empty if
        that is not remembered."""
        return ()

    def init(self, point: Tensor, hosted: int) -> Memory:
        """What it remembers before the first average: all workers, ``hosted`` of them here, begin at ``point`` (P,)."""
        return {}

    def met(self, memory: Memory, point: Tensor) -> Memory:
        """What it remembers after all workers were put on the exact mean of their models, ``point`` (P,), which the
        loop does at the end of an epoch or a run: the next round starts there, wherever the last one led."""
        return memory

    def weigh(self, header: Header) -> Sequence[float]:
        """How much each hosted worker counts where the loop takes an exact mean (``consensus()``, the end of a run) and
        this averaging's ``Landing.exact`` is None; those of ``header.counts`` alike unless it says otherwise."""
        return [float(count) for count in header.counts]

    @abstractmethod
    def launch(self, memory: Memory, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        """Start an average of the snapshots ``snap`` (n, P), which are not to be changed, no more than ``memory``.

        Rows of workers that do not count (``header.counts``) are not to be read: they may not be finite. Most
        averagings begin with ``prsgd.averaging.summed.summed(comm, snap, header, weights)``, the weighted mean of the
        rows by one all-reduce, of which ``Then`` makes the landing: weights that depend on the models are computed
        here. Its target lies in a buffer that the next average reuses, so what is remembered of it is a clone.

        What it is to remember goes into ``Landing.memory``: the loop may drop it, since a worker that is done answers
        whatever the others do, and learns from the header that came back whether that was an average. After the average
        that ends an epoch or a run ``met`` is asked instead.
        """
