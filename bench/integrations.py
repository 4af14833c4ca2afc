"""What an integration costs beside LocalSGD by hand: the processor's seconds of a step, in turns, in one process.

    python bench/integrations.py                     # lightning, transformers; a few minutes

The library's Trainer trains the same small model with our integration, and with a ``LocalSGD`` that is put around its
optimizer by hand, so that what is compared is the integration and not the library. Each turn is a run of its own; the
first is thrown away. The median of the paired ratios is what is told. (accelerate's has no code in a step.)
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import prsgd

WIDTH, BATCH = 256, 32
WARM_UP = 50
"""Steps that do not count: what is done once."""


def data(steps: int) -> TensorDataset:
    x = torch.randn(steps * BATCH, WIDTH)
    return TensorDataset(x, x[:, :10].argmax(1))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def by_lightning(steps: int, ours: bool) -> float:
    """With the strategy; and with ``LocalSGD`` in hooks of the module."""
    from lightning.pytorch import LightningModule, Trainer

    from prsgd.integrations.lightning import LocalSGDStrategy

    logging.getLogger("lightning").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == WARM_UP:
                self.began = time.process_time()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seconds = time.process_time() - getattr(self, "began", 0.0)

        def on_train_start(self) -> None:
            if not ours:
                optimizer: Any = self.optimizers()
                run = prsgd.LocalSGD(self.net, optimizer.optimizer, schedule=prsgd.every(8))
                vars(self)["by_hand"] = run.start()

        def on_train_end(self) -> None:
            if not ours:
                vars(self)["by_hand"].finish()

    module = Module()
    strategy: Any = LocalSGDStrategy(schedule=prsgd.every(8)) if ours else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data(steps), batch_size=BATCH))
    return module.seconds / (steps - WARM_UP)


def by_transformers(steps: int, ours: bool) -> float:
    """With ``local_sgd(trainer)``; and with ``LocalSGD`` in a callback, the model not wrapped in either case."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from prsgd.integrations.transformers import local_sgd

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    class ByHand(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.local = None
            if not ours:
                self.local = prsgd.LocalSGD(kwargs["model"], kwargs["optimizer"], schedule=prsgd.every(8)).start()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARM_UP:
                self.began = time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.seconds = time.process_time() - getattr(self, "began", 0.0)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.local is not None:
                self.local.finish()

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=BATCH, num_train_epochs=1, report_to="none",
            disable_tqdm=True, save_strategy="no", logging_strategy="no", optim="sgd",
        )  # fmt: skip
        callback, samples = ByHand(), data(steps)
        rows: Any = [{"x": samples[i][0], "labels": samples[i][1]} for i in range(len(samples))]
        trainer = Trainer(model=Classifier(), args=args, train_dataset=rows, callbacks=[callback])
        if ours:
            local_sgd(trainer, schedule=prsgd.every(8))
        else:
            trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)
        trainer.train()
    return callback.seconds / (steps - WARM_UP)


RUNS: dict[str, Callable[[int, bool], float]] = {"lightning": by_lightning, "transformers": by_transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", help=f"of {', '.join(RUNS)}; all unless given")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--turns", type=int, default=12)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # One group of one process for all, so that averages cost the same on both sides.
    store: Any = vars(torch.distributed)["HashStore"]()  # public, but not in its export list
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    warnings.simplefilter("ignore")
    for name in args.libraries or RUNS:
        run, ratios, own = RUNS[name], [], []
        for turn in range(args.turns + 1):
            pair = {}
            for ours in (True, False) if turn % 2 else (False, True):
                pair[ours] = run(args.steps, ours)
            if turn:
                ratios.append(pair[True] / pair[False])
                own.append(pair[True])
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name:14} {1e3 * statistics.median(own):7.3f} ms a step, {100 * (middle - 1):+.2f} % "
            f"against LocalSGD by hand (quartiles {100 * (low - 1):+.2f} to {100 * (high - 1):+.2f})"
        )


if __name__ == "__main__":
    main()
