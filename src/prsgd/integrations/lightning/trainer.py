"""``LocalSGDStrategy``: the Trainer's loop, with an average now and then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import LBFGS, Optimizer

from prsgd.averaging.base import Averaging
from prsgd.averaging.wires.base import Wire
from prsgd.core.local_sgd import LocalSGD
from prsgd.core.watching import told
from prsgd.errors import UsageError
from prsgd.integrations import keeps_step, require_schedule
from prsgd.integrations.lightning.average import ShowsAverage
from prsgd.records import Record
from prsgd.saving.random_numbers import restore_random_state
from prsgd.schedules.base import Schedule

_TIMEOUT = timedelta(seconds=1800)
"""Lightning's own, for its collectives."""


class LocalSGDStrategy(ShowsAverage):
    """Local SGD under Lightning's Trainer: every process trains its own model and averages it now and then.

        Trainer(devices=2, strategy=LocalSGDStrategy(schedule=prsgd.every(8), overlap=1))

    ``schedule``, ``averaging``, ``overlap``, ``optimizer_state``, ``timeout_seconds``, ``done_timeout_seconds`` and
    ``on_record`` are those of ``prsgd.LocalSGD``; the other arguments are those of Lightning's ``DDPStrategy``, from
    which launchers and samplers come.

    Validation, checkpoints and the model after ``fit`` are the average of all workers. Beside a checkpoint lies a
    folder ``<name>.workers`` with every worker's own, from which ``fit(ckpt_path=...)`` goes on to the last bit.
    Rounds, bytes and drift are in ``trainer.logged_metrics`` and go to the loggers; ``trainer.strategy.local`` is the
    ``LocalSGD`` with all else.

    If loaders differ in length, or workers may skip steps (16-mixed), or the schedule gives them rounds of different
    lengths, an epoch ends with one more average, so that all workers are at one point for what follows.
    """

    def __init__(
        self,
        *,
        schedule: Schedule,
        averaging: Averaging | Wire | None = None,
        overlap: int | Literal["auto"] = 0,
        optimizer_state: str | Mapping[str, int] = "keep",
        timeout_seconds: float | None = None,
        done_timeout_seconds: float = 3600.0,
        on_record: Callable[[Record], None] | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        require_schedule(schedule)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._settings: dict[str, Any] = {
            "schedule": schedule, "averaging": averaging, "overlap": overlap, "optimizer_state": optimizer_state,
            "timeout_seconds": timeout_seconds, "done_timeout_seconds": done_timeout_seconds, "on_record": on_record,
        }  # fmt: skip
        self._callback = _AtEnds(self)
        self._toggles: list[Any] = []
        """Handles of the hooks around the optimizers' steps, with manual optimization."""
        self._trains: list[int] = []
        """Which parameters the optimizers trained in the beginning."""
        self._logged_at = 0

    # Setting up

    def setup(self, trainer: Trainer) -> None:
        fits = trainer.state.fn == TrainerFn.FITTING
        if fits and self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm must be off with LocalSGDStrategy: it would wait for all workers in every layer of "
                "every step; BatchNorm's statistics are averaged with the model"
            )
        over_time = (WeightAveraging, StochasticWeightAveraging)
        averages = [type(c).__name__ for c in trainer.callbacks if isinstance(c, over_time)]  # type: ignore[attr-defined]
        if fits and averages:
            raise ValueError(
                f"callbacks must not have {averages[0]} with LocalSGDStrategy: each worker would keep the average of "
                "its own models over time, and the workers would end with different ones"
            )
        super().setup(trainer)
        if not fits:
            return
        closures = [type(o).__name__ for o in self.optimizers if isinstance(o, LBFGS)]
        if closures and self._settings["overlap"] != 0:
            raise ValueError(
                f"overlap must be 0 with {closures[0]}, which takes several gradients in a step, got "
                f"{self._settings['overlap']!r}"
            )
        self._make_local()
        trainer.callbacks.insert(0, self._callback)  # type: ignore[attr-defined]  # before those that look at the model or save it
        # Lightning broadcasts from rank 0 before every batch whether it got a SIGTERM: all would wait for rank 0 in
        # every step, and for ever once it has no more batches. Each process goes by its own signal instead.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def configure_ddp(self) -> None:
        """No wrapper; all begin at worker 0's model, unless each goes on from its own."""
        assert self.model is not None
        if self._resumed is None or "worker" not in self._resumed:
            _sync_module_states(self.model)

    def _make_local(self) -> None:
        assert self.lightning_module is not None
        self.local = LocalSGD(self.lightning_module, self.optimizers, **self._settings)
        self.local.add_listener(self._tell)
        self._phase, self._logged_at = "new", 0
        if self._resumed is not None:
            go_on = self.local.load_state_dict if "worker" in self._resumed else self.local.inherit
            go_on(self._resumed["local"])

    # Training

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if self._phase == "over":  # the second run of one fit, as after a search for a learning rate
            self._make_local()
        assert self.local is not None
        self._meets = self._see_lengths(trainer)
        self._callback.on_train_batch_end = self._callback.after_batch if self._meets else None
        manual = not self.lightning_module.automatic_optimization
        toggling = _Toggling(self.lightning_module)
        if manual:
            self._toggles = [o.register_step_pre_hook(toggling.before) for o in self.local.optimizers]
        self.local.start()
        self._phase, self._has_met = "running", False
        self._trains = self._trained()
        if manual:
            self._toggles += [o.register_step_post_hook(toggling.after) for o in self.local.optimizers]
        if self._resumed is not None and "worker" in self._resumed and not trainer.is_last_batch:
            restore_random_state(self._resumed["random"])  # in an epoch, whose loader has drawn its numbers long ago
        self._resumed = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._has_met = False
        if batch_idx == 0 and self._trained() != self._trains:
            raise UsageError(
                "what the optimizers train changed in the middle of fit, as BackboneFinetuning changes it: with "
                "LocalSGDStrategy call fit once with the frozen model, and then that of a new Trainer with all of it"
            )

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """The gradient first, and then the step, where an average may land between the two."""
        plugin, model = self.precision_plugin, model or self.lightning_module
        scales = isinstance(plugin, MixedPrecision) and plugin.scaler is not None  # and does so by itself
        plain = type(plugin).optimizer_step in (Precision.optimizer_step, MixedPrecision.optimizer_step)
        if scales or not plain or isinstance(optimizer, LBFGS):
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        assert isinstance(model, LightningModule)
        result = plugin._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def on_train_end(self) -> None:
        self._finish()

    def on_exception(self, exception: BaseException) -> None:
        self._abandon()
        super().on_exception(exception)

    def teardown(self) -> None:
        self._abandon()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            trainer: Any = self.lightning_module.trainer
            trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)
            if self._callback in trainer.callbacks:
                trainer.callbacks.remove(self._callback)
        self._resumed = None
        super().teardown()

    def _finish(self) -> None:
        if self._phase == "running":
            assert self.local is not None
            self._phase = "over"
            self._let_go()
            self.local.finish()
            if self.local.records:
                self._log(told(self.local, self.local.records[-1]))

    def _abandon(self) -> None:
        if self._phase == "running":
            assert self.local is not None
            self._phase = "over"
            self._hide()
            self.local.abandon()
        self._let_go()

    def _trained(self) -> list[int]:
        assert self.lightning_module is not None
        rests = not self.lightning_module.automatic_optimization  # a parameter may, by toggle_optimizer
        return [id(p) for o in self.optimizers for g in o.param_groups for p in g["params"] if rests or p.requires_grad]

    def _let_go(self) -> None:
        for handle in self._toggles:
            handle.remove()
        self._toggles = []

    def _see_lengths(self, trainer: Trainer) -> bool:
        """Do workers have to meet at the end of an epoch? Refuse what cannot be if their epochs differ in length."""
        batches = torch.tensor(float(trainer.num_training_batches), device=self.root_device)
        found = [torch.empty_like(batches) for _ in range(self.world_size)]
        dist.all_gather(found, batches)  # Lightning's own warns with newer versions of torch
        lengths = torch.stack(found)
        if (lengths != lengths[0]).any():
            inside = trainer.enable_validation and (
                trainer.check_val_every_n_epoch is None
                or trainer.val_check_batch is None
                or trainer.val_check_batch < trainer.num_training_batches
            )
            text = f"the workers' loaders have {lengths.tolist()} batches"
            if self.reduce_boolean_decision(bool(inside), all=False):
                raise ValueError(f"val_check_interval must be 1.0 where epochs differ in length: {text}")
            if trainer.max_steps != -1:
                raise ValueError(f"max_steps counts each worker's own steps: use max_epochs, since {text}")
            return True
        scales = isinstance(self.precision_plugin, MixedPrecision) and self.precision_plugin.scaler is not None
        return bool(lengths.isinf().any()) or scales or not keeps_step(self._settings["schedule"])

    def _tell(self, record: Record) -> None:
        """A record is complete: to ``trainer.logged_metrics``, what callbacks monitor, and the loggers."""
        if self._phase not in ("running", "over") or self.local is None or self.lightning_module is None:
            return
        trainer: Any = self.lightning_module.trainer
        numbers = told(self.local, record)
        shown = dict(zip(numbers, torch.tensor([float(value) for value in numbers.values()]).unbind()))
        trainer.logged_metrics.update(shown)
        trainer.callback_metrics.update(shown)
        if trainer.log_every_n_steps and self.local.step - self._logged_at >= trainer.log_every_n_steps:
            self._log(numbers)

    def _log(self, numbers: dict[str, float]) -> None:
        assert self.local is not None
        assert self.lightning_module is not None
        self._logged_at, trainer = self.local.step, self.lightning_module.trainer
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


class _AtEnds(Callback):
    """Comes before all other callbacks where an epoch's batches end, and training does."""

    # Lightning calls those of a callback's hooks that can be called, at a price of microseconds for each of a step's.
    on_train_batch_start: Any = None
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None
    on_train_batch_end: Any = None
    """``after_batch``, where workers have to meet."""

    def __init__(self, strategy: LocalSGDStrategy) -> None:
        self._strategy = strategy

    def after_batch(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, idx: int) -> None:
        if trainer.is_last_batch or idx + 1 == trainer.num_training_batches:
            self._strategy._meet()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._strategy._meet()  # also where a hook has ended the epoch early

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._strategy._finish()


class _Toggling:
    """Around a step, all parameters train that did so in the beginning: ``toggle_optimizer`` lets those of the other
    optimizers rest, which must not look as if the model had changed."""

    def __init__(self, module: nn.Module) -> None:
        self._trains = [p for p in module.parameters() if p.requires_grad]
        self._resting: list[nn.Parameter] = []

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._resting = [p for p in self._trains if not p.requires_grad]
        for p in self._resting:
            p.requires_grad_(True)

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for p in self._resting:
            p.requires_grad_(False)
