"""One run: a config in, records out.

    config -> task and method -> LocalSGD over the hosted workers -> records.jsonl, summary.json, checkpoints

The same code runs in one process, in each process of ``launch`` and under torchrun: every process trains the workers
it hosts, rank 0 writes.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from prsgd import files, tasks
from prsgd.clocks.trace import to_chrome
from prsgd.cluster.clock import ClusterClock, Sleeper
from prsgd.comm.in_process import InProcess
from prsgd.core.fragments import layers_of
from prsgd.core.local_sgd import LocalSGD
from prsgd.errors import CheckpointError
from prsgd.lab import methods
from prsgd.lab.checkpoint import Checkpoints, fingerprint
from prsgd.lab.config import Config, lr_at
from prsgd.lab.evaluate import Look, look_at
from prsgd.lab.feed import Feed, deal, load, num_steps
from prsgd.lab.folder import locked
from prsgd.lab.journal import Journal
from prsgd.lab.optimizer import optimizer_of
from prsgd.lab.progress import Observer, Progress, Stopped, Tally
from prsgd.records import Evaluation, Record, Summary
from prsgd.replicas.fleet import Fleet
from prsgd.replicas.names import state_of
from prsgd.replicas.rows import trainable
from prsgd.saving.states import write
from prsgd.tasks.base import Data


def run(
    config: Config,
    folder: Path,
    *,
    observe: Observer | None = None,
    should_stop: Callable[[], bool] | None = None,
    tensorboard: bool = False,
) -> Summary:
    """Train ``config`` (resolved) in ``folder``, from its newest checkpoint if there is one.

    ``should_stop`` is asked after each step: once it says yes, the run saves a checkpoint and raises ``Stopped``; in
    several processes it does so at the next evaluation, where all of them agree.
    """
    with locked(folder) if _rank() == 0 else nullcontext():
        return _Run(config, folder, observe or _nobody, should_stop or _never, tensorboard).go()


def _nobody(_: Progress) -> None:
    pass


def _never() -> bool:
    return False


class _Run:
    def __init__(
        self,
        config: Config,
        folder: Path,
        observe: Observer,
        should_stop: Callable[[], bool],
        tensorboard: bool,
    ) -> None:
        self._config, self._folder, self._observe, self._should_stop = config, folder, observe, should_stop
        self._task = tasks.find(config.task, config.task_sha256)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._data = _to(load(config), device)
        torch.manual_seed(config.seed)
        assert config.model is not None
        cluster = config.modelled()
        through_server = cluster is not None and cluster.shape == "parameter-server" and config.processes == 1
        comm = InProcess(config.workers, shape="parameter-server") if through_server else None
        model = self._task.models[config.model]().to(device)
        self._fleet = Fleet(model, config.workers, seed=config.seed, comm=comm)
        self._alone = len(self._fleet.workers) == self._fleet.num_workers
        self._rank = _rank()
        self._shards = deal(config, self._data, self._fleet.workers)
        self._num_steps = num_steps(config, self._shards)
        self._look_every = config.look or self._shards.steps_per_epoch
        self._feed = Feed(config, self._task, self._data, self._shards, self._fleet.workers)
        self._uneven = methods.find(config.method).uneven
        self._model_clock = ClusterClock(cluster, seed=config.seed) if cluster and config.processes == 1 else None
        self._sleeper = None
        if cluster is not None and config.processes > 1:
            self._sleeper = Sleeper(cluster, self._fleet.workers.start, config.seed)
        self._optimizer = optimizer_of(config, self._fleet.parameters(), lr_at(config, 0, self._num_steps))
        parts = config.parts(self._num_steps)
        self._local = LocalSGD(
            self._fleet,
            self._optimizer,
            schedule=parts.schedule,
            averaging=parts.averaging,
            optimizer_state=parts.optimizer_state,
            fragments=config.fragments or min(parts.fragments, len(layers_of(trainable(model)))),
            overlap=config.overlap or 0,
            clock=self._model_clock,
            on_record=self._on_record,
        )
        self._checkpoints = Checkpoints(folder, rank=self._rank)
        self._journal = Journal(folder, writes=self._rank == 0, tensorboard=tensorboard)
        self._tally = Tally()
        self._shown = 0.0
        self._stopping = False

    def go(self) -> Summary:
        """Train to the end."""
        state = self._resume()
        self._journal.open(num_bytes=0 if state is None else state["records_bytes"], step=self._tally.step)
        try:
            with self._local:
                if state is None:
                    self._evaluate()
                self._train()
            self._tally.evaluation = None  # what was seen before the last average
            self._evaluate(over=True)
        finally:
            self._journal.close()
            if self._local.records:
                content = json.dumps(to_chrome(self._local.trace.spans()))
                write(self._folder / files.trace_of(self._rank), content.encode())
        return self._summarize()

    def _train(self) -> None:
        look, tally = self._look_every, self._tally
        recipe = methods.find(self._config.method).keeps_lr
        began = time.perf_counter()
        while not self._is_over():
            if recipe:
                for group in self._optimizer.param_groups:
                    group["lr"] = lr_at(self._config, int(self._taken()), self._num_steps)
            self._optimizer.zero_grad()
            self._local.log(loss=self._backward(), samples=self._shards.batch_size)
            if self._config.clip:
                self._fleet.clip_grad_norm_(self._config.clip)
            if self._sleeper is not None:
                self._sleeper.wait(began)
            self._optimizer.step()
            tally.step += 1
            now = time.perf_counter()
            tally.seconds += now - began
            if self._is_over():
                break
            if self._taken() // look > tally.looks:
                tally.looks = int(self._taken() // look)
                self._evaluate()
                with self._local.paused():
                    self._save()
                if self._stopping:
                    raise Stopped(tally.step)
            elif self._alone and self._should_stop():
                self._save()
                raise Stopped(tally.step)
            if now - self._shown > 0.1:
                self._show()
            began = time.perf_counter()

    def _backward(self) -> Tensor:
        """The gradients of the next batches, part by part; returns the losses (n,)."""
        x, y = self._feed.batch(self._local.steps)
        parts = self._config.accumulate
        if parts == 1:
            return self._fleet.backward(self._task.loss_fn, x, y)
        pairs = zip(x.chunk(parts, dim=1), y.chunk(parts, dim=1))
        return torch.stack([self._fleet.backward(self._loss_of_part, *pair) for pair in pairs]).sum(dim=0)

    def _loss_of_part(self, out: Any, y: Any) -> Tensor:
        return self._task.loss_fn(out, y) / self._config.accumulate

    def _taken(self) -> float:
        """Steps of each worker; where workers differ, their mean.

        In several processes from the records, so that all know the same in the same round: the round whose record is
        not complete is taken to have had as many samples as the one before.
        """
        if not self._uneven:
            return self._tally.step
        if self._alone:
            return sum(self._local.steps) / self._config.workers
        last = self._local.records[-1] if self._local.records else None
        unknown = 0 if last is None else (self._local.round - last.round) * last.samples
        return (self._tally.totals["samples"] + unknown) / (self._config.workers * self._shards.batch_size)

    def _is_over(self) -> bool:
        if self._uneven and self._local.step >= self._num_steps * self._config.workers:
            return True  # a worker that has trained on everybody's share, before the first record told
        return self._taken() >= self._num_steps

    # Looking at it

    def _evaluate(self, *, over: bool = False) -> None:
        """The consensus's losses and score; and whether to stop."""
        if over:
            seen = self._look(self._fleet.modules[0])  # it is the consensus
        else:
            began = time.perf_counter()
            with self._local.consensus() as model:
                if not self._alone:  # waiting for slower workers is a part of the run
                    self._tally.seconds += time.perf_counter() - began
                seen = self._look(model)
        self._stopping = seen.stop
        length, tally, clock = self._shards.steps_per_epoch, self._tally, self._model_clock
        evaluation = Evaluation(
            epoch=seen.steps / self._config.workers / length,
            step=tally.step if not self._uneven else self._num_steps if over else tally.looks * self._look_every,
            train_loss=seen.train_loss,
            test_loss=seen.test_loss,
            test_score=seen.test_score,
            seconds=tally.seconds,
            modelled_seconds=None if clock is None else max(clock(worker) for worker in self._fleet.workers),
            metric=None if self._task.metric is None else self._task.metric.name,
        )
        tally.see(evaluation)
        self._journal.write("evaluation", asdict(evaluation))
        self._show()

    def _look(self, model: nn.Module) -> Look:
        steps = sum(self._local.steps)
        return look_at(model, self._task, self._data, self._fleet, steps=steps, should_stop=self._should_stop)

    def _show(self) -> None:
        self._shown = time.perf_counter()
        if self._rank == 0:
            length = self._shards.steps_per_epoch
            self._observe(self._tally.progress(self._taken(), self._num_steps, length, self._local.round))

    # What stays

    def _on_record(self, record: Record) -> None:
        self._tally.add(record)
        self._journal.write("average", asdict(record))

    def _save(self) -> None:
        state = {
            "config": asdict(self._config),
            **asdict(self._tally),
            "records_bytes": self._journal.num_bytes(),
            "fleet": self._fleet.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "local": self._local.state_dict(),
        }
        # In several processes whose steps differ, by what they have in common.
        common = self._uneven and not self._alone
        step = self._tally.looks * self._look_every if common else self._tally.step
        self._checkpoints.save(step, state)

    def _resume(self) -> dict[str, Any] | None:
        step = self._checkpoints.settle_on(self._fleet)
        if step is None:
            return None
        state: dict[str, Any] = self._checkpoints.load(step)
        if Config.from_dict(state["config"]) != self._config:
            raise CheckpointError(f"the checkpoint in {self._folder} is of another config")
        self._tally = Tally.from_dict(state)
        self._fleet.load_state_dict(state["fleet"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._local.load_state_dict(state["local"])
        return state

    def _summarize(self) -> Summary:
        model = self._fleet.modules[0]
        summary = self._tally.summary(
            self._config.label, weights_sha256=fingerprint([*model.parameters(), *model.buffers()])
        )
        if self._rank == 0:
            tensors = {
                name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state_of(model).items()
            }
            write(self._folder / files.MODEL, save(tensors))
            write(self._folder / files.SUMMARY, json.dumps(asdict(summary), indent=2).encode())
        return summary


def _to(data: Data, device: torch.device) -> Data:
    moved: dict[str, Any] = {}
    for field in dataclasses.fields(data):
        part = getattr(data, field.name)
        moved[field.name] = part.to(device) if isinstance(part, Tensor) else part
    return Data(**moved)


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
