"""The complete CIFAR-10 at 16x16 pixels, and ResNet-8: the paper's experiment at its full length on a CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from prsgd.tasks import cifar10
from prsgd.tasks.base import Data, Task
from prsgd.tasks.resnet import resnet


def halved(images: Tensor) -> Tensor:
    """Bytes (n, 3, h, w) to (n, 3, h/2, w/2): the mean of every 2x2 pixels, halves rounded up.

    >>> halved(torch.tensor([[[[1, 2], [3, 5]]]], dtype=torch.uint8)).tolist()
    [[[[3]]]]
    """
    wide = images.to(torch.int16)
    sums = wide[..., ::2, ::2] + wide[..., 1::2, ::2] + wide[..., ::2, 1::2] + wide[..., 1::2, 1::2]
    return ((sums + 2) // 4).to(torch.uint8)


def load() -> Data:
    """Images (n, 3, 16, 16) as bytes, labels (n,); CIFAR-10 is fetched on first use."""
    full = cifar10.load()
    return Data(halved(full.train_x), full.train_y, halved(full.test_x), full.test_y)


TASK = Task(
    name="cifar10-16px",
    summary="CIFAR-10 at 16x16, fetched: 50,000 train, 10,000 test",
    models={"resnet8": partial(resnet, 8, width=8), "resnet8-wide": partial(resnet, 8)},
    load=load,
    prepare=cifar10.prepare,
    augment=cifar10.crop_and_flip,
    defaults={"batch_size": 32, "epochs": 30},
)
