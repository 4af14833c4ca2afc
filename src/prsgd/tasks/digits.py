"""The embedded digits: 1,797 real 8x8 images of handwritten digits, for examples that need no download.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0; see
``data/README.md``.
"""

from __future__ import annotations

import gzip
from importlib.resources import files

import numpy as np
import torch
from torch import nn

from prsgd.tasks.base import Data, Task

NUM_TRAIN = 1437
"""Images that train; the other 360 test."""
_SPLIT_SEED = 0


def load() -> Data:
    """Pixels (n, 64) in [0, 1] and labels (n,) from 0 to 9, shuffled and split the same way every time.

    >>> digits = load()
    >>> digits.train_x.shape, digits.test_x.shape
    (torch.Size([1437, 64]), torch.Size([360, 64]))
    >>> digits.train_x.dtype, digits.train_y.dtype, float(digits.train_x.max())
    (torch.float32, torch.int64, 1.0)
    """
    packed = files("prsgd.tasks").joinpath("data/digits.csv.gz").read_bytes()
    rows = np.loadtxt(gzip.decompress(packed).decode("ascii").splitlines(), delimiter=",", dtype=np.int64)
    table = torch.from_numpy(rows)
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(_SPLIT_SEED))]
    x, y = table[:, :-1].float() / 16, table[:, -1].clone()
    return Data(x[:NUM_TRAIN], y[:NUM_TRAIN], x[NUM_TRAIN:], y[NUM_TRAIN:])


def mlp() -> nn.Sequential:
    """A perceptron 64-64-10, for ``torch.nn.functional.cross_entropy``.

    >>> sum(p.numel() for p in mlp().parameters())
    4810
    """
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Sequential:
    """Two small convolutions and a linear layer.

    >>> sum(p.numel() for p in cnn().parameters())
    3818
    """
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


TASK = Task(
    name="digits",
    summary="handwritten digits 8x8, embedded: 1,437 train, 360 test",
    models={"mlp": mlp, "cnn": cnn},
    load=load,
    defaults={"batch_size": 8, "epochs": 40},
)
