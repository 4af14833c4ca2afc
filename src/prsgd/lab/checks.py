"""What is looked at before anything is trained."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prsgd import tasks
from prsgd._check import shown, whole_number
from prsgd._warn import warn
from prsgd.comm import job
from prsgd.core.fragments import dealt
from prsgd.data import splits
from prsgd.lab import feed, methods
from prsgd.lab.checkpoint import Checkpoints, newest_common
from prsgd.lab.config import MOST, Config
from prsgd.replicas.rows import trainable
from prsgd.tasks.own import try_out

MOST_PROCESSES = 1024
"""That we start on this machine: each imports torch."""


def check(config: Config) -> None:
    """See that the data are there and can be dealt out so, and that there is an end; a ValueError or DataError else."""
    if job.find() is None:  # which starts as many as it was told, on many machines
        whole_number("processes", config.processes, at_least=1, at_most=MOST_PROCESSES)
    shards = feed.deal(config, feed.load(config))
    if feed.num_steps(config, shards) > MOST:
        length = shards.steps_per_epoch
        raise ValueError(
            f"epochs must be at most {MOST // length:,} for {length:,} steps each, got {shown(config.epochs)}"
        )
    config.parts(feed.num_steps(config, shards))  # what does not fit into the run is refused by its part
    if config.task_sha256 is not None:
        _try_out(config)
    if config.fragments is not None:
        assert config.model is not None
        model = tasks.find(config.task, config.task_sha256).models[config.model]()
        dealt(trainable(model), config.fragments)  # which refuses more of them than there are layers


def _try_out(config: Config) -> None:
    """A user's own task: before a run that would fail at its first step has a folder."""
    assert config.model is not None
    assert config.batch_size is not None
    try:
        try_out(tasks.find(config.task, config.task_sha256), model=config.model, batch_size=config.batch_size)
    except ValueError as error:
        raise ValueError(f"task {config.task}: {error}") from None


def warn_about(configs: Iterable[Config]) -> None:
    """Of what can be trained but is not what the theory is about."""
    alike = (splits.iid(), splits.pool())
    for config in {c.method: c for c in configs}.values():
        if methods.find(config.method).uneven and splits.parse(config.split) not in alike:
            warn(
                f"{config.method} on a {config.split} split: workers that take more steps pull the model towards their "
                "own data (the paper's Assumption 2, identical distributions, does not hold)",
            )


def check_checkpoints(config: Config, folder: Path) -> None:
    """A CheckpointError if the run in ``folder`` cannot be continued."""
    steps = [Checkpoints(folder, rank=rank).whole(on_damage=lambda _: None) for rank in range(config.processes)]
    if job.find() is None:  # there, other machines may have the others' files
        newest_common(steps, folder)
