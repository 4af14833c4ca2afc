"""What the ranks of ``test_lightning.py`` do: one training by Lightning's Trainer, and the same loop by hand."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import prsgd
from prsgd.integrations.lightning import FabricStrategy, LocalSGDStrategy

logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=UserWarning, module="lightning")


@dataclass(frozen=True)
class Run:
    """What is trained, and how."""

    overlap: Any = 0
    period: int = 4
    accumulate: int = 1
    precision: str = "32-true"
    optimizer: str = "adam"
    batches: tuple[int, int] = (7, 7)
    epochs: int = 3
    scale: float = 1.0
    """Of the loss: with large ones 16-mixed skips steps."""
    compiled: bool = False
    periods: tuple[int, int] | None = None
    """Of each worker, where they differ."""

    def schedule(self) -> prsgd.Schedule:
        return prsgd.every(self.period) if self.periods is None else prsgd.per_worker(self.periods)

    @property
    def uneven(self) -> bool:
        return len(set(self.batches)) > 1


def data(number: int = 112) -> TensorDataset:
    """Digits that nobody wrote: 14 batches of 8, of which each rank has 7."""
    chance = torch.Generator().manual_seed(1)
    x = torch.randn(number, 12, generator=chance)
    return TensorDataset(x, (x[:, :3] + 0.1 * torch.randn(number, 3, generator=chance)).argmax(1))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


def optimizer_of(kind: str, params: Any) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.AdamW(params, lr=0.01)
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class Digits(LightningModule):
    """As in Lightning's own example of MNIST."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.net = run, network()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.run.scale * nn.functional.cross_entropy(self(x), y)
        if not self.run.compiled:  # which this torch cannot trace
            self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(float(sum(p.double().sum() for p in self.parameters())))
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.run.optimizer, self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def loaders(run: Run, rank: int) -> tuple[Any, Any]:
    """Of the whole data set, whose part the Trainer gives to each rank; or of a part, where they are uneven."""
    everything = data()
    if run.uneven:
        start = 8 * sum(run.batches[:rank])
        part = Subset(everything, range(start, start + 8 * run.batches[rank]))
        return DataLoader(part, batch_size=8), DataLoader(everything, batch_size=28)
    return DataLoader(everything, batch_size=8, shuffle=True), DataLoader(everything, batch_size=28)


def trainer_of(run: Run, strategy: LocalSGDStrategy | None = None, **options: Any) -> Any:
    # Lightning takes bfloat16 on a CPU where float16 is asked for, unless it is given the plugin.
    halves: Any = {"plugins": MixedPrecision("16-mixed", "cpu")} if run.precision == "16-mixed" else {}
    return Trainer(
        accelerator="cpu", devices=options.pop("devices", 2), max_epochs=options.pop("max_epochs", run.epochs),
        **(halves or {"precision": run.precision}),
        accumulate_grad_batches=run.accumulate, use_distributed_sampler=not run.uneven,
        strategy=strategy or LocalSGDStrategy(schedule=run.schedule(), overlap=run.overlap),
        **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
           "enable_model_summary": False, "num_sanity_val_steps": 0, **options},
    )  # fmt: skip


def outcome(model: nn.Module, local: prsgd.LocalSGD) -> dict[str, Any]:
    return {
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "steps": [record.step for record in local.records],
        "drifts": [record.drift for record in local.records],
        "bytes": local.totals.bytes_sent,
    }


def by_trainer(rank: int, run: Run, validates: bool = False, **options: Any) -> dict[str, Any]:
    seed_everything(rank + 1)
    model = Digits(run)
    fitted: Any = torch.compile(model, backend="eager") if run.compiled else model
    trainer, (train, validation) = trainer_of(run, **options), loaders(run, rank)
    seed_everything(rank + 5)
    trainer.fit(fitted, train, validation if validates else None)
    assert isinstance(trainer.strategy, LocalSGDStrategy)
    local = trainer.strategy.local
    assert local is not None
    assert trainer.callbacks == [c for c in trainer.callbacks if "prsgd" not in type(c).__module__]
    metrics = {name: float(value) for name, value in trainer.logged_metrics.items()}
    return {**outcome(model.net, local), "seen": model.seen, "metrics": metrics, "global_step": trainer.global_step}


def by_hand(rank: int, run: Run, looks: bool = False) -> dict[str, Any]:
    """What the Trainer does, as a loop."""
    seed_everything(rank + 1)
    model, everything = network(), data()
    optimizer = optimizer_of(run.optimizer, model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    train, validation = loaders(run, rank)
    if not run.uneven:
        sampler: Any = DistributedSampler(everything, 2, rank, shuffle=True, seed=rank + 5)  # as PL_GLOBAL_SEED says
        train = DataLoader(everything, batch_size=8, sampler=sampler)
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(run.precision)
    scaler = torch.amp.GradScaler("cpu", enabled=run.precision == "16-mixed")
    seed_everything(rank + 5)
    looked = []
    with prsgd.LocalSGD(model, optimizer, schedule=run.schedule(), overlap=run.overlap) as local:
        for epoch in range(run.epochs):
            if not run.uneven:
                train.sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(train, start=1):
                with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None, cache_enabled=False):
                    loss = run.scale * nn.functional.cross_entropy(model(x), y)
                if (number - 1) % run.accumulate == 0:
                    optimizer.zero_grad()
                scaler.scale(loss / run.accumulate).backward()
                if number % run.accumulate == 0 or number == len(train):
                    scaler.step(optimizer)
                    scaler.update()
            if run.uneven or run.precision == "16-mixed" or run.periods is not None:
                with local.epoch():
                    pass
            scheduler.step()
            if looks:
                iter(validation)  # which draws a random number
                with local.consensus() as average:
                    looked.append(float(sum(p.double().sum() for p in average.parameters())))
    return {**outcome(model, local), "seen": looked}


def warned(rank: int) -> list[str]:
    """The warnings of a training that speak of collectives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_trainer(rank, Run())
    return [str(w.message) for w in caught if "gather" in str(w.message) or "reduce" in str(w.message)]


def both(rank: int, settings: dict[str, Any], looks: bool = False) -> list[dict[str, Any]]:
    """By the Trainer, and by hand."""
    run = Run(**settings)
    return [by_trainer(rank, run, validates=looks), by_hand(rank, run, looks)]


class Stateful(DataLoader[Any]):
    """Goes on in the middle of an epoch, as torchdata's loader does."""

    given = 0

    def __iter__(self) -> Any:
        return self._batches(super().__iter__())

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for _ in range(self.given):
            next(batches)
        for batch in batches:
            self.given += 1
            yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Dies(Callback):
    """The process is told to stop after so many batches."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.after:
            raise KeyError("no more")


def resumed(rank: int, settings: dict[str, Any], folder: str, every: int | None, dies: int) -> dict[str, Any]:
    """In one go; and stopped after some steps, and gone on from the newest checkpoint."""
    run = Run(**settings)

    def fit(ckpt: str | None = None, *more: Callback) -> tuple[Any, Digits]:
        seed_everything(rank + 1)
        keeps = ModelCheckpoint(
            folder, "{epoch}-{step}-{loss:.3f}", save_top_k=-1, every_n_train_steps=every,
            every_n_epochs=None if every else 1, save_on_train_epoch_end=None if every else True,
        )  # fmt: skip
        model = Digits(run)
        trainer = trainer_of(run, callbacks=[keeps, *more], enable_checkpointing=True)
        train, validation = loaders(run, rank)
        if every and not run.uneven:
            sampler: Any = DistributedSampler(train.dataset, 2, rank, shuffle=True, seed=3)
            train = Stateful(train.dataset, batch_size=8, sampler=sampler)
        seed_everything(5)
        trainer.fit(model, train, validation, ckpt_path=ckpt)
        return trainer, model

    whole, model = fit()
    local = whole.strategy.local
    expected = outcome(model.net, local)
    whole.strategy.barrier()
    if rank == 0:
        for path in Path(folder).rglob("*.ckpt"):
            path.unlink()
    whole.strategy.barrier()
    with suppress(KeyError, prsgd.PeerError):  # the other's
        fit(None, Dies(dies))
    files = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.ckpt"))
    dist.barrier()
    newest = max(
        (path for path in Path(folder).glob("*.ckpt")), key=lambda path: int(path.stem.split("step=")[1].split("-")[0])
    )
    again, model = fit(str(newest))
    return {
        "expected": expected,
        "got": outcome(model.net, again.strategy.local),
        "files": files,
        "average": torch.load(newest)["state_dict"],
        "own": torch.load(f"{newest}.workers/{rank}.ckpt")["state_dict"],
    }


def alone(rank: int, folder: str) -> dict[str, Any]:
    """One worker goes on where two were."""
    run = Run()
    newest = str(next(Path(folder).glob("epoch=1*.ckpt")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Digits(run)
        trainer = trainer_of(run, devices=1)
        trainer.fit(model, *loaders(run, rank), ckpt_path=newest)
    said = [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]
    return {"said": said, "round": trainer.strategy.local.round, "epoch": trainer.current_epoch}


class Pair(LightningModule):
    """As Lightning's own example of a GAN: two optimizers, one of which rests while the other is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(4, 12), nn.Linear(12, 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), 0.01), torch.optim.Adam(self.critic.parameters(), 0.01)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        makes, judges = cast(Any, self.optimizers())
        x = batch[0]
        noise = x[:, :4]
        self.toggle_optimizer(makes)
        loss = -self.critic(self.generator(noise)).mean()
        self.manual_backward(loss)
        makes.step()
        makes.zero_grad()
        self.untoggle_optimizer(makes)
        self.toggle_optimizer(judges)

        def closure() -> Tensor:
            judges.zero_grad()
            loss: Tensor = (self.critic(self.generator(noise).detach()) - self.critic(x)).square().mean()
            self.manual_backward(loss)
            return loss

        judges.step(closure)
        self.untoggle_optimizer(judges)


def manual(rank: int, overlap: int) -> list[dict[str, Any]]:
    """Two optimizers in turns, by the Trainer and by hand."""
    run = Run(overlap=overlap, period=3)
    seed_everything(rank + 1)
    model = Pair()
    trainer = trainer_of(run)
    seed_everything(3)
    trainer.fit(model, loaders(run, rank)[0])
    results = [outcome(model, trainer.strategy.local)]
    seed_everything(rank + 1)
    model = Pair()
    (makes, judges), everything = model.configure_optimizers(), data()
    sampler: Any = DistributedSampler(everything, 2, rank, seed=3)
    train = DataLoader(everything, batch_size=8, sampler=sampler)
    with prsgd.LocalSGD(model, [makes, judges], schedule=run.schedule(), overlap=overlap) as local:
        for epoch in range(run.epochs):
            sampler.set_epoch(epoch)
            for x, _ in train:
                for p in model.critic.parameters():
                    p.requires_grad_(False)
                (-model.critic(model.generator(x[:, :4])).mean()).backward()
                for p in model.critic.parameters():
                    p.requires_grad_(True)
                makes.step()
                makes.zero_grad()
                judges.zero_grad()
                (model.critic(model.generator(x[:, :4]).detach()) - model.critic(x)).square().mean().backward()
                judges.step()
    return [*results, outcome(model, local)]


def stopped_early(rank: int) -> dict[str, Any]:
    """A loss that does not fall on one worker stops all."""
    run = Run(epochs=20, optimizer="sgd")
    stops = EarlyStopping("val_loss", patience=1, min_delta=0.5)
    result = by_trainer(rank, run, validates=True, callbacks=[stops])
    return {**result, "epoch": stops.stopped_epoch}


def logged(rank: int, folder: str) -> list[str]:
    """What a logger writes."""
    from lightning.pytorch.loggers import CSVLogger

    by_trainer(rank, Run(), logger=CSVLogger(folder, "run", "0"), log_every_n_steps=4)
    dist.barrier()
    return Path(folder, "run", "0", "metrics.csv").read_text().splitlines()


def searched(rank: int) -> dict[str, Any]:
    """A search for the learning rate, which is a run of its own, and training after it."""
    from lightning.pytorch.callbacks import LearningRateFinder

    class Searched(Digits):
        lr = 0.01

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    model = Searched(Run())
    trainer = trainer_of(Run(), callbacks=[LearningRateFinder(num_training_steps=40)])
    trainer.fit(model, loaders(Run(), rank)[0])
    return {**outcome(model.net, trainer.strategy.local), "lr": model.lr}


class Finetunes(BaseFinetuning):
    """The first layer rests in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.001)


def refused(rank: int, kind: str) -> str:
    """What is said to what cannot be."""
    options: dict[str, Any] = {}
    run, model = Run(), Digits(Run())
    strategy = LocalSGDStrategy(schedule=prsgd.every(4), overlap=1)
    if kind == "sync_batchnorm":
        options["sync_batchnorm"] = True
    elif kind == "ema":
        options["callbacks"] = [EMAWeightAveraging()]
    elif kind == "swa":
        options["callbacks"] = [StochasticWeightAveraging(0.01)]
    elif kind == "finetuning":
        options["callbacks"] = [Finetunes()]
        of_head = [*model.net[1].parameters(), *model.net[4].parameters()]
        model.configure_optimizers = lambda: torch.optim.SGD(of_head, lr=0.05)  # type: ignore[method-assign]
    elif kind == "lbfgs":
        model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters())  # type: ignore[method-assign]
    elif kind == "ddp":
        model.net = nn.parallel.DistributedDataParallel(model.net)  # type: ignore[assignment]
    elif kind == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model.net = FullyShardedDataParallel(model.net, device_id=torch.device("cpu"))  # type: ignore[assignment]
    elif kind == "period":
        strategy = LocalSGDStrategy(schedule=prsgd.every(4), overlap=9)
    elif kind == "max_steps":
        run, options = Run(batches=(5, 9)), {"max_steps": 12}
    elif kind == "val_check_interval":
        run, options = Run(batches=(6, 8)), {"val_check_interval": 3}
    trainer = trainer_of(run, strategy, **options)
    try:
        trainer.fit(model, *loaders(run, rank))
    except (ValueError, prsgd.PrsgdError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def one_fails(rank: int) -> str:
    """A worker that raises ends all, with an error that names the round."""
    run = Run(epochs=50)
    try:
        trainer_of(run, callbacks=[Dies(9)] if rank else []).fit(Digits(run), *loaders(run, rank))
    except (KeyError, prsgd.PrsgdError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


def by_fabric(rank: int) -> list[dict[str, Any]]:
    """Fabric's loop, with LocalSGD in it, and without Fabric."""
    from lightning.fabric import Fabric

    results = []
    for with_fabric in (True, False):
        seed_everything(rank + 1)
        model: Any = network()
        optimizer: Any = optimizer_of("adam", model.parameters())
        train: Any = DataLoader(data(), batch_size=8, shuffle=True)
        if with_fabric:
            fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricStrategy(), precision="bf16-mixed")
            fabric.launch()
            model, optimizer = fabric.setup(model, optimizer)
            train = fabric.setup_dataloaders(train)
        else:
            train = DataLoader(data(), batch_size=8, sampler=DistributedSampler(data(), 2, rank, seed=rank + 1))
        seed_everything(rank + 1)
        with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(4), overlap=1) as local:
            for number, (x, y) in enumerate(train):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, enabled=not with_fabric, cache_enabled=False):
                    out = model(x)
                loss = nn.functional.cross_entropy(out.float(), y)
                if with_fabric:
                    with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                        fabric.backward(loss)
                else:
                    loss.backward()
                optimizer.step()
        results.append(outcome(getattr(model, "module", model), local))
    return results
