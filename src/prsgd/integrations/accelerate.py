"""accelerate 1: ``LocalSGD`` in the place of ``accelerate.local_sgd.LocalSGD``.

    from prsgd.integrations.accelerate import LocalSGD

    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        for batch in train_dataloader:
            with accelerator.accumulate(model):
                ...
                optimizer.step()
                local_sgd.step()

What differs is told in docs/integrations/accelerate.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

from torch import nn

from prsgd.averaging.base import Averaging
from prsgd.averaging.wires.base import Wire
from prsgd.comm.joining import current
from prsgd.core import local_sgd as core
from prsgd.core.start import host_of, refuse_flat
from prsgd.integrations import require, require_schedule
from prsgd.records import Record
from prsgd.replicas.optimizers import unwrapped
from prsgd.schedules.base import Schedule
from prsgd.schedules.fixed import every

require("accelerate", at_least="1.10", below="2")

from accelerate import Accelerator, DistributedType

__all__ = ["LocalSGD"]

_SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


class LocalSGD:
    """Local SGD over the processes of an ``Accelerator``: each trains by itself, and all average now and then.

    ``accelerator``, ``model``, ``local_sgd_steps`` and ``enabled`` are those of ``accelerate.local_sgd.LocalSGD``;
    ``local_sgd_steps`` may be a schedule, too. The rest are the arguments of ``prsgd.LocalSGD``, which is ``.local``
    inside the block. The optimizers are those that ``accelerator.prepare`` was given for the model. A step is an
    ``optimizer.step()`` that ran, so ``step()`` has nothing to do.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, overlap=1) as local_sgd:
            for inputs, labels in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(model(inputs), labels))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        local_sgd_steps: int | Schedule,
        enabled: bool = True,
        *,
        averaging: Averaging | Wire | None = None,
        overlap: int | Literal["auto"] = 0,
        optimizer_state: str | Mapping[str, int] = "keep",
        timeout_seconds: float | None = None,
        done_timeout_seconds: float = 3600.0,
        on_record: Callable[[Record], None] | None = None,
    ) -> None:
        self.local: core.LocalSGD | None = None
        """Inside the block and after it; None where nothing is averaged."""
        if not isinstance(accelerator, Accelerator):
            raise ValueError(f"accelerator must be an accelerate.Accelerator, got {type(accelerator).__name__}")
        if not isinstance(model, nn.Module):
            raise ValueError(f"model must be an nn.Module, got {type(model).__name__}")
        schedule = every(local_sgd_steps) if isinstance(local_sgd_steps, int) else local_sgd_steps
        require_schedule(schedule)
        kind = accelerator.distributed_type
        if kind in _SHARDED:
            raise ValueError(f"accelerator must not use {kind.value}: sharded models are not averaged")
        self.enabled = enabled and kind != DistributedType.NO
        self._entered = ExitStack()
        if not self.enabled:
            return
        refuse_flat(model)  # which accelerate would unwrap
        # The model itself: of one that is compiled accelerate would take the DDP out of what is seen, not of what runs.
        inner = accelerator.unwrap_model(model, keep_torch_compile=False)
        host_of(inner, current())  # in a DDP of the user's?
        owned = {id(p) for p in inner.parameters()}
        optimizers = [
            optimizer
            for optimizer in map(unwrapped, accelerator._optimizers)
            if any(id(p) in owned for group in optimizer.param_groups for p in group["params"])
        ]
        if not optimizers:
            raise ValueError("model must have an optimizer: give both to accelerator.prepare() first")
        self._wrapped = model
        self.local = core.LocalSGD(
            inner,
            optimizers,
            schedule=schedule,
            averaging=averaging,
            overlap=overlap,
            optimizer_state=optimizer_state,
            timeout_seconds=timeout_seconds,
            done_timeout_seconds=done_timeout_seconds,
            on_record=on_record,
        )

    def __enter__(self) -> LocalSGD:
        if self.local is not None:
            with ExitStack() as entering:  # what fails leaves nothing behind
                quiet = getattr(self._wrapped, "no_sync", None)  # of DDP, which then exchanges no gradients
                if quiet is not None:
                    entering.enter_context(quiet())
                    # As after a forward pass in no_sync(). The first one would send worker 0's buffers to all.
                    self._wrapped.require_forward_param_sync = False  # type: ignore[assignment]  # of DDP
                entering.enter_context(self.local)
                self._entered = entering.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def step(self) -> None:
        """As accelerate's own wants it; an average comes with the step of the optimizer."""

    def consensus(self) -> AbstractContextManager[nn.Module]:
        """The average of all workers' models, to evaluate or to save: ``prsgd.LocalSGD.consensus``."""
        if self.local is None:
            raise ValueError("consensus() needs several processes and enabled=True")
        return self.local.consensus()
