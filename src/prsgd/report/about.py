"""What was run, in words and as command lines that run it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prsgd.report.curves import follows_recipe
from prsgd.report.read import Run
from prsgd.report.series import Group

_OPTIONS = ("task", "model", "method", "workers", "period", "overlap", "epochs", "steps", "batch_size", "lr", "momentum",
            "weight_decay", "split", "processes")  # fmt: skip
_USUAL = {"method": "pr-sgd", "overlap": 0, "weight_decay": 0.0, "split": "iid", "processes": 1}
"""What need not be typed. The rest depends on the task, and is typed to be exact."""


def title(groups: Sequence[Group]) -> str:
    """
    >>> title([])
    'No runs'
    """
    if not groups:
        return "No runs"
    config = groups[0].runs[0].config
    what = f"{config['model']} on {config['task']}"
    if len(groups) == 1:
        return f"{what}: {groups[0].label}"
    periods = [group.name.removeprefix("period ") for group in groups]
    if all(period.isdigit() for period in periods):
        return f"{what}: period {', '.join(periods[:-1])} and {periods[-1]}"
    return f"{what}: {len(groups)} ways to average"


def what_was_run(groups: Sequence[Group]) -> list[str]:
    """A paragraph, as sentences."""
    runs = [run for group in groups for run in group.runs]
    length = f"{_values(runs, 'epochs')} epochs" if _values(runs, "epochs") else f"{_values(runs, 'steps')} steps"
    decay = _values(runs, "weight_decay")
    momentum = f"momentum {_values(runs, 'momentum')}" + (
        "" if decay in ("", "0", "0.0") else f", weight decay {decay}"
    )
    seeds = sorted({run.config["seed"] for run in runs})
    lr = f"lr {_values(runs, 'lr')}"
    recipe = f"{lr}, divided by 10 at 1/2 and 11/12 of the run" if follows_recipe(groups) else f"{lr} at the most"
    return [
        f"{_values(runs, 'workers')} workers trained the model {_values(runs, 'model')} on {_values(runs, 'task')} "
        f"for {length}, each with batches of {_values(runs, 'batch_size')} samples of its own.",
        f"The optimizer is SGD with {momentum}; {recipe}.",
        split_sentence(_values(runs, "split")),
        _compared(groups),
        f"Each was run with {len(seeds)} seeds ({', '.join(map(str, seeds))}): a line is their mean, the band around it "
        "reaches from the lowest to the highest."
        if len(seeds) > 1
        else f"There is one seed ({seeds[0]}), so the curves have no band.",
    ]


def split_sentence(split: str) -> str:
    """
    >>> split_sentence("pool")
    'All workers draw from one pool that holds all samples.'
    """
    name, _, alpha = split.partition(":")
    if name == "dirichlet":
        return (
            f"Each worker keeps a share of its own whose classes are mixed by Dirichlet({alpha}): the smaller the number, "
            "the fewer classes a worker sees."
        )
    known = {
        "pool": "All workers draw from one pool that holds all samples.",
        "iid": "In each epoch the samples are dealt out anew at random, in equal shares (iid).",
    }
    return known.get(split, f"The data are split: {split}.")


def commands(groups: Sequence[Group]) -> list[str]:
    """One line for all periods and seeds of a method, or one a run where the seeds are not 0, 1, 2, ..."""
    batches: dict[tuple[Any, ...], list[Run]] = {}
    for group in groups:
        for run in group.runs:
            alike = tuple(run.config.get(key) for key in _OPTIONS if key != "period")
            batches.setdefault(alike, []).append(run)
    return [line for runs in batches.values() for line in _command(runs)]


def _command(runs: Sequence[Run]) -> list[str]:
    periods = sorted({run.config["period"] for run in runs if run.config.get("period") is not None})
    seeds = sorted({run.config["seed"] for run in runs})
    whole = seeds == list(range(len(seeds))) and len(runs) == len(seeds) * max(1, len(periods))
    if not whole or len(runs) == 1:
        return [
            f"prsgd train {_typed(run.config, run.config.get('period'))} --seed {run.config['seed']}" for run in runs
        ]
    several = " ".join(map(str, periods)) or None
    return [f"prsgd compare {_typed(runs[0].config, several)} --seeds {len(seeds)}"]


def _typed(config: dict[str, Any], period: object) -> str:
    given = {**{key: config.get(key) for key in _OPTIONS}, "period": period}
    return " ".join(
        f"--{key.replace('_', '-')} {value}"
        for key, value in given.items()
        if value is not None and value != _USUAL.get(key)
    )


def environments(groups: Sequence[Group]) -> dict[str, str]:
    """What the runs' numbers may depend on beside their configs; several values where the runs differ."""
    found: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            for key, value in run.environment.items():
                if value is not None and str(value) not in found.setdefault(key, []):
                    found[key].append(str(value))
    return {key: ", ".join(values) for key, values in found.items() if values}


def _compared(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return f"The method is {groups[0].label}."
    names = [group.name for group in groups]
    if all(name.startswith("period ") for name in names):
        numbers = ", ".join(name.removeprefix("period ") for name in names)
        return (
            f"The runs differ in how often the workers average their models: every {numbers} steps. "
            f"Everything else is the same."
        )
    return f"The runs differ in when and how the workers average their models: {'; '.join(names)}."


def _values(runs: Sequence[Run], key: str) -> str:
    """
    >>> _values([], "lr")
    ''
    """
    found: list[str] = []
    for run in runs:
        value = run.config.get(key)
        if value is not None and str(value) not in found:
            found.append(str(value))
    return " or ".join(found)
