"""Two lanes over two halves of a model, with rounds that are staggered: against a transcription by hand, in one process
and over gloo; uneven, looked at, and with an average of each lane under way at the same time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import prsgd
from prsgd.core.books import Books
from prsgd.core.lane import Lane, Run
from prsgd.core.lanes import Lanes
from prsgd.core.local_sgd import LocalSGD
from prsgd.replicas.buffers import Buffers
from prsgd.replicas.optimizer_state import OptimizerState
from tests.ranks import run_ranks

PERIOD, LR = 4, 0.25


@dataclass(frozen=True)
class Staggered(prsgd.Schedule):
    """``every(PERIOD)``, but for a first round of ``first`` steps."""

    first: int

    def open(self, now: prsgd.Now) -> prsgd.Round:
        return prsgd.Round(steps=self.first if now.round == 1 else PERIOD)

    def check(self, num_workers: int, overlap: int) -> None:
        """Any will do."""


class Halves(nn.Module):
    """Two numbers in each half; the gradient of ``half |x - target|^2`` is x - target."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.right = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def forward(self, target: Tensor) -> Tensor:
        return (torch.cat([self.left, self.right]) - target).square().sum() / 2


class TwoLanes(LocalSGD):
    """The same run as ever, but its model travels in two parts."""

    def __init__(self, model: Any, optimizer: Any, overlap: int) -> None:
        super().__init__(model, optimizer, schedule=prsgd.every(PERIOD), overlap=overlap, timeout_seconds=20)
        whole, host = self._lanes.first, self._host
        averages, n = whole.averages, len(whole.paces)
        run = Run(
            averages.comm, averages.averaging, prsgd.averaging.base.Setting(averages.comm.num_workers, overlap),
            averages.roll, averages.clock, self._hooks.lr, self._hooks.set_lr, self._hooks.check, 20.0, 20.0,
        )  # fmt: skip
        lanes = []
        for name, first in (("right", PERIOD // 2), ("left", PERIOD)):
            rows = host.rows.part([name])
            state = OptimizerState([optimizer], rows.workers, mode="keep")
            buffers = Buffers([nn.Module() for _ in range(n)], self.comm.workers, self.comm.num_workers)
            books = self._books if name == "right" else Books(n, None, speaks=False)
            lanes.append(Lane(run, Staggered(first), rows, state, buffers, books))
        self._lanes = Lanes(lanes)


def target(worker: int, step: int) -> Tensor:
    return torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64) * (worker + 1) + 0.125 * step


def by_hand(workers: int, overlap: int, num_steps: int) -> list[Tensor]:
    """Algorithm 1 with each half on its own: the left lands at 4, 8, ..., the right at 2, 6, ..."""
    x = [torch.zeros(4, dtype=torch.float64) for _ in range(workers)]
    halves = {"left": (slice(0, 2), PERIOD), "right": (slice(2, 4), PERIOD // 2)}
    snaps: dict[str, list[Tensor]] = {}
    path = []
    for step in range(1, num_steps + 1):
        gradients = [x[i] - target(i, step) for i in range(workers)]
        for name, (part, first) in halves.items():
            if overlap and (step - first) % PERIOD == 0 and step >= first and name in snaps:
                snap = snaps.pop(name)
                mean = torch.stack(snap).sum(dim=0) / workers
                for i in range(workers):
                    # Nothing has moved it since where it was taken just before: the mean itself is written.
                    x[i][part] = mean if overlap == 1 else x[i][part] + (mean - snap[i])
        x = [x[i].add(gradients[i], alpha=-LR) for i in range(workers)]
        for name, (part, first) in halves.items():
            if (step + overlap - first) % PERIOD == 0 and step + overlap >= first:
                snap = [x[i][part].clone() for i in range(workers)]
                if overlap:
                    snaps[name] = snap
                else:
                    for i in range(workers):
                        x[i][part] = torch.stack(snap).sum(dim=0) / workers
        path.append(torch.stack(x))
    return path


def walked(hosted: Any, workers: range, overlap: int, num_steps: int, looks: bool = False) -> tuple[Tensor, Tensor]:
    optimizer = torch.optim.SGD(hosted.parameters(), lr=LR)
    modules: list[Any] = list(hosted.modules) if isinstance(hosted, prsgd.Fleet) else [hosted]
    path, most = [], 0
    with TwoLanes(hosted, optimizer, overlap) as local:
        for step in range(1, num_steps + 1):
            optimizer.zero_grad()
            for worker, module in zip(workers, modules):
                module(target(worker, step)).backward()
            optimizer.step()
            most = max(most, sum(lane.loop.average is not None for lane in local._lanes))
            path.append(torch.stack([torch.cat([m.left, m.right]).detach() for m in modules]))
            if looks:
                with local.consensus() as averaged:
                    assert averaged is modules[0]
    assert most == (2 if overlap == 3 else 1 if overlap else 0)
    return torch.stack(path), torch.stack([torch.cat([m.left, m.right]).detach() for m in modules])


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
def test_in_one_process(overlap: int, looks: bool) -> None:
    expected = by_hand(3, overlap, 13)
    path, last = walked(prsgd.Fleet(Halves(), 3, mode="loop"), range(3), overlap, 13, looks)
    torch.testing.assert_close(path, torch.stack(expected), rtol=0, atol=1e-14)
    torch.testing.assert_close(last, expected[-1].mean(dim=0).expand(3, -1), rtol=0, atol=1e-13)
    assert torch.equal(last[0], last[1])
    assert torch.equal(last[0], last[2])


def a_rank(rank: int, lengths: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    return [walked(Halves(), range(rank, rank + 1), overlap, lengths[rank]) for overlap in (0, 1, 2, 3)]


def test_over_gloo() -> None:
    one, other = run_ranks(a_rank, 2, (13, 13))
    for overlap in (0, 1, 2, 3):
        expected = torch.stack(by_hand(2, overlap, 13))
        path = torch.cat([one[overlap][0], other[overlap][0]], dim=1)
        torch.testing.assert_close(path, expected, rtol=0, atol=1e-14)
        assert torch.equal(one[overlap][1], other[overlap][1])


def test_uneven_over_gloo() -> None:
    """A worker that is done answers each lane in its turn, until all are done on both."""
    one, other = run_ranks(a_rank, 2, (4, 13))
    for overlap in (0, 1, 2, 3):
        assert torch.equal(one[overlap][1], other[overlap][1])
        assert bool(one[overlap][1].isfinite().all())


def test_parts_of_a_fleets_rows_follow_each_other() -> None:
    fleet = prsgd.Fleet(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), 2)
    local = prsgd.LocalSGD(fleet, torch.optim.SGD(fleet.parameters(), lr=0.1), schedule=prsgd.every(2))
    rows = local._host.rows
    assert torch.equal(rows.part(["0.bias", "1.weight"]).matrix, fleet.rows[:, 4:8])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names must follow each other in the model"):
        rows.part(["0.weight", "1.weight"])
