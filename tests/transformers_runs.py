"""What the ranks of ``test_transformers.py`` do: text classification by transformers' Trainer, and by hand."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

import prsgd
from prsgd.integrations.transformers import local_sgd

logging.set_verbosity_error()  # type: ignore[no-untyped-call]


class Texts(Dataset[dict[str, Tensor]]):
    """Sentences of 8 words that nobody said; some words are happy ones."""

    def __init__(self, number: int) -> None:
        chance = torch.Generator().manual_seed(number)
        self.ids = torch.randint(1, 40, (number, 8), generator=chance)
        self.labels = ((self.ids < 15).sum(1) > 3).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[index]}


def bert() -> BertForSequenceClassification:
    config = BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=32, max_position_embeddings=16)  # fmt: skip
    made: Any = BertForSequenceClassification  # whose constructor has types in some versions only
    found: BertForSequenceClassification = made(config)
    return found


def accuracy(predicted: Any) -> dict[str, float]:
    return {"accuracy": float((predicted.predictions.argmax(-1) == predicted.label_ids).mean())}


def trainer_of(rank: int, folder: str, settings: dict[str, Any], callbacks: Any = None) -> Any:
    set_seed(rank + 1)
    given = {key: value for key, value in settings.items() if key not in ("overlap", "schedule")}
    defaults = {
        "num_train_epochs": 3, "per_device_train_batch_size": 8, "learning_rate": 5e-3, "logging_steps": 4,
        "save_strategy": "no", "seed": 3, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    args = TrainingArguments(folder, use_cpu=True, ddp_backend="gloo", **{**defaults, **given})
    model = bert()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * rank)  # the Trainer's seed is the same everywhere
    return Trainer(
        model=model,
        args=args,
        train_dataset=Texts(112),
        eval_dataset=Texts(40),
        compute_metrics=accuracy,
        callbacks=callbacks,
    )


def outcome(model: nn.Module, local: prsgd.LocalSGD) -> dict[str, Any]:
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "steps": [record.step for record in local.records],
        "drifts": [record.drift for record in local.records],
        "bytes": local.totals.bytes_sent,
    }


def schedule_of(settings: dict[str, Any]) -> prsgd.Schedule:
    schedule: prsgd.Schedule = settings.get("schedule", prsgd.every(4))
    return schedule


class Looks(TrainerCallback):
    """What an evaluation sees."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.seen.append(float(sum(p.double().sum() for p in model.parameters())))


class Dies(TrainerCallback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.after:
            raise KeyError("no more")


def by_trainer(rank: int, folder: str, settings: dict[str, Any], resume: Any = None) -> dict[str, Any]:
    looks = Looks()
    trainer = trainer_of(rank, folder, settings, [looks])
    local_sgd(trainer, schedule=schedule_of(settings), overlap=settings.get("overlap", 0))
    set_seed(rank + 1)
    trainer.train(resume_from_checkpoint=resume)
    assert type(trainer.model_wrapped).__name__ != "DistributedDataParallel"
    found = outcome(trainer.model, trainer.local)
    return {**found, "seen": looks.seen, "log": trainer.state.log_history, "best": trainer.state.best_model_checkpoint}


def by_hand(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The same Trainer's data and its training_step, in a loop of our own."""
    trainer = trainer_of(rank, folder, settings)
    args, model = trainer.args, trainer.model
    args.average_tokens_across_devices = False
    set_seed(rank + 1)
    loader = trainer.get_train_dataloader()
    model = trainer.accelerator.prepare_model(model, evaluation_mode=True)
    trainer.create_optimizer()
    optimizer = trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)
    batches, group = len(loader), args.gradient_accumulation_steps
    steps = -(-batches // group)
    scheduler = trainer.create_scheduler(3 * steps)
    seen = []
    with prsgd.LocalSGD(
        trainer.model, optimizer, schedule=schedule_of(settings), overlap=settings.get("overlap", 0)
    ) as local:
        for epoch in range(3):
            loader.set_epoch(epoch)
            batches_of_epoch = iter(loader)
            for step in range(steps):
                samples, items = trainer.get_batch_samples(
                    batches_of_epoch, min(group, batches - step * group), args.device
                )
                trainer.current_gradient_accumulation_steps = len(samples)
                for number, inputs in enumerate(samples, start=1):
                    trainer.accelerator.gradient_state._set_sync_gradients(number == len(samples))
                    trainer.training_step(model, inputs, items)
                trainer.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                model.zero_grad()
            if "schedule" in settings:  # per_worker
                with local.epoch():
                    pass
            if args.eval_strategy == "epoch":
                for _ in trainer.get_eval_dataloader():
                    pass  # it draws a random number
                with local.consensus() as average:
                    seen.append(float(sum(p.double().sum() for p in average.parameters())))
    return {**outcome(trainer.model, local), "seen": seen}


def both(rank: int, folder: str, settings: dict[str, Any]) -> list[dict[str, Any]]:
    return [by_trainer(rank, folder, settings), by_hand(rank, folder, settings)]


def resumed(rank: int, folder: str, settings: dict[str, Any], dies: int) -> list[dict[str, Any]]:
    """In one go; and stopped after some steps, and gone on from the newest checkpoint."""
    whole = by_trainer(rank, f"{folder}/whole", settings)
    trainer = trainer_of(rank, f"{folder}/parts", settings, [Dies(dies)])
    local_sgd(trainer, schedule=schedule_of(settings), overlap=settings.get("overlap", 0))
    set_seed(rank + 1)
    with suppress(KeyError):
        trainer.train()
    dist.barrier()
    again = by_trainer(rank, f"{folder}/parts", settings, resume=True)
    return [again, whole]


def alone(rank: int, folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One worker goes on where two were."""
    trainer = trainer_of(rank, f"{folder}/parts", settings)
    local_sgd(trainer, schedule=prsgd.every(4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=True)
    return {
        "said": [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)],
        "round": trainer.local.round,
    }


def skipping(rank: int, folder: str) -> dict[str, Any]:
    """Worker 1's gradients overflow at two steps, as they do with float16 on a GPU; all end with one model."""
    trainer = trainer_of(rank, folder, {"eval_strategy": "steps", "eval_steps": 5})
    local_sgd(trainer, schedule=prsgd.every(4), overlap=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trainer.accelerator.scaler = scaler
    whole = trainer.training_step

    def overflows(model: nn.Module, inputs: Any, items: Any = None) -> Tensor:
        loss: Tensor = whole(model, inputs, items)
        if rank == 1 and trainer.state.global_step in (3, 9):
            next(p for p in model.parameters() if p.grad is not None).grad.fill_(torch.inf)
        return loss

    trainer.training_step = overflows
    trainer.train()
    found = outcome(trainer.model, trainer.local)
    return {**found, "own": trainer.local.step, "global_step": trainer.state.global_step}


class Freezes(TrainerCallback):
    """The embeddings rest in the first epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.bert.embeddings.requires_grad_(state.global_step > 0)


def accelerator_made_anew(rank: int, folder: str) -> str:
    """As by every trial of a hyperparameter search."""
    trainer = trainer_of(rank, folder, {"num_train_epochs": 1})
    local_sgd(trainer, schedule=prsgd.every(4))
    trainer.create_accelerator_and_postprocess()
    trainer.train()
    return type(trainer.model_wrapped).__name__


def refused(rank: int, folder: str, kind: str) -> str:
    trainer = trainer_of(rank, folder, {})
    options: dict[str, Any] = {"schedule": prsgd.every(4)}
    if kind == "twice":
        local_sgd(trainer, **options)
    elif kind == "ddp":
        trainer.model = trainer.model_wrapped = nn.parallel.DistributedDataParallel(trainer.model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        trainer.model_wrapped = FullyShardedDataParallel(trainer.model, device_id=torch.device("cpu"))
    elif kind == "trained":
        trainer.train()
    elif kind == "freezing":
        trainer.add_callback(Freezes())
    elif kind == "compiled":
        trainer.model = torch.compile(trainer.model)
    elif kind == "tokens":
        trainer.args.include_num_input_tokens_seen = "all"
    elif kind == "lengths":
        trainer = trainer_of(rank, folder, {"accelerator_config": {"even_batches": False}, "max_steps": 20})
        trainer.train_dataset = Texts(120)
    elif kind == "schedule":
        options["schedule"] = 8
    elif kind == "overlap":
        options["overlap"] = 9
    try:
        local_sgd(trainer, **options)
        trainer.train()
    except (ValueError, prsgd.PrsgdError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def one_fails(rank: int, folder: str) -> str:
    trainer = trainer_of(rank, folder, {"logging_steps": 100}, [Dies(9)] if rank else None)
    local_sgd(trainer, schedule=prsgd.every(4))
    try:
        trainer.train()
    except (KeyError, prsgd.PrsgdError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def newest(folder: str) -> Path:
    return max(Path(folder).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))


def saved(folder: str, name: str) -> dict[str, Tensor]:
    """A model as it lies in the newest checkpoint: "model", or "0" for worker 0's own."""
    from safetensors.torch import load_file

    place = newest(folder)
    if name == "model":
        return load_file(place / "model.safetensors")
    found: dict[str, Tensor] = torch.load(place / f"prsgd-{name}.pt", weights_only=True)["model"]
    return found
