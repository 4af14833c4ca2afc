"""Fashion-MNIST (Xiao, Rasul, Vollgraf 2017): 70,000 grey images 28x28 of clothes in 10 classes."""

from __future__ import annotations

from torch import Tensor, nn

from prsgd.data import datasets
from prsgd.tasks.base import Data, Task


def load() -> Data:
    """Images (n, 28, 28) as bytes, labels (n,)."""
    parts = datasets.load("fashion-mnist")
    train_x, train_y, test_x, test_y = (parts[part] for part in datasets.PARTS)
    return Data(train_x, train_y, test_x, test_y)


def prepare(images: Tensor) -> Tensor:
    """Bytes to numbers with about mean 0 and deviation 1: (n, 784)."""
    return images.flatten(1).float().div_(255).sub_(0.2860).div_(0.3530)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 10),
    )  # fmt: skip


TASK = Task(
    name="fashion-mnist",
    summary="grey images 28x28 of clothes, Debian's package: 60,000 train, 10,000 test",
    models={"mlp": mlp, "cnn": cnn},
    load=load,
    prepare=prepare,
    defaults={"batch_size": 32, "epochs": 10},
)
