"""What random runs train."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.fuzz_scenario import Scenario
from tests.problems import model


class Tracker(nn.Module):
    """Buffers that are no BatchNorm's: one that follows the data, one that counts, one that stays; a frozen weight."""

    level: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, dtype=torch.float64), requires_grad=False)
        self.register_buffer("level", torch.zeros(6, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mask", torch.tensor([0.0, -float("inf")], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.level += 0.1 * (x.detach().mean(dim=0) - self.level)
            self.calls += 1
        return (x - self.level) * self.weight


def replica(kind: str) -> nn.Module:
    """A worker's model: the same weights every time."""
    return nn.Sequential(Tracker(), model("mlp")) if kind == "tracker" else model(kind)


def optimizers(scenario: Scenario, parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """In the order in which they step."""
    decay, sgd, adam = scenario.weight_decay, torch.optim.SGD, torch.optim.Adam
    if scenario.optimizer == "adam":
        return [adam(parameters, lr=0.02, weight_decay=decay)]
    if scenario.optimizer == "two":
        matrices, rest = ([p for p in parameters if (p.dim() > 1) == big] for big in (True, False))
        return [sgd(matrices, lr=0.2, momentum=0.9, weight_decay=decay), adam(rest, lr=0.02)]
    return [sgd(parameters, lr=0.2, momentum=0.9 if scenario.optimizer == "momentum" else 0.0, weight_decay=decay)]
