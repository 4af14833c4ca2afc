"""transformers 5: ``local_sgd(trainer, schedule=...)`` makes its Trainer train by local SGD.

    from prsgd.integrations.transformers import local_sgd

    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=test)
    local_sgd(trainer, schedule=prsgd.every(8), overlap=1)
    trainer.train()

Started by ``torchrun --nproc-per-node 2 script.py``; docs/integrations/transformers.md tells what differs from DDP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from prsgd._warn import warn
from prsgd.averaging.base import Averaging
from prsgd.averaging.wires.base import Wire
from prsgd.comm.joining import current
from prsgd.core.local_sgd import LocalSGD
from prsgd.core.start import host_of
from prsgd.core.watching import told
from prsgd.errors import UsageError
from prsgd.integrations import keeps_step, require, require_schedule
from prsgd.records import Record
from prsgd.replicas.names import load_state, state_of
from prsgd.schedules.base import Schedule

require("transformers", at_least="5", below="6")
require("accelerate", at_least="1.10", below="2")

from transformers import Trainer, TrainerCallback

__all__ = ["local_sgd"]


def local_sgd(
    trainer: Trainer,
    *,
    schedule: Schedule,
    averaging: Averaging | Wire | None = None,
    overlap: int | Literal["auto"] = 0,
    optimizer_state: str | Mapping[str, int] = "keep",
    timeout_seconds: float | None = None,
    done_timeout_seconds: float = 3600.0,
    on_record: Callable[[Record], None] | None = None,
) -> None:
    """Let ``trainer`` train a model of its own in every process, and average the models now and then.

    To be called before ``trainer.train()``. The arguments are those of ``prsgd.LocalSGD``, which is ``trainer.local``
    once training has begun.

        trainer = Trainer(model=model, args=TrainingArguments("runs/text"), train_dataset=dataset)
        local_sgd(trainer, schedule=prsgd.every(8))
        trainer.train()

    Evaluation, checkpoints and the model after training are the average of all workers; beside it a checkpoint holds
    every worker's own in ``prsgd-<worker>.pt``, from which ``train(resume_from_checkpoint=...)`` goes on to the last
    bit. Rounds, bytes and drift are logged with the loss. Sets ``args.average_tokens_across_devices`` to False: a
    worker's gradient is the mean over its own tokens.

    Where workers may skip steps (fp16), or the schedule gives them rounds of different lengths, all meet by one more
    average before something is logged, evaluated or saved, and at the end of an epoch.
    """
    require_schedule(schedule)
    _check(trainer)
    settings = {
        "schedule": schedule, "averaging": averaging, "overlap": overlap, "optimizer_state": optimizer_state,
        "timeout_seconds": timeout_seconds, "done_timeout_seconds": done_timeout_seconds, "on_record": on_record,
    }  # fmt: skip
    trainer.args.average_tokens_across_devices = False
    _without_ddp(trainer)
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_TrainsLocally, kind), {"__module__": kind.__module__})
    run = _Run(trainer, settings)
    vars(trainer)["_prsgd"] = run
    trainer.callback_handler.callbacks.insert(0, run)  # before those that look at the model


def _without_ddp(trainer: Any) -> None:
    """No DDP around the model, but autocast and compilation, as for evaluation."""
    trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)


def _check(trainer: Trainer) -> None:
    """Raise a ValueError for what cannot be."""
    if not isinstance(trainer, Trainer):
        raise ValueError(f"trainer must be a transformers.Trainer, got a {type(trainer).__name__}")
    if isinstance(trainer, _TrainsLocally):
        raise UsageError("local_sgd(trainer) was called before: once is enough, for every trainer.train()")
    if trainer.is_in_train:
        raise UsageError("local_sgd(trainer) comes before trainer.train()")
    others = {"DeepSpeed": trainer.is_deepspeed_enabled, "FSDP": trainer.is_fsdp_enabled}
    others["a model sharded at load time"] = trainer.is_distributed_loading_by_transformers
    for name, used in others.items():
        if used:
            raise ValueError(f"trainer must not use {name}, which shards the model: sharded models are not averaged")
    args = trainer.args
    if isinstance(trainer.model, torch._dynamo.OptimizedModule) and args.remove_unused_columns:
        raise ValueError(
            "trainer must have the model as it is, not torch.compile(model), whose inputs the Trainer cannot tell: use "
            "TrainingArguments(torch_compile=True)"
        )
    if args.n_gpu > 1:
        raise ValueError("trainer must have one GPU in each process, not DataParallel: start it by torchrun")
    if args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size must be False: each worker would find another, and begin anew alone")
    if args.include_num_input_tokens_seen not in ("no", False):
        raise ValueError("include_num_input_tokens_seen must be 'no': it would wait for all workers in every step")
    if isinstance(trainer.model_wrapped, DistributedDataParallel) and trainer.model_wrapped is not trainer.model:
        raise UsageError(
            "local_sgd(trainer) comes before the first trainer.train(), which has put the model into "
            "DistributedDataParallel: make a new Trainer"
        )
    host_of(trainer.model_wrapped, current())  # in DDP or FSDP already?


class _Run(TrainerCallback):
    """What belongs to local SGD in one trainer."""

    def __init__(self, trainer: Any, settings: dict[str, Any]) -> None:
        self.trainer, self.settings = trainer, settings
        self.local: LocalSGD | None = None
        self.runs = False
        self.resumes: str | None = None
        """The checkpoint from which training goes on."""
        self._meets = False
        self._looks = False
        self._trains: list[int] = []
        """Which parameters the optimizer trained in the beginning."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self.trainer
        self._meets = trainer.accelerator.scaler is not None or not keeps_step(self.settings["schedule"])
        self._check_lengths(trainer.callback_handler.train_dataloader)
        self.local = LocalSGD(trainer.model, trainer.optimizer, **self.settings)
        if self.resumes is not None:
            self._go_on(self.resumes)
            self.resumes = None
        self.local.start()
        self.runs = True
        self._trains = self._trained()

    def check_trained(self) -> None:
        """At the first batch of an epoch."""
        if self.runs and self._trained() != self._trains:
            raise UsageError(
                "what the optimizer trains changed in the middle of train(), as by a callback that freezes layers for "
                "some epochs: with local_sgd() train once with the frozen model, and then by a new Trainer with all of "
                "it"
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.meet()

    def meet(self) -> None:
        """Where workers' steps differ, let those that are ahead wait for all, by one more average."""
        if self.runs and self._meets:
            assert self.local is not None
            with self.local.epoch():
                pass

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The trainer's model is the average of all workers, while they train."""
        if not self.runs or self._looks:
            yield
            return
        assert self.local is not None
        with self.local.consensus():
            self._looks = True
            try:
                yield
            finally:
                self._looks = False

    def finish(self) -> None:
        if self.runs:
            assert self.local is not None
            self.runs = False
            self.local.finish()

    def abandon(self) -> None:
        if self.local is not None:
            self.local.abandon()
        self.runs = False

    def numbers(self) -> dict[str, float]:
        """For the log; nothing before the first record."""
        return told(self.local, self.local.records[-1]) if self.local is not None and self.local.records else {}

    def save(self, folder: str) -> None:
        """This worker's own state, beside the average."""
        assert self.local is not None
        trainer, scaler = self.trainer, self.trainer.accelerator.scaler
        os.makedirs(folder, exist_ok=True)
        state = {
            "num_workers": self.local.comm.num_workers,
            "model": _tensors(state_of(trainer.model)),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "local": self.local.state_dict(),
        }
        torch.save(state, _path(folder, trainer.args.process_index))

    def _go_on(self, folder: str) -> None:
        """From this worker's own state, if all find theirs; else from the average, with what worker 0 had learned."""
        assert self.local is not None
        trainer = self.trainer
        state = _read(_path(folder, trainer.args.process_index))
        fits = state is not None and state["num_workers"] == self.local.comm.num_workers
        if self._all(fits):
            assert state is not None
            load_state(trainer.model, state["model"])
            trainer.optimizer.load_state_dict(state["optimizer"])
            trainer.lr_scheduler.load_state_dict(state["scheduler"])
            if state["scaler"] is not None and trainer.accelerator.scaler is not None:
                trainer.accelerator.scaler.load_state_dict(state["scaler"])
            self.local.load_state_dict(state["local"])
            return
        first = _read(_path(folder, 0))
        if self._all(first is not None):
            assert first is not None
            self.local.inherit(first["local"])
        if trainer.args.process_index == 0:
            warn(
                f"all workers go on from the average in {folder} and worker 0's optimizer state, if it is there: not "
                f"all of the {self.local.comm.num_workers} workers find a state of as many, such as "
                f"{_path(folder, 0)}",
                RuntimeWarning,
            )

    def _trained(self) -> list[int]:
        return [id(p) for group in self.trainer.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _all(self, fits: bool) -> bool:
        """On all workers?"""
        accelerator = self.trainer.accelerator
        return bool(accelerator.gather(torch.tensor([int(fits)], device=accelerator.device)).min())

    def _check_lengths(self, loader: Any) -> None:
        """The Trainer's own collectives come after so many batches on every worker."""
        accelerator = self.trainer.accelerator
        try:
            batches = len(loader)
        except TypeError:  # of no length: args.max_steps counts
            batches = -1
        lengths = accelerator.gather(torch.tensor([batches], device=accelerator.device)).tolist()
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the workers' loaders must have as many batches each, they have {lengths}: leave even_batches on"
            )


class _TrainsLocally:
    """The methods of a Trainer around which its model, or a worker's state, has to be seen to."""

    _prsgd: _Run

    @property
    def local(self) -> LocalSGD | None:
        """The run of the newest ``train()``; ``local.records`` has one entry for each average."""
        return self._prsgd.local

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._inner_training_loop(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._prsgd.abandon()
            raise

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        _without_ddp(self)  # every trial of a hyperparameter search makes an accelerator

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        self._prsgd.resumes = checkpoint

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self._prsgd.check_trained()
        return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        control = self.control  # type: ignore[attr-defined]
        if control.should_log or control.should_evaluate or control.should_save:
            self._prsgd.meet()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._prsgd.shown():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._prsgd.shown():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run, trainer = self._prsgd, self._prsgd.trainer
        if run.runs and not trainer.args.save_only_model:
            folder = os.path.join(trainer._get_output_dir(trial), f"checkpoint-{trainer.state.global_step}")
            run.save(folder)  # by all, before they meet to look: with trainer_state.json the folder is complete
        with run.shown():
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._prsgd.finish()  # before the best model is loaded
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs or "train_loss" in logs:
            logs.update(self._prsgd.numbers())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def _path(folder: str, worker: int) -> str:
    return os.path.join(folder, f"prsgd-{worker}.pt")


def _read(path: str) -> Mapping[str, Any] | None:
    if not os.path.isfile(path):
        return None
    state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in state.items()}
