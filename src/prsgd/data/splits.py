"""Who has which data: a common pool, equal random shares, or shares that differ by time or by class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from prsgd._check import nearest, positive


class Split(Protocol):
    """Deals the samples of an epoch out to the workers."""

    def deal(self, labels: Tensor, num_workers: int, per_worker: int, *, seed: int, epoch: int) -> Tensor:
        """Indices (num_workers, per_worker), the same in every process."""
        ...

    def owned(self, labels: Tensor, num_workers: int, *, seed: int) -> list[Tensor] | None:
        """Each worker's samples, where that does not change from epoch to epoch; None: everybody sees everything."""
        ...


@dataclass(frozen=True)
class pool:  # noqa: N801 - a word in the user's sentence
    """All workers draw from one pool: each has a permutation of its own in each epoch.

    >>> one, other = pool().deal(torch.zeros(4), 2, 4, seed=0, epoch=1)
    >>> sorted(one.tolist()), sorted(other.tolist())  # in iid() nobody would see what another sees
    ([0, 1, 2, 3], [0, 1, 2, 3])
    """

    def deal(self, labels: Tensor, num_workers: int, per_worker: int, *, seed: int, epoch: int) -> Tensor:
        orders = [_permutation(len(labels), seed, epoch, 1 + worker) for worker in range(num_workers)]
        return torch.stack([order[:per_worker] for order in orders])

    def owned(self, labels: Tensor, num_workers: int, *, seed: int) -> list[Tensor] | None:
        return None


@dataclass(frozen=True)
class iid:  # noqa: N801
    """Equal shares, drawn anew in each epoch by one permutation that all workers share: every sample is seen once.

    >>> shares = iid().deal(torch.zeros(10), 2, 5, seed=0, epoch=1)
    >>> shares.shape, sorted(shares.flatten().tolist())
    (torch.Size([2, 5]), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def deal(self, labels: Tensor, num_workers: int, per_worker: int, *, seed: int, epoch: int) -> Tensor:
        return _permutation(len(labels), seed, epoch)[: num_workers * per_worker].view(num_workers, per_worker)

    def owned(self, labels: Tensor, num_workers: int, *, seed: int) -> list[Tensor] | None:
        return None


@dataclass(frozen=True)
class era:  # noqa: N801
    """Equal shares for good of samples that stand in the order of time: each worker has an era of its own.

    A worker goes through its own share again and again, in a new order each time.

    >>> [share.tolist() for share in era().owned(torch.zeros(7), 3, seed=0)]
    [[0, 1], [2, 3], [4, 5]]
    """

    def deal(self, labels: Tensor, num_workers: int, per_worker: int, *, seed: int, epoch: int) -> Tensor:
        return _in_turns(self.owned(labels, num_workers, seed=seed), per_worker, seed=seed, epoch=epoch)

    def owned(self, labels: Tensor, num_workers: int, *, seed: int) -> list[Tensor]:
        if len(labels) < num_workers:
            raise ValueError(f"workers must be at most the number of samples {len(labels)}, got {num_workers}")
        share = len(labels) // num_workers
        return [torch.arange(share * worker, share * (worker + 1)) for worker in range(num_workers)]


@dataclass(frozen=True)
class dirichlet:  # noqa: N801
    """Equal shares for good, whose classes are mixed by Dirichlet(alpha): small alpha, few classes a worker.

    Each worker's mixture is drawn once, and its samples without replacement until they are gone (Hsu, Qi, Brown 2019).
    A worker goes through its own share again and again, in a new order each time.

    >>> labels = torch.arange(1000) % 10
    >>> shares = dirichlet(0.1).owned(labels, 4, seed=0)
    >>> [labels[share].bincount(minlength=10).tolist() for share in shares[:2]]  # how many of each class
    [[3, 0, 0, 0, 100, 6, 0, 0, 41, 100], [5, 0, 100, 0, 0, 0, 45, 100, 0, 0]]
    """

    alpha: float

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)

    def deal(self, labels: Tensor, num_workers: int, per_worker: int, *, seed: int, epoch: int) -> Tensor:
        return _in_turns(self.owned(labels, num_workers, seed=seed), per_worker, seed=seed, epoch=epoch)

    def owned(self, labels: Tensor, num_workers: int, *, seed: int) -> list[Tensor]:
        if labels.dim() != 1 or labels.is_floating_point():
            raise ValueError(
                f"a dirichlet split needs one class number per sample, got {labels.dtype}, shape {tuple(labels.shape)}"
            )
        if len(labels) < num_workers:
            raise ValueError(f"workers must be at most the number of samples {len(labels)}, got {num_workers}")
        random = np.random.default_rng([seed % 2**63, num_workers])
        found = labels.cpu().numpy()
        stacks = [random.permutation(np.flatnonzero(found == label)) for label in np.unique(found)]
        left = np.array([len(stack) for stack in stacks])
        share = len(found) // num_workers
        mixtures = random.dirichlet(np.full(len(stacks), self.alpha), size=num_workers)
        shares: list[list[np.ndarray]] = [[] for _ in range(num_workers)]
        missing = np.full(num_workers, share)
        while missing.any():
            for worker in np.flatnonzero(missing):
                weights = mixtures[worker] * (left > 0)
                if not weights.sum() > 0:  # its classes are gone: any that are left
                    weights = left.astype(float)
                wanted = np.minimum(random.multinomial(missing[worker], weights / weights.sum()), left)
                for label in np.flatnonzero(wanted):
                    shares[worker].append(stacks[label][left[label] - wanted[label] : left[label]])
                left -= wanted
                missing[worker] -= wanted.sum()
        return [torch.from_numpy(np.sort(np.concatenate(parts))) for parts in shares]


def parse(text: str) -> Split:
    """A split by its name: "pool", "iid", "era", or "dirichlet:0.3".

    >>> parse("dirichlet:0.3")
    dirichlet(alpha=0.3)
    """
    name, _, number = text.partition(":")
    if name == "dirichlet":
        try:
            alpha = float(number)
        except ValueError:
            raise ValueError(f'split must say how mixed the shares are, as in "dirichlet:0.5", got {text!r}') from None
        try:
            return dirichlet(alpha)
        except ValueError:
            raise ValueError(f"split must have a finite number > 0 after dirichlet:, got {text!r}") from None
    plain: dict[str, Split] = {"pool": pool(), "iid": iid(), "era": era()}
    if text in plain:
        return plain[text]
    hint = "" if name.startswith("non") else nearest(name, _NAMES)  # non-iid is not nearly iid
    raise ValueError(f"split must be pool, iid, era or dirichlet:ALPHA, got {text!r}{hint}")


_NAMES = ("pool", "iid", "era", "dirichlet")


def mixed(seed: int, *numbers: int) -> int:
    """A seed for a generator, from several numbers."""
    for number in numbers:
        seed = (1_000_003 * seed + number) % 2**63
    return seed


def _in_turns(shares: list[Tensor], per_worker: int, *, seed: int, epoch: int) -> Tensor:
    """Of an endless walk through each worker's share, in a new order at every turn, the part of this epoch."""
    rows = []
    for worker, share in enumerate(shares):
        begin = epoch * per_worker
        end = begin + per_worker
        turns = range(begin // len(share), math.ceil(end / len(share)))
        order = torch.cat([share[_permutation(len(share), seed, turn, 1 + worker)] for turn in turns])
        offset = begin - turns.start * len(share)
        rows.append(order[offset : offset + per_worker])
    return torch.stack(rows)


def _permutation(size: int, seed: int, *numbers: int) -> Tensor:
    """A permutation that depends on these numbers alone."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed(seed, *numbers)))
