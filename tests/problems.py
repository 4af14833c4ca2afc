"""Small problems that every test can train the same way, in one process or in several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import prsgd
from prsgd.clocks.base import Sent
from prsgd.clocks.wall import WallClock

CHANGING: dict[str, prsgd.Schedule] = {
    "growing": prsgd.growing(lr_scale=0.05),
    "post-local": prsgd.post_local(5, 3),
    "quadratic": prsgd.quadratic(0.4, 1),
    "auto": prsgd.auto(tolerance=40.0),
}
"""One of each kind of schedule whose rounds change: the suites that try all schedules take them from here."""


class Told(WallClock):
    """A clock by which transfers take so many steps, average by average and over and over; it is the same in every
    process, and of worker i all take i times ``late`` longer, as if it had launched so much earlier."""

    def __init__(self, transfers: Sequence[float], late: float = 0.25) -> None:
        super().__init__(range(1))
        self._transfers, self._late = transfers, late

    def check(self, num_workers: int, hosted: range) -> None:
        """Of these workers."""
        super().__init__(hosted)
        self._workers = hosted

    def arrived(self, sent: Sent, *, round: int, flight_seconds: float) -> list[float]:
        super().arrived(sent, round=round, flight_seconds=flight_seconds)
        return [self._transfers[(round - 1) % len(self._transfers)] + self._late * worker for worker in self._workers]

    def step_seconds(self, place: int) -> float:
        return 1.0


class Point(nn.Module):
    """A number x with the loss (x - b)^2 / 2, whose gradient is x - b: trajectories can be worked by hand."""

    def __init__(self, x: float = 0.0) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([x], dtype=torch.float64))

    def forward(self, b: float) -> Tensor:
        return ((self.x - b) ** 2).sum() / 2


def itself(output: Tensor, _: Any) -> Tensor:
    """The loss function of a model that returns its loss."""
    return output


def walk(
    targets: Sequence[float],
    *,
    schedule: prsgd.Schedule,
    steps: int,
    lr: float = 0.5,
    start: float = 0.0,
    momentum: float = 0.0,
    **options: Any,
) -> tuple[list[list[float]], prsgd.LocalSGD]:
    """Worker i pulls x towards targets[i]; returns all workers' x after each call of optimizer.step(), and the run."""
    fleet = prsgd.Fleet(Point(start), len(targets))
    optimizer = torch.optim.SGD(fleet.parameters(), lr=lr, momentum=momentum)
    path = []
    with prsgd.LocalSGD(fleet, optimizer, schedule=schedule, **options) as local:
        for _ in range(steps):
            optimizer.zero_grad()
            fleet.backward(itself, list(targets), list(targets))
            optimizer.step()
            path.append(fleet.rows[:, 0].tolist())
    path.append(fleet.rows[:, 0].tolist())
    return path, local


def model(kind: str = "mlp", dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers: list[nn.Module] = [nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
        if kind == "batchnorm":
            layers.insert(1, nn.BatchNorm1d(5))
        if kind == "dropout":
            layers.insert(2, nn.Dropout(0.5))
        return nn.Sequential(*layers).to(dtype)


def batch(worker: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Worker's data of a step: another distribution for each worker."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(4, 6, generator=generator, dtype=dtype) + worker / 4
    return x, torch.randint(3, (4,), generator=generator)


def take_step(
    fleet: prsgd.Fleet,
    optimizer: torch.optim.Optimizer,
    local: prsgd.LocalSGD,
    taken: dict[int, int],
    dtype: torch.dtype = torch.float64,
) -> tuple[int, ...]:
    """One step of those hosted workers that are not waiting; counts them in ``taken`` and returns them."""
    active = fleet.active
    pairs = [batch(w, taken[w], dtype) for w in fleet.workers]
    optimizer.zero_grad()
    losses = fleet.backward(
        nn.functional.cross_entropy, torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    )
    local.log(loss=losses, samples=[4 * (w in active) for w in fleet.workers])
    optimizer.step()
    for worker in active:
        taken[worker] += 1
    return active


def train_fleet(
    num_steps: Sequence[int],
    *,
    kind: str = "mlp",
    dtype: torch.dtype = torch.float64,
    lr: float = 0.2,
    momentum: float = 0.9,
    **options: Any,
) -> tuple[Tensor, prsgd.LocalSGD, prsgd.Fleet]:
    """Train len(num_steps) workers, those of them that live in this process, worker i for num_steps[i] steps."""
    fleet = prsgd.Fleet(model(kind, dtype), len(num_steps))
    optimizer = torch.optim.SGD(fleet.parameters(), lr=lr, momentum=momentum, weight_decay=0.01)
    taken = dict.fromkeys(fleet.workers, 0)
    with prsgd.LocalSGD(fleet, optimizer, **options) as local:
        for worker in fleet.workers:
            if num_steps[worker] == 0:
                fleet.stop(worker)
        while fleet.active:
            for worker in take_step(fleet, optimizer, local, taken, dtype):
                if taken[worker] == num_steps[worker]:
                    fleet.stop(worker)
    return fleet.rows.clone(), local, fleet


def train_model(
    worker: int,
    num_steps: int,
    *,
    kind: str = "mlp",
    dtype: torch.dtype = torch.float64,
    lr: float = 0.2,
    momentum: float = 0.9,
    **options: Any,
) -> tuple[Tensor, prsgd.LocalSGD, nn.Module]:
    """The same for one worker with a plain model."""
    net = model(kind, dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum, weight_decay=0.01)
    with prsgd.LocalSGD(net, optimizer, **options) as local:
        for step in range(num_steps):
            x, y = batch(worker, step, dtype)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(x), y)
            loss.backward()
            local.log(loss=loss, samples=4)
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), local, net
