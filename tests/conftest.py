"""One thread, as in the spawned ranks: the order of a sum depends on it."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
