"""What a run is: everything that its numbers depend on, checked before anything is trained."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prsgd import cluster as clusters
from prsgd import tasks
from prsgd._check import from_zero_to, nearest, one_of, positive, shown, whole_number, whole_number_or_auto
from prsgd.averaging.base import Setting
from prsgd.core.fragments import check_fragments
from prsgd.data import splits
from prsgd.lab import methods, recipe

if TYPE_CHECKING:
    from prsgd.tasks.base import Task

LARGEST = 1e30
"""Of what is multiplied with float32 numbers."""
MOST = 10**12
"""Of what is counted, steps above all: more would not end within anybody's life."""
_FLOATS = ("lr", "momentum", "weight_decay", "clip")
MOST_WORKERS = 10_000
"""In one simulation; some averagings keep a number for each pair of them."""


@dataclass(frozen=True)
class Config:
    """One run. What is None is filled in by ``resolve``, from the task and the method.

    >>> config = Config(task="digits", period=4).resolve()
    >>> config.model, config.batch_size, config.epochs, config.lr, config.momentum
    ('mlp', 8, 40, 0.1, 0.9)
    """

    task: str = "digits"
    """By name, or a file of the user's own."""
    task_sha256: str | None = None
    """Of that file, when the run was begun."""
    model: str | None = None
    method: str = "pr-sgd"
    workers: int = 8
    period: int | None = None
    """8, where the method has one."""
    overlap: int | Literal["auto"] | None = None
    """The method's own."""
    epochs: int | None = None
    steps: int | None = None
    """Instead of epochs: steps of each worker."""
    batch_size: int | None = None
    """Of each worker."""
    lr: float | None = None
    momentum: float | None = None
    """Of SGD; of AdamW its first beta."""
    weight_decay: float | None = None
    split: str = "iid"
    data: str | None = None
    """A file of the user's own, for a task that takes one."""
    data_sha256: str | None = None
    """Of that file, or of the data of the user's own task, when the run was begun."""
    look: int | None = None
    """Steps of each worker between two evaluations; an epoch, unless the task has its own."""
    seed: int = 0
    processes: int = 1
    cluster: str | None = None
    """A modelled one, by name or file; with as many processes as workers, played by sleeping."""
    seconds: float | None = None
    """Of a round by the clock; PERIOD steps of the cluster's slowest worker unless given."""
    weights: str = "uniform"
    switch: int | float | None = None
    """Of a method with two phases: steps of each worker before it, or a fraction of the run; the method's own."""
    outer_lr: float | None = None
    outer_momentum: float | None = None
    """Of a method whose averages are steps of an outer optimizer; the method's own."""
    fragments: int | None = None
    """Parts in which the model travels, one after the other; the method's own, mostly 1."""
    optimizer: str | None = None
    """What this is decides on what else is usual: lr, recipe, warmup, weight_decay and clip."""
    recipe: str | None = None
    """How the lr goes; None for a method that sets it itself."""
    warmup: int | float | None = None
    """Steps of each worker in which the lr rises, or a fraction of the run."""
    clip: float | None = None
    """The largest norm of a worker's gradient; 0: any."""
    accumulate: int = 1
    """Parts in which a batch goes through the model, one after another."""

    def resolve(self) -> Config:
        """With every choice made and checked; a ValueError names what cannot be."""
        task, method = tasks.find(self.task, self.task_sha256), methods.find(self.method)
        model = self.model if self.model is not None else next(iter(task.models))
        one_of("model", model, task.models)
        optimizer = _or(self.optimizer, method.optimizer or task.defaults.get("optimizer", "sgd"))
        if method.optimizer not in (None, optimizer):
            raise ValueError(f"method {self.method} is one of {method.optimizer}, got optimizer {shown(optimizer)}")
        ours = recipe.OPTIMIZERS[one_of("optimizer", optimizer, recipe.OPTIMIZERS)]
        usual: dict[str, Any] = {"batch_size": 32, "momentum": 0.9, "epochs": 10, **asdict(ours), **task.defaults}
        if optimizer != task.defaults.get("optimizer", "sgd"):
            usual["lr"] = ours.lr  # the task's own goes with its own optimizer
        if self.steps is not None and self.epochs is not None:
            raise ValueError("epochs and steps are two ways to say how long: give one of them")
        if self.period is not None and method.period is None:
            raise ValueError(f"method {self.method} has no period, got {shown(self.period)}")
        if self.seconds is not None and not method.by_clock:
            raise ValueError(f"method {self.method} has no rounds by the clock, got seconds {shown(self.seconds)}")
        for name in methods.SPECIAL:
            if getattr(self, name) is not None and not method.takes(name):
                raise ValueError(f"method {self.method} has no {name}, got {shown(getattr(self, name))}")
        found = dataclasses.replace(
            self,
            cluster=None if self.cluster is None else clusters.placed(self.cluster),
            model=model,
            period=self._period(method),
            overlap=_or(self.overlap, method.overlap),
            epochs=None if self.steps is not None else _or(self.epochs, usual["epochs"]),
            batch_size=_or(self.batch_size, usual["batch_size"]),
            optimizer=optimizer,
            look=_or(self.look, usual.get("look")),
            **self._file(task),
            **{
                name: _or(getattr(self, name), usual[name]) for name in _FLOATS + ("recipe", "warmup") * method.keeps_lr
            },
        )
        found._check()
        given = [name for name in ("outer_lr", "outer_momentum") if getattr(found, name) is not None]
        floats: dict[str, Any] = {name: float(getattr(found, name)) for name in (*_FLOATS, *given)}
        found = dataclasses.replace(found, **floats)  # a whole number in a file stands for one
        return dataclasses.replace(found, seconds=found._seconds()) if method.by_clock else found

    def modelled(self) -> clusters.Cluster | None:
        """The cluster; None: the machine itself."""
        return None if self.cluster is None else clusters.load(self.cluster, self.workers)

    def _file(self, task: Task) -> dict[str, Any]:
        """The user's own, data or task: by its whole path, since a run may be continued from another folder, and as it
        is now."""
        if self.data is None:
            return tasks.known_by(self.task) if self.task_sha256 is None else {}
        if task.read is None:
            raise ValueError(f"task {self.task} takes no data of your own, got {shown(self.data)}")
        if self.data_sha256 is not None:
            return {}
        return {"data": str(Path(self.data).resolve()), "data_sha256": tasks.sha256_of(self.data)}

    def _period(self, method: methods.Method) -> int | None:
        if method.by_clock and self.seconds is not None:
            return self.period
        return method.period if self.period is None else self.period

    def _seconds(self) -> float:
        """As given, or from the period."""
        cluster = self.modelled()
        if cluster is None and self.seconds is None:
            raise ValueError(f"method {self.method} needs to know how long a round lasts: --seconds, or a --cluster")
        if self.period is None:
            return positive("seconds", self.seconds)
        if cluster is None:
            raise ValueError("seconds and period are two ways to say how long a round lasts: give one of them")
        seconds = float(f"{self.period * cluster.slowest_step_seconds:.6g}")
        if self.seconds not in (None, seconds):
            raise ValueError(
                f"seconds and period are two ways to say how long a round lasts: period {self.period} on this cluster "
                f"is {seconds:g}, got {self.seconds:g}"
            )
        return seconds

    def _check(self) -> None:
        whole_number("workers", self.workers, at_least=1, at_most=MOST_WORKERS)
        for name in ("period", "epochs", "steps", "batch_size", "processes", "look", "fragments"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), at_least=1, at_most=MOST)
        whole_number_or_auto("overlap", self.overlap, at_least=0, at_most=MOST)
        if whole_number("seed", self.seed, at_least=0) >= 2**63:
            raise ValueError(f"seed must be below 2^63, got {shown(self.seed)}")
        if positive("lr", self.lr) > LARGEST:
            raise ValueError(f"lr must be at most {LARGEST:g}, got {self.lr!r}")
        if self.outer_lr is not None and positive("outer_lr", self.outer_lr) > LARGEST:
            raise ValueError(f"outer_lr must be at most {LARGEST:g}, got {self.outer_lr!r}")
        if self.outer_momentum is not None:
            from_zero_to("outer_momentum", self.outer_momentum, 1.0)
        from_zero_to("momentum", self.momentum, 1.0)
        from_zero_to("weight_decay", self.weight_decay, LARGEST)
        from_zero_to("clip", self.clip, LARGEST)
        assert self.batch_size is not None
        if self.batch_size % whole_number("accumulate", self.accumulate, at_least=1):
            raise ValueError(
                f"accumulate must divide the batch size {self.batch_size}, of which it makes parts, "
                f"got {self.accumulate}"
            )
        self._check_recipe()
        splits.parse(self.split)
        if one_of("weights", self.weights, ("uniform", "steps")) != "uniform" and not methods.find(self.method).weighs:
            raise ValueError(f"method {self.method} takes no weights, got {self.weights}")
        if self.modelled() is not None and self.processes not in (1, self.workers):
            raise ValueError(
                f"processes must be 1, or one per worker ({self.workers}), with a cluster, got {self.processes}"
            )
        if self.seconds is not None:
            positive("seconds", self.seconds)
        self._check_switch()
        self._check_uneven()
        if self.processes > self.workers:
            raise ValueError(f"processes must be at most the number of workers {self.workers}, got {self.processes}")
        assert self.overlap is not None
        parts = self.parts()
        mode = parts.optimizer_state if isinstance(parts.optimizer_state, str) else "average"
        setting = Setting.of(parts.schedule, self.workers, self.overlap, mode)
        parts.schedule.check(self.workers, setting.overlap)
        if mode == "average" and self.overlap not in (0, 1):
            raise ValueError(f"overlap must be 0 or 1 with method {self.method}, got {self.overlap!r}")
        check_fragments(parts.fragments, parts.schedule, parts.averaging, setting)
        try:
            setting.require(parts.averaging)
        except ValueError as error:
            raise ValueError(f"method {self.method}: {error}") from None

    def _check_recipe(self) -> None:
        if self.recipe is not None:
            one_of("recipe", self.recipe, recipe.RECIPES)
        warmup = self.warmup
        is_count = isinstance(warmup, int) and not isinstance(warmup, bool) and 0 <= warmup <= MOST
        if warmup is not None and not is_count and not (isinstance(warmup, float) and 0 <= warmup < 1):
            raise ValueError(
                f"warmup must be a whole number of steps >= 0, or a fraction of the run in [0, 1), got {shown(warmup)}"
            )

    def _check_switch(self) -> None:
        """Whether it is within the run is seen when the parts are made for a run of known length."""
        switch = self.switch
        is_count = isinstance(switch, int) and not isinstance(switch, bool) and switch >= 1
        if switch is not None and not is_count and not (isinstance(switch, float) and 0 < switch < 1):
            raise ValueError(
                "switch must be a whole number of steps >= 1, or a fraction of the run between 0 and 1, "
                f"got {shown(switch)}"
            )

    def _check_uneven(self) -> None:
        """In several processes an evaluation must find its place between two averages, the same in all of them."""
        method = methods.find(self.method)
        if self.processes == 1 or not method.uneven or not self.overlap:
            return
        if method.by_clock:
            raise ValueError(f"overlap must be 0 with method {self.method} in several processes, got {self.overlap!r}")
        if self.period is not None and (self.overlap == "auto" or self.overlap >= self.period):
            raise ValueError(
                f"overlap must be below the period {self.period} with method {self.method} in several processes, "
                f"got {self.overlap!r}"
            )

    def parts(self, num_steps: int | None = None) -> methods.Parts:
        """The method's parts, for a run of ``num_steps`` steps of each worker where that is known."""
        assert self.lr is not None
        given = methods.Settings(
            period=self.period or 1,
            lr=self.lr,
            seconds=self.seconds or 1.0,
            weights=self.weights,
            seed=self.seed,
            num_steps=num_steps,
            switch=self.switch,
            outer_lr=self.outer_lr,
            outer_momentum=self.outer_momentum,
        )
        built = methods.find(self.method).build(given)
        return built if self.fragments is None else dataclasses.replace(built, fragments=self.fragments)

    @property
    def label(self) -> str:
        """What tells this run from others: the method, and its period if it has one."""
        return methods.label(
            self.method, period=self.period, seconds=self.seconds, overlap=self.overlap, fragments=self.fragments
        )

    @property
    def folder_name(self) -> str:
        """Of this run among those that it is compared with."""
        return f"{self.label.replace(' ', '-')}-seed-{self.seed}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Config:
        """Unknown keys and wrong types are refused."""
        kinds = {f.name: f.type for f in dataclasses.fields(cls)}
        for key, value in values.items():
            name = key.replace("-", "_")
            if name not in kinds:
                raise ValueError(f"unknown key {key!r}{nearest(name, kinds)}")
            wanted = str(kinds[name])
            if "str" in wanted and not isinstance(value, str | None):
                raise ValueError(f"{key} must be a text, got {shown(value)}")
            if value is None and "None" not in wanted:
                raise ValueError(f"{key} must have a value")
        return cls(**{key.replace("-", "_"): value for key, value in values.items()})


def lr_at(config: Config, step: int, num_steps: int) -> float:
    """By the config's recipe; step ``step`` + 1 of ``num_steps``.

    >>> lr_at(Config(lr=0.1, warmup=0.25), 1, 12)
    0.06666666666666667
    """
    assert config.lr is not None
    warmup = config.warmup or 0
    warmup = math.ceil(warmup * num_steps) if isinstance(warmup, float) else min(warmup, num_steps)
    return recipe.lr_at(config.lr, step, num_steps, recipe=config.recipe or "drops", warmup=warmup)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
