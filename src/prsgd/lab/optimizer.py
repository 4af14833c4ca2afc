"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parameter import Parameter

from prsgd.lab.config import Config
from prsgd.lab.recipe import ADAM_BETA2


def optimizer_of(config: Config, parameters: Iterable[Parameter], lr: float) -> torch.optim.Optimizer:
    """One for all ``parameters``, as ``config`` (resolved) has it.

    AdamW leaves vectors, which are biases and what norms multiply with, without weight decay, as is usual.
    """
    assert config.momentum is not None
    assert config.weight_decay is not None
    decay = config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=decay, foreach=True)
    found = list(parameters)
    groups = [
        {"params": [p for p in found if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in found if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=(config.momentum, ADAM_BETA2), foreach=True)
