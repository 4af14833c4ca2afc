"""``consensus()``: the average of all workers in the first hosted module, and its worker's own model again after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from prsgd.comm.base import Missed
from prsgd.core.lanes import Lanes
from prsgd.replicas.host import Host


@dataclass(frozen=True)
class Shown:
    """The average of all workers, to be looked at."""

    model: nn.Module
    host: Host
    modes: Sequence[tuple[nn.Module, bool]]
    """Was each module training?"""
    parts: Sequence[Callable[[], None]]
    """Lane by lane, what gives the worker's own back."""

    def give_back(self) -> None:
        """The first hosted module is its worker's own again."""
        self.host.show_consensus(False)
        with torch.inference_mode(False), torch.no_grad():
            for own_again in self.parts:
                own_again()
        for module, training in self.modes:
            module.training = training


def look(lanes: Lanes, host: Host, gathered: Callable[[], None], come_in: Callable[[Mapping[str, Any]], None]) -> Shown:
    """All workers meet; ``gathered`` is called when they have. Where the others are past that, this one comes in again
    with what it is told: then its model is that of the average with which it does."""
    model = host.modules[0]
    modes = [(module, module.training) for module in model.modules()]
    # What is made here may outlive an inference mode in which the user looks.
    with torch.inference_mode(False), torch.no_grad():
        try:
            found = lanes.look()
        except Missed as missed:
            come_in(missed.state)
            found = []
        gathered()
        parts = [lane.show(landing) for lane, landing in found]
    host.show_consensus(True)
    return Shown(model, host, modes, parts)
