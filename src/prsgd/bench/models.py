"""What the contestants train: a model, one batch for each rank, a loss. What they learn does not matter here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from prsgd.tasks.gpt import GPT
from prsgd.tasks.resnet import resnet


@dataclass(frozen=True)
class Model:
    """One row of the table of models."""

    summary: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Work:
    """One rank's share: all ranks have the same model, and each its own batch."""

    model: nn.Module
    x: Tensor
    y: Tensor

    def loss(self, model: nn.Module | None = None) -> Tensor:
        """Of the model, or of what it was wrapped in."""
        outputs: Tensor = (self.model if model is None else model)(self.x)
        return functional.cross_entropy(outputs.flatten(0, -2), self.y.flatten())


def perceptron(inputs: int, *widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers[:-1])


def _vectors(inputs: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randn(32, inputs), torch.randint(10, (32,)))


MODELS = {
    "mlp": Model("784-128-10, 0.1M parameters, batch 32", lambda: perceptron(784, 128, 10), _vectors(784)),
    "resnet20": Model(
        "ResNet-20, 0.27M parameters, 32x32, batch 32",
        lambda: resnet(20),
        lambda: (torch.randn(32, 3, 32, 32), torch.randint(10, (32,))),
    ),
    "gpt": Model(
        "a GPT of 10M parameters, 4 sequences of 128 bytes",
        lambda: GPT(layers=6, width=384, heads=6, context=128),
        lambda: (torch.randint(256, (4, 128)), torch.randint(256, (4, 128))),
    ),
    "mlp-25m": Model(
        "784-3350-3350-3350-10, 25M parameters, batch 32",
        lambda: perceptron(784, 3350, 3350, 3350, 10),
        _vectors(784),
    ),
}


def work(name: str, rank: int) -> Work:
    """``rank``'s share of training the model of that name."""
    torch.manual_seed(0)
    model = MODELS[name].make()
    torch.manual_seed(rank)
    return Work(model, *MODELS[name].batch())
