"""What a worker is told that joins a run others have begun, or comes back to it: what all workers know alike.

The others are at the launch of an average then. The worker hears the state before it from one of them, and the sum
itself, to which it has brought nothing; so it lands that average as the others do, and is where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prsgd.core.hooks import Hooks
from prsgd.core.lanes import Lanes
from prsgd.core.resuming import damage_named
from prsgd.core.start import difference, model_bytes, write_model_bytes
from prsgd.errors import CheckpointError, MismatchError
from prsgd.replicas.host import Host


class Newcomers:
    """Tells them, and is told. ``alike``: what must be the same on all workers, line by line."""

    def __init__(self, alike: Sequence[str], host: Host, lanes: Lanes, hooks: Hooks) -> None:
        self._alike, self._host, self._lanes, self._hooks = list(alike), host, lanes, hooks
        for lane in lanes:
            lane.averages.tell, lane.averages.hear = self.tell, self.hear

    def tell(self) -> Mapping[str, Any]:
        """Plain numbers, and tensors that nobody changes while they are sent."""
        return {
            "alike": self._alike,
            "model": model_bytes(self._host.modules[0]),
            "lrs": self._hooks.lrs(),
            "lanes": [lane.common() for lane in self._lanes],
        }

    def join(self, state: Mapping[str, Any]) -> None:
        """A worker begins where the others are, be it new or with a state of its own: a MismatchError if it is none of
        theirs."""
        theirs = list(state["alike"])
        if theirs != self._alike:
            raise MismatchError(difference("this worker", self._alike, "another", theirs))
        write_model_bytes(self._host.modules, state["model"])
        self._lanes.drop()
        for lane in self._lanes:
            for pace, account in zip(lane.paces, lane.averages.accounts):
                pace.snap, pace.round = None, None
                account.seen = account.pooled = pace.steps  # it brings none of its own
        self.hear(state)

    def hear(self, state: Mapping[str, Any]) -> None:
        """A worker that missed an average knows again what the others do; its model is its own until it lands."""
        try:
            with damage_named():
                self._hooks.set_lrs(state["lrs"])
                for lane, common in zip(self._lanes, state["lanes"], strict=True):
                    lane.take_over(common)
        except CheckpointError as error:
            raise MismatchError(f"what another worker told does not fit: {error}") from None
