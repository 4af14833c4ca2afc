"""CIFAR-10 (Krizhevsky 2009): 60,000 colour images 32x32 in 10 classes, and ResNet-20, as in the paper's experiment."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from prsgd.data import datasets
from prsgd.tasks.base import Data, Task
from prsgd.tasks.resnet import resnet

MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""Of the training images' channels."""


def load() -> Data:
    """Images (n, 3, 32, 32) as bytes, labels (n,); fetched on first use."""
    parts = datasets.load("cifar10")
    train_x, train_y, test_x, test_y = (parts[part] for part in datasets.PARTS)
    return Data(train_x, train_y, test_x, test_y)


def prepare(images: Tensor) -> Tensor:
    """Bytes to numbers with mean 0 and deviation 1 in each channel."""
    mean, std = (torch.tensor(v, device=images.device).view(3, 1, 1) for v in (MEAN, STD))
    return images.float().div_(255).sub_(mean).div_(std)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """A random window of each image with a black margin of an eighth (4 of 32), of its size, mirrored half of the time.

    >>> images = torch.arange(2 * 3 * 32 * 32, dtype=torch.uint8).view(2, 3, 32, 32)
    >>> crop_and_flip(images, torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    n, _, height, width = images.shape
    margin = height // 8
    framed = pad(images, (margin,) * 4)
    top, left = torch.randint(2 * margin + 1, (2, n, 1), generator=generator).to(images.device)
    mirrored = torch.rand(n, 1, generator=generator).to(images.device) < 0.5
    across = torch.arange(width, device=images.device).expand(n, -1)
    rows = top + torch.arange(height, device=images.device)
    columns = left + torch.where(mirrored, across.flip(1), across)
    which = torch.arange(n, device=images.device).view(n, 1, 1)
    return framed.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


TASK = Task(
    name="cifar10",
    summary="colour images 32x32, fetched: 50,000 train, 10,000 test",
    models={"resnet20": resnet},
    load=load,
    prepare=prepare,
    augment=crop_and_flip,
    defaults={"batch_size": 32, "epochs": 10},
)
