"""How to combine: the seam between the loop and a way of averaging.

Every averaging answers one question: given the hosted workers' snapshots, to which *target* does each worker move?
The loop then does ``x_i += target_i - snap_i``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from prsgd.comm.base import Communicator, Work


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
    samples: float = 0.0


@dataclass(frozen=True)
class Header:
    """What travels beside the hosted workers' parameter rows, and what an averaging needs to know of them."""

    sums: Sums
    exact: Tensor
    """(K,): numbers of the hosted workers that are summed as they are: BatchNorm statistics and other buffers."""
    extras: Tensor
    """Numbers averaged as the models are, (n, E) as sent and (E,) as landed: optimizer state."""
    counts: tuple[bool, ...] = ()
    """Per hosted worker: does its model count? One with nothing new, or not finite, does not (its row is zero)."""
    bad: tuple[bool, ...] = ()
    """Per hosted worker: is its model not finite?"""
    steps: tuple[int, ...] = ()
    """Per hosted worker: steps that no average has seen."""
    samples: tuple[int, ...] = ()
    """Per hosted worker: samples logged in the round."""
    flat: Tensor | None = None
    """Room for one collective: (P + E + tail,) with the dtype to sum in, reused by every average."""
    step_seconds: tuple[float, ...] = ()
    """By worker id, 0 where not hosted, as sent; of all workers as landed. Empty unless the schedule asks for them."""
    lr: float = 0.0
    """Of the workers' own optimizer, when this was launched."""

    def tail(self) -> Tensor:
        """What is summed as it is."""
        return torch.cat([self.exact.new_tensor((*self.sums, *self.step_seconds)), self.exact])

    def landed(self, extras: Tensor, tail: Tensor) -> Header:
        """The header of all workers, from what came back."""
        width = len(Sums._fields)
        known = width + len(self.step_seconds)
        numbers = tail[:known].tolist()
        sums, seconds = Sums(*numbers[:width]), tuple(numbers[width:])
        return replace(self, extras=extras, sums=sums, step_seconds=seconds, exact=tail[known:])


@dataclass(frozen=True)
class Landing:
    """An average that has arrived."""

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
    mean: Tensor | None = None
    """(P,) of all workers' models, where it is known and is not the target: what the drift is measured from."""
    knows_mean: bool = True
    """Is ``mean``, or else the target that all share, the mean of the models? If not, the drift is unknown."""
    shared: bool = True
    """Did all hear of all? If not (gossip), no buffers are pooled, the header's last-round numbers are the hosted
    workers' own, and the records wait until all meet."""


@dataclass(frozen=True)
class Setting:
    """What an averaging is asked to work with."""

    num_workers: int
    overlap: int = 0
    optimizer_state: str = "keep"
    shares_speed: bool = False
    """Does the schedule need the seconds that every worker takes for a step?"""
    by_clock: bool = False
    """Do its rounds last so many seconds?"""


@runtime_checkable
class Averaging(Protocol):
    """How to combine the workers' models.

    One that needs to know where all workers begin has a method ``start(point)`` besides, called before the first step;
    one that cannot work with everything has ``check(setting)``, which raises a ValueError that says why; one whose
    landings are not ``shared`` says so by ``hears_neighbours_only = True``.
    """

    def launch(self, comm: Communicator, snap: Tensor, header: Header) -> Work[Landing]:
        """Start an average of the snapshots ``snap`` (n, P), which are not to be changed; see ``Header.counts``."""
        ...

    def final(self, comm: Communicator, snap: Tensor, header: Header) -> Landing:
        """The exact mean of all workers: for ``consensus()``, and to end a run whose targets differ by worker.

        An average for which all workers are done (``sums.done``) ends the run, and is to be the exact mean too.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it remembers from average to average."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember ``state``."""
        ...
