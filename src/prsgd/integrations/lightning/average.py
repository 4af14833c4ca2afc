"""What is seen of a run under Lightning's Trainer: the average of all workers, in validation and in checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from prsgd._warn import warn
from prsgd.core.local_sgd import LocalSGD
from prsgd.saving.random_numbers import random_state, restore_random_state

_KEY = "prsgd"
"""Of what is ours in a checkpoint."""


class ShowsAverage(DDPStrategy):
    """A strategy that shows and saves the average of all workers, and beside it each worker's own state."""

    def __init__(self, **of_ddp: Any) -> None:
        super().__init__(**of_ddp)
        self.local: LocalSGD | None = None
        """The run of the newest ``fit``; ``local.records`` has one entry for each average."""
        self._phase: Literal["none", "new", "running", "over"] = "none"
        self._meets, self._has_met = False, False
        """Do workers end an epoch by one more average? And have they, since the last batch?"""
        self._shown: ExitStack | None = None
        """Holds the average of all workers in the module, while there is validation."""
        self._resumed: Mapping[str, Any] | None = None
        """What is ours in the checkpoint from which ``fit`` goes on."""
        self._own: dict[str, Any] = {}
        """This worker's part of the checkpoint that is being made."""
        self._saved_as: dict[str, str] = {}

    def _meet(self) -> None:
        """Where workers' steps differ, let those that are ahead wait for all, by one more average."""
        if self._phase == "running" and self._meets and not self._has_met:
            assert self.local is not None
            with self.local.epoch():
                self._has_met = True

    # Looking

    def on_validation_start(self) -> None:
        if self._phase == "running":
            self._meet()
            self._show()

    def on_validation_end(self) -> None:
        self._hide()

    def _show(self) -> None:
        assert self.local is not None
        self._shown = ExitStack()
        self._shown.enter_context(self.local.consensus())

    def _hide(self) -> None:
        shown, self._shown = self._shown, None
        if shown is not None:
            shown.close()

    # Saving and loading

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of the average of all workers, for all of whom this is a collective while they train."""
        self._own = {}
        assert self.lightning_module is not None
        if self._phase not in ("running", "over") or self.lightning_module.trainer.interrupted:
            return super().lightning_module_state_dict()
        assert self.local is not None
        self._meet()
        looking, average = self._shown is not None, None
        if looking:
            average = self._copied_state()
            self._hide()
        self._own = {
            "state_dict": self._copied_state(),
            _KEY: {"worker": self.global_rank, "local": self.local.state_dict(), "random": random_state()},
        }
        if looking:
            self._show()
        elif self._phase == "running":
            with self.local.consensus():
                average = self._copied_state()
        return average or self._copied_state()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """The average in ``filepath``, and each worker's own beside it."""
        own, self._own = self._own, {}
        if not own or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        assert self.local is not None
        path = self.broadcast(str(filepath))  # a name with a metric in it may differ by worker
        self._saved_as[str(filepath)] = path
        with self.local.paused() if self._phase == "running" else nullcontext():
            state = {"num_workers": self.world_size, "local": own[_KEY]["local"]}
            super().save_checkpoint({**checkpoint, _KEY: state}, path, storage_options)
            own_path = _worker_path(path, self.global_rank)
            self.checkpoint_io.save_checkpoint({**checkpoint, **own}, own_path, storage_options=storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        path = self._saved_as.pop(str(filepath), str(filepath))
        self.checkpoint_io.remove_checkpoint(_worker_path(path, self.global_rank))
        folder = os.path.dirname(_worker_path(path, self.global_rank))
        if os.path.isdir(folder) and not os.listdir(folder):
            with suppress(OSError):  # another worker was first
                os.rmdir(folder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """To train on: this worker's own, if all workers have theirs; else the average."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        assert self.lightning_module is not None
        kept, self._resumed = checkpoint.pop(_KEY, None), None
        if kept is None or self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        path = _worker_path(os.path.realpath(checkpoint_path) if os.path.islink(checkpoint_path) else checkpoint_path,
                            self.global_rank)  # fmt: skip
        try:
            own = super().load_checkpoint(path, weights_only)
        except FileNotFoundError:
            own = None
        if self.reduce_boolean_decision(own is not None and kept["num_workers"] == self.world_size):
            assert own is not None
            self._resumed = own.pop(_KEY)
            return own
        self._resumed = kept
        why = f"it was saved by {kept['num_workers']} workers, here are {self.world_size}"
        if kept["num_workers"] == self.world_size:
            why = f"not all workers find theirs, such as {path}"
        if self.is_global_zero:
            warn(
                f"all workers go on from the average in {checkpoint_path} and worker 0's optimizer state: {why}",
                RuntimeWarning,
            )
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._resumed is not None and "worker" in self._resumed:
            restore_random_state(self._resumed["random"])

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Not after an error, when a checkpoint may be saved by one process: the others will never come."""
        module = self.lightning_module
        if module is None or module._trainer is None or not module.trainer.interrupted:
            super().barrier(*args, **kwargs)

    def _copied_state(self) -> dict[str, Any]:
        """What the module holds now, to be written later."""
        state = super().lightning_module_state_dict()
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.detach().to("cpu", copy=True)
        return state


def _worker_path(checkpoint_path: Any, rank: int) -> str:
    return f"{checkpoint_path}.workers/{rank}.ckpt"
