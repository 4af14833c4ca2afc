"""One run: a config in, records out.

    config -> task and method -> LocalSGD over the hosted workers -> records.jsonl, summary.json, checkpoints

The same code runs in one process, in each process of ``launch`` and under torchrun: every process trains the workers
it hosts, rank 0 writes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

import prsgd
from prsgd import cluster as clusters
from prsgd import tasks
from prsgd.clocks.trace import to_chrome
from prsgd.cluster.clock import ClusterClock, Sleeper
from prsgd.comm.in_process import InProcess
from prsgd.core.local_sgd import LocalSGD
from prsgd.errors import CheckpointError, DivergedError
from prsgd.lab import events, methods
from prsgd.lab.checkpoint import Checkpoints, fingerprint, newest_common, write
from prsgd.lab.config import Config, lr_at
from prsgd.lab.feed import Feed, class_counts, deal, num_steps
from prsgd.records import Evaluation, Record, Summary
from prsgd.replicas.fleet import Fleet
from prsgd.tasks.base import Data

EVALUATE_AT_MOST = 5_000
"""Training samples in an evaluation; the test set is taken whole."""
EVALUATE_BATCH = 500
LOCK = ".lock"
MODEL = "model.safetensors"
"""In a run's folder: the final model's state_dict."""


@dataclass(frozen=True)
class Progress:
    """What a display shows."""

    step: int
    num_steps: int
    epoch: float
    num_epochs: float
    round: int
    evaluation: Evaluation | None
    seconds: float
    seconds_left: float | None


class Stopped(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The run was stopped before its end; its checkpoint is of this step."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


Observer = Callable[[Progress], None]


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
    several processes it does so when the epoch ends, where all of them agree.
    """
    with _locked(folder, _rank()):
        return _Run(config, folder, observe or _nobody, should_stop or _never, tensorboard and _rank() == 0).go()


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
        self._tensorboard = tensorboard
        self._events: events.Events | None = None
        self._task = tasks.find(config.task)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._data = _to(tasks.load(config.task), device)
        torch.manual_seed(config.seed)
        assert config.model is not None
        cluster = config.modelled()
        through_server = cluster is not None and cluster.shape == "parameter-server" and config.processes == 1
        comm = InProcess(config.workers, shape="parameter-server") if through_server else None
        model = self._task.models[config.model]().to(device)
        self._fleet = Fleet(model, config.workers, seed=config.seed, comm=comm)
        self._rank = _rank()
        self._shards = deal(config, self._data, self._fleet.workers)
        self._num_steps = num_steps(config, self._shards)
        self._feed = Feed(config, self._task, self._data, self._shards, self._fleet.workers)
        self._uneven = methods.find(config.method).uneven
        self._model_clock = ClusterClock(cluster, seed=config.seed) if cluster and config.processes == 1 else None
        self._sleeper = None
        if cluster is not None and config.processes > 1:
            self._sleeper = Sleeper(cluster, self._fleet.workers.start, config.seed)
        assert config.momentum is not None
        self._optimizer = torch.optim.SGD(
            self._fleet.parameters(),
            lr=lr_at(config, 0, self._num_steps),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            foreach=True,
        )
        parts = config.parts()
        self._local = LocalSGD(
            self._fleet,
            self._optimizer,
            schedule=parts.schedule,
            averaging=parts.averaging,
            optimizer_state=parts.optimizer_state,
            overlap=config.overlap or 0,
            clock=self._model_clock,
            on_record=self._on_record,
        )
        self._checkpoints = Checkpoints(folder, rank=self._rank)
        self._step = self._epochs_seen = 0
        self._samples_per_step = config.workers * self._shards.batch_size
        self._seconds = 0.0
        self._evaluation: Evaluation | None = None
        self._best: float | None = None
        self._first_loss = math.inf
        self._totals = {"rounds": 0, "bytes_sent": 0, "drift": 0.0, "drifts": 0, "samples": 0}
        self._file: IO[str] | None = None
        self._shown = 0.0
        self._stopping = False

    def go(self) -> Summary:
        """Train to the end."""
        state = self._resume()
        if self._rank == 0:
            self._file = _open_records(self._folder / "records.jsonl", 0 if state is None else state["records_bytes"])
        if self._tensorboard:
            self._events = events.Events(self._folder, from_step=self._step)
        try:
            with self._local:
                if state is None:
                    self._evaluate()
                self._train()
            self._evaluation = None  # what was seen before the last average
            self._evaluate(over=True)
        finally:
            for open_file in (self._file, self._events):
                if open_file is not None:
                    open_file.close()
            if self._local.records:
                content = json.dumps(to_chrome(self._local.trace.spans()))
                write(self._folder / f"trace-{self._rank}.json", content.encode())
        return self._summarize()

    def _train(self) -> None:
        length = self._shards.steps_per_epoch
        recipe = methods.find(self._config.method).keeps_lr
        began = time.perf_counter()
        while not self._is_over():
            if recipe:
                for group in self._optimizer.param_groups:
                    group["lr"] = lr_at(self._config, int(self._taken()), self._num_steps)
            x, y = self._feed.batch(self._local.steps)
            self._optimizer.zero_grad()
            losses = self._fleet.backward(self._task.loss_fn, x, y)
            self._local.log(loss=losses, samples=self._shards.batch_size)
            if self._sleeper is not None:
                self._sleeper.wait(began)
            self._optimizer.step()
            self._step += 1
            now = time.perf_counter()
            self._seconds += now - began
            if self._is_over():
                break
            if self._taken() // length > self._epochs_seen:
                self._epochs_seen = int(self._taken() // length)
                self._evaluate()
                with self._local.paused():
                    self._save()
                if self._stopping:
                    raise Stopped(self._step)
            elif self._alone and self._should_stop():
                self._save()
                raise Stopped(self._step)
            if now - self._shown > 0.1:
                self._show()
            began = time.perf_counter()

    def _taken(self) -> float:
        """Steps of each worker; where workers differ, their mean.

        In several processes from the records, so that all know the same in the same round: the round whose record is
        not complete is taken to have had as many samples as the one before.
        """
        if not self._uneven:
            return self._step
        if self._alone:
            return sum(self._local.steps) / self._config.workers
        last = self._local.records[-1] if self._local.records else None
        unknown = 0 if last is None else (self._local.round - last.round) * last.samples
        return (self._totals["samples"] + unknown) / self._samples_per_step

    def _is_over(self) -> bool:
        if self._uneven and self._local.step >= self._num_steps * self._config.workers:
            return True  # a worker that has trained on everybody's share, before the first record told
        return self._taken() >= self._num_steps

    # Looking at it

    @property
    def _alone(self) -> bool:
        return len(self._fleet.workers) == self._fleet.num_workers

    def _evaluate(self, *, over: bool = False) -> None:
        """The consensus's losses and accuracy, each process on its part of the samples; and whether to stop."""
        if over:
            sums = self._sums(self._fleet.modules[0])  # it is the consensus
        else:
            began = time.perf_counter()
            with self._local.consensus() as model:
                if not self._alone:  # waiting for slower workers is a part of the run
                    self._seconds += time.perf_counter() - began
                sums = self._sums(model)
        train_loss, train_size, test_loss, test_size, right, stop, steps = sums.tolist()
        length = self._shards.steps_per_epoch
        accuracy = right / test_size if self._task.has_accuracy else None
        self._stopping = stop > 0
        self._evaluation = Evaluation(
            epoch=steps / self._config.workers / length,
            step=self._step if not self._uneven else self._num_steps if over else self._epochs_seen * length,
            train_loss=train_loss / train_size,
            test_loss=test_loss / test_size,
            test_accuracy=accuracy,
            seconds=self._seconds,
            modelled_seconds=self._modelled_seconds(),
        )
        if not self._step:
            self._first_loss = self._evaluation.train_loss
        if accuracy is not None:
            self._best = max(accuracy, self._best or 0.0)
        self._write({"kind": "evaluation", **asdict(self._evaluation)})
        self._show()

    def _modelled_seconds(self) -> float | None:
        clock = self._model_clock
        return None if clock is None else max(clock(worker) for worker in self._fleet.workers)

    @torch.no_grad()
    def _sums(self, model: nn.Module) -> Tensor:
        model.eval()
        data, workers, everyone = self._data, self._fleet.workers, self._fleet.num_workers
        found: list[float] = []
        right = 0.0
        for x, y in ((data.train_x[:EVALUATE_AT_MOST], data.train_y), (data.test_x, data.test_y)):
            mine = range(len(x) * workers.start // everyone, len(x) * workers.stop // everyone)
            total = right = 0.0
            for begin in range(mine.start, mine.stop, EVALUATE_BATCH):
                end = min(begin + EVALUATE_BATCH, mine.stop)
                out = model(self._task.prepare(x[begin:end]))
                total += float(self._task.loss_fn(out, y[begin:end])) * (end - begin)
                if self._task.has_accuracy:
                    right += float((out.argmax(dim=1) == y[begin:end]).sum())
            found += [total, float(len(mine))]
        model.train()
        beside = [right, float(self._should_stop()), float(sum(self._local.steps))]
        sums = torch.tensor([*found, *beside], dtype=torch.float64)
        if self._alone:
            return sums
        summed: Tensor = self._fleet.comm.all_reduce(sums.to(data.train_x.device)).wait()
        return summed.cpu()

    def _show(self) -> None:
        self._shown = time.perf_counter()
        if self._rank:
            return
        taken = min(1.0, self._taken() / self._num_steps)
        left = self._seconds * (1 - taken) / taken if taken else None
        length = self._shards.steps_per_epoch
        self._observe(
            Progress(
                step=int(self._taken()),
                num_steps=self._num_steps,
                epoch=self._taken() / length,
                num_epochs=self._num_steps / length,
                round=self._local.round,
                evaluation=self._evaluation,
                seconds=self._seconds,
                seconds_left=left,
            )
        )

    # What stays

    def _on_record(self, record: Record) -> None:
        totals = self._totals
        totals["rounds"] += 1
        totals["bytes_sent"] += record.bytes_sent
        totals["samples"] += record.samples
        if record.drift is not None:
            totals["drift"] += record.drift
            totals["drifts"] += 1
        self._write({"kind": "average", **asdict(record)})

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
        if self._events is not None:
            self._events.add(line)

    def _save(self) -> None:
        if self._file is not None:
            self._file.flush()
        state = {
            "config": asdict(self._config),
            "step": self._step,
            "epochs_seen": self._epochs_seen,
            "seconds": self._seconds,
            "best": self._best,
            "first_loss": self._first_loss,
            "totals": self._totals,
            "evaluation": None if self._evaluation is None else asdict(self._evaluation),
            "records_bytes": 0 if self._file is None else self._file.tell(),
            "fleet": self._fleet.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "local": self._local.state_dict(),
        }
        # In several processes whose steps differ, by what they have in common.
        common = self._uneven and not self._alone
        self._checkpoints.save(self._epochs_seen * self._shards.steps_per_epoch if common else self._step, state)

    def _resume(self) -> dict[str, Any] | None:
        step = self._common_step()
        if step is None:
            return None
        state: dict[str, Any] = self._checkpoints.load(step)
        if Config.from_dict(state["config"]) != self._config:
            raise CheckpointError(f"the checkpoint in {self._folder} is of another config")
        self._step, self._seconds, self._best = state["step"], state["seconds"], state["best"]
        self._epochs_seen = state.get("epochs_seen", self._step // self._shards.steps_per_epoch)
        self._first_loss = state.get("first_loss", math.inf)
        self._totals = state["totals"]
        self._evaluation = None if state["evaluation"] is None else Evaluation(**state["evaluation"])
        self._fleet.load_state_dict(state["fleet"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._local.load_state_dict(state["local"])
        return state

    def _common_step(self) -> int | None:
        """The newest checkpoint that every process has whole."""
        steps = self._checkpoints.steps()
        common = newest_common([steps] if self._alone else self._everyones(steps), self._folder)
        self._checkpoints.forget_all_but([step for step in steps if common is not None and step <= common])
        return common

    def _everyones(self, steps: Sequence[int]) -> list[set[int]]:
        newest = torch.full((8,), -1, dtype=torch.int64)
        kept = steps[-len(newest) :]
        newest[: len(kept)] = torch.tensor(kept, dtype=torch.int64)
        rows = newest.expand(len(self._fleet.workers), -1).to(self._data.train_x.device, copy=True)
        everyones = self._fleet.comm.all_gather(rows).wait()
        return [{step for step in part.tolist() if step >= 0} for part in everyones]

    def _summarize(self) -> Summary:
        evaluation, totals = self._evaluation, self._totals
        assert evaluation is not None
        if not torch.isfinite(torch.tensor(evaluation.train_loss)):
            raise DivergedError(f"the training loss is {evaluation.train_loss} after {self._step} steps")
        model = self._fleet.modules[0]
        summary = Summary(
            label=self._config.label,
            first_train_loss=self._first_loss,
            train_loss=evaluation.train_loss,
            test_loss=evaluation.test_loss,
            test_accuracy=evaluation.test_accuracy,
            best_test_accuracy=self._best,
            epochs=evaluation.epoch,
            steps=self._step,
            rounds=int(totals["rounds"]),
            bytes_sent=int(totals["bytes_sent"]),
            mean_drift=totals["drift"] / totals["drifts"] if totals["drifts"] else None,
            seconds=self._seconds,
            samples=int(totals["samples"]),
            weights_sha256=fingerprint([*model.parameters(), *model.buffers()]),
            modelled_seconds=self._modelled_seconds(),
        )
        if self._rank == 0:
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
            write(self._folder / MODEL, save(tensors))
            write(self._folder / "summary.json", json.dumps(asdict(summary), indent=2).encode())
        return summary


def prepare(config: Config, folder: Path) -> None:
    """Make a new run's folder, with what is known before it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "split.json", json.dumps({"counts": class_counts(config)}).encode())
    write(folder / "environment.json", json.dumps(environment(), indent=2).encode())
    cluster = config.modelled()
    if cluster is not None:
        clusters.write(cluster, folder / "cluster.toml")
    write(folder / "config.json", config.to_json().encode())


def environment() -> dict[str, Any]:
    """What a run's numbers may depend on beside its config."""
    return {
        "prsgd": prsgd.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
    }


def _open_records(path: Path, num_bytes: int) -> IO[str]:
    """The run's lines up to the checkpoint; what was written after it will be written again."""
    file = path.open("a")
    if file.seek(0, 2) < num_bytes:
        file.close()
        raise CheckpointError(f"{path} is shorter than when the checkpoint was written: lines are missing")
    file.truncate(num_bytes)
    file.seek(0, 2)
    return file


@contextmanager
def _locked(folder: Path, rank: int) -> Iterator[None]:
    """Keep others from training in the same folder. Where a file system has no locks, they are trusted."""
    if rank:
        yield
        return
    with (folder / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is training in {folder}") from None
        except OSError:
            pass
        yield


def _to(data: Data, device: torch.device) -> Data:
    return Data(**{f.name: getattr(data, f.name).to(device) for f in dataclasses.fields(data)})


def _rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
