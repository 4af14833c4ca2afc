"""The embedded digits: 1,797 real 8x8 images of handwritten digits, for examples that need no download.

Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0; see
``data/README.md``.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn

NUM_TRAIN = 1437
"""Images that train; the other 360 test."""
_SPLIT_SEED = 0


@dataclass(frozen=True, eq=False)
class Digits:
    """Pixels (n, 64) in [0, 1] as float32, and labels (n,) from 0 to 9 as int64."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


def load() -> Digits:
    """The images, shuffled and split the same way every time.

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
    return Digits(x[:NUM_TRAIN], y[:NUM_TRAIN], x[NUM_TRAIN:], y[NUM_TRAIN:])


def mlp() -> nn.Sequential:
    """A perceptron 64-64-10, for ``torch.nn.functional.cross_entropy``.

    >>> sum(p.numel() for p in mlp().parameters())
    4810
    """
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
