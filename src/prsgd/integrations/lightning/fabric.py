"""Fabric, whose loop is the user's own: its launcher and samplers without a wrapper around the model."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

_TIMEOUT = timedelta(seconds=1800)
"""Lightning's own, for its collectives."""


class FabricStrategy(DDPStrategy):
    """Launcher and samplers of Fabric's ``DDPStrategy`` without its wrapper, for a loop with ``prsgd.LocalSGD`` in it.

        fabric = Fabric(devices=2, strategy=FabricStrategy())
        model, optimizer = fabric.setup(model, optimizer)
        with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(8)) as local:
            for x, y in fabric.setup_dataloaders(loader):
                optimizer.zero_grad()
                fabric.backward(loss_fn(model(x), y))
                optimizer.step()

    Its arguments are those of ``DDPStrategy`` that do not concern the wrapper.
    """

    def __init__(
        self,
        *,
        accelerator: Any | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Any | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._backward_sync_control = _NothingToSync()

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]  # that is the point
        return module


class _NothingToSync(_BackwardSyncControl):
    """``fabric.no_backward_sync``: there is no exchange of gradients to be held back."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()
