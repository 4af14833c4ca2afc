"""What the contestants train: models of several sizes on one batch each, where only the time matters, and the lab's
tasks, where it matters what they learn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, repeat

import torch
from torch import Tensor, nn
from torch.nn import functional

from prsgd import tasks
from prsgd._check import one_of
from prsgd.lab import feed
from prsgd.lab.config import Config
from prsgd.metrics import ACCURACY
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
    """One rank's share: all ranks begin with the same model, and each has its own batches."""

    model: nn.Module
    batches: Iterator[tuple[Tensor, Tensor]]
    lr: float
    accuracy: Callable[[nn.Module], tuple[int, int]] | None = None
    """Right answers of a model on this rank's share of the test samples, and how many those are."""

    def loss(self, model: nn.Module | None = None) -> Tensor:
        """On the next batch, of the model or of what it was wrapped in."""
        x, y = next(self.batches)
        outputs: Tensor = (self.model if model is None else model)(x)
        return functional.cross_entropy(outputs.flatten(0, -2), y.flatten().long())


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


def work(name: str, rank: int, ranks: int = 1, seed: int = 0, lr: float = 0.01) -> Work:
    """``rank``'s share of training the model of that name, or the TASK/MODEL of the lab."""
    if "/" in name:
        return _of_task(*name.split("/"), rank=rank, ranks=ranks, seed=seed, lr=lr)
    torch.manual_seed(seed)
    model = MODELS[name].make()
    torch.manual_seed(1000 + rank)
    return Work(model, repeat(MODELS[name].batch()), lr)


def check(name: str) -> str:
    """Raise a ValueError unless there is such a model."""
    if "/" not in name:
        return one_of("models", name, MODELS)
    task, model = name.split("/", 1)
    one_of("the task's models", model, tasks.find(task).models)
    if tasks.find(task).metric is not ACCURACY:
        raise ValueError(f"models must be of a task with an accuracy, got {name!r}")
    return name


def _of_task(name: str, model: str, *, rank: int, ranks: int, seed: int, lr: float) -> Work:
    config = Config(task=name, model=model, workers=ranks, seed=seed).resolve()
    task, data = tasks.find(name), feed.load(config)
    torch.manual_seed(seed)
    made = task.models[model]()
    mine = range(rank, rank + 1)
    dealt = feed.Feed(config, task, data, feed.deal(config, data, mine), mine)
    batches = (dealt.batch([step]) for step in count())
    test_x, test_y = data.test_x[rank::ranks], data.test_y[rank::ranks]

    @torch.no_grad()
    def accuracy(model: nn.Module) -> tuple[int, int]:
        model.eval()
        parts = zip(test_x.split(500), test_y.split(500))
        right = sum(int((model(task.prepare(x)).argmax(-1) == y).sum()) for x, y in parts)
        model.train()
        return right, len(test_y)

    return Work(made, ((x[0], y[0]) for x, y in batches), lr, accuracy)
