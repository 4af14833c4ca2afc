"""What one worker logs in one round."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Tally:
    """What one worker logged in one round. The loss stays a tensor until an average asks: logging never waits."""

    loss: float | Tensor = 0.0
    losses: int | Tensor = 0
    samples: int = 0

    def add(self, loss: float | Tensor | None, samples: int) -> None:
        """A loss that is not finite is left out: it would spoil all workers' mean."""
        if isinstance(loss, Tensor):
            finite = loss.isfinite()
            self.loss = self.loss + torch.where(finite, loss, 0.0)
            self.losses = self.losses + finite
        elif loss is not None and math.isfinite(loss):
            self.loss = self.loss + float(loss)
            self.losses = self.losses + 1
        self.samples += samples
