"""What was run, in words and as command lines that run it again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from typing import Any

from prsgd import tasks
from prsgd.lab.methods import METHODS, of_optimizer
from prsgd.lab.recipe import ADAM_BETA2, OPTIMIZERS
from prsgd.report.read import Run
from prsgd.report.series import Group, differing

_OPTIONS = (
    "task", "model", "method", "workers", "period", "overlap", "switch", "fragments", "outer_lr", "outer_momentum",
    "epochs", "steps", "batch_size", "lr", "momentum", "weight_decay", "optimizer", "recipe", "warmup", "clip",
    "accumulate", "split", "data", "look", "processes", "cluster", "seconds", "weights",
)  # fmt: skip
_PATHS = ("task", "data")
_VARIED = ("method", "period", "overlap")
_USUAL = {
    "method": "pr-sgd",
    "accumulate": "1",
    "split": "iid",
    "processes": "1",
    "weights": "uniform",
}
"""What need not be typed. The rest depends on the task, and is typed to be exact."""


def title(groups: Sequence[Group]) -> str:
    """What was trained on what, and what differs."""
    config = groups[0].runs[0].config
    what = f"{config['model']} on {tasks.short(config['task'])}"
    if len(groups) == 1:
        return f"{what}: {groups[0].label}"
    periods = [group.name.removeprefix("period ") for group in groups]
    if all(period.isdigit() for period in periods):
        return f"{what}: period {', '.join(periods[:-1])} and {periods[-1]}"
    ways = len({group.runs[0].label for group in groups})
    return f"{what}: {len(groups)} {'ways to average' if ways == len(groups) else 'runs'}"


def what_was_run(groups: Sequence[Group]) -> list[str]:
    """A paragraph, as sentences."""
    runs = [run for group in groups for run in group.runs]
    length = f"{_values(runs, 'epochs')} epochs" if _values(runs, "epochs") else f"{_values(runs, 'steps')} steps"
    workers = _values(runs, "workers")
    return [
        f"{workers} worker{'' if workers == '1' else 's'} trained the model {_values(runs, 'model')} on "
        f"{tasks.short(_values(runs, 'task'))} for {length}, each with batches of {_values(runs, 'batch_size')} "
        "samples of its own.",
        f"The optimizer is {_optimizer(runs)}; {_recipe(groups)}.",
        split_sentence(_values(runs, "split")),
        _compared(groups),
        _seeds(groups),
    ]


def _optimizer(runs: Sequence[Run]) -> str:
    name, momentum = _values(runs, "optimizer"), _values(runs, "momentum")
    known = {"sgd": f"SGD with momentum {momentum}", "adamw": f"AdamW with betas {momentum} and {ADAM_BETA2}"}
    more = [
        f", {words} {value}"
        for key, words in (("weight_decay", "weight decay"), ("clip", "gradients clipped to a norm of"))
        if (value := _values(runs, key)) not in ("", "0", "0.0")
    ]
    return known.get(name, f"{name} with momentum {momentum}") + "".join(more)


def _seeds(groups: Sequence[Group]) -> str:
    """Which seeds there are, of each group where they are not the same."""
    names: dict[tuple[int, ...], list[str]] = {}
    for group in groups:
        names.setdefault(group.seeds, []).append(group.name)
    band = "the band around it reaches from the lowest to the highest."
    if len(names) == 1:
        [seeds] = names
        if len(seeds) > 1:
            return f"Each was run with {len(seeds)} seeds ({_numbers(seeds)}): a line is their mean, {band}"
        return f"There is one seed ({seeds[0]}), so the curves have no band."
    parts = []
    for seeds, named in names.items():
        who = f"{', '.join(named[:-1])} and {named[-1]} have" if len(named) > 1 else f"{named[0]} has"
        parts.append(f"{who} {'one' if len(seeds) == 1 else len(seeds)} ({_numbers(seeds)})")
    several = any(len(seeds) > 1 for seeds in names)
    lines = f"A line is the mean of its seeds, {band}" if several else "So the curves have no band."
    return f"The seeds differ: {'; '.join(parts)}. {lines}"


def _numbers(seeds: Sequence[int]) -> str:
    """
    >>> _numbers([0, 1, 2]), _numbers(range(12)), _numbers([3, 9, 27])
    ('0, 1, 2', '0 to 11', '3, 9, 27')
    """
    if len(seeds) > 5 and list(seeds) == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _recipe(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    own = [g.name for g in groups if any(run.recipe is None for run in g.runs)]
    lr = f"lr {_values(runs, 'lr')}"
    if len(own) == len(groups):
        return f"{lr} at the most, set by the method"
    exception = f" ({', '.join(own)}: set by the method, at most that)" if own else ""
    falls = " or ".join(_FALLS.get(name, name) for name in dict.fromkeys(run.recipe for run in runs) if name)
    rises = " or ".join(filter(None, dict.fromkeys(_rising(run.config.get("warmup")) for run in runs)))
    return f"{lr}, {falls}{rises}{exception}"


_FALLS = {
    "drops": "divided by 10 at 1/2 and 11/12 of the run",
    "cosine": "falling to a tenth along half a cosine",
}


def _rising(warmup: int | float | None) -> str:
    """
    >>> _rising(100), _rising(0.05), _rising(0.0)
    (', after a warm-up of 100 steps', ', after a warm-up of 5 % of the run', '')
    """
    if not warmup:
        return ""
    return (
        f", after a warm-up of {f'{warmup} steps' if isinstance(warmup, int) else f'{100 * warmup:.3g} % of the run'}"
    )


def split_sentence(split: str) -> str:
    """
    >>> split_sentence("pool")
    'All workers draw from one pool that holds all samples.'
    """
    name, _, alpha = split.partition(":")
    if name == "dirichlet":
        return (
            f"Each worker keeps a share of its own whose classes are mixed by Dirichlet({alpha}): "
            "the smaller the number, the fewer classes a worker sees."
        )
    known = {
        "era": "Each worker keeps an era of its own: the samples stand in the order of time, and are cut into equal "
        "shares.",
        "pool": "All workers draw from one pool that holds all samples.",
        "iid": "In each epoch the samples are dealt out anew at random, in equal shares (iid).",
    }
    return known.get(split, f"The data are split: {split}.")


def commands(groups: Sequence[Group]) -> list[list[str]]:
    """As few as do it, each in parts that stay on one line.

    ``prsgd compare`` runs every method with every period, overlap and seed: one line if the runs are such a product, or
    one for each method and overlap, or one for each period of these too, or one for each run.
    """
    runs = [run for group in groups for run in group.runs]
    for apart in ((), ("method", "overlap"), _VARIED):
        batches: dict[tuple[Any, ...], list[Run]] = {}
        for run in runs:
            alike = tuple(_given(run.config, key) for key in _OPTIONS if key in apart or key not in _VARIED)
            batches.setdefault(alike, []).append(run)
        lines = [_compare(batch) for batch in batches.values()]
        if len(runs) > 1 and all(lines):
            return lines
    return [["prsgd train", *_typed(run.config), f"--seed {run.config['seed']}"] for run in runs]


def _compare(runs: Sequence[Run]) -> list[str]:
    """The line that makes these runs and no others; empty if there is none."""
    made = [tuple(run.config.get(key) for key in (*_VARIED, "seed")) for run in runs]
    if len({method for method, *_ in made}) > 1 and all(_is_own(run.config, "period") for run in runs):
        made = [(method, None, overlap, seed) for method, _, overlap, seed in made]
    if all(_is_own(run.config, "overlap") for run in runs):
        made = [(method, period, None, seed) for method, period, _, seed in made]
    methods, periods, overlaps, seeds = (list(dict.fromkeys(column)) for column in zip(*made))
    without = {method for method, period, _, _ in made if period is None}
    numbers = [period for period in periods if period is not None]
    wanted = {
        (method, period, overlap, seed)
        for method, overlap, seed in product(methods, overlaps, seeds)
        for period in ([None] if method in without else numbers)
    }
    if set(made) != wanted or (len(seeds) == 1 and seeds != [0]):  # one number is how many
        return []
    several = {"method": methods, "period": numbers, "overlap": overlaps}
    words = {key: " ".join(str(v) for v in values if v is not None) or None for key, values in several.items()}
    if set(methods) == set(of_optimizer(str(runs[0].config.get("optimizer")))):
        words["method"] = "all"
    count = len(seeds) if seeds == list(range(len(seeds))) else " ".join(map(str, seeds))
    return ["prsgd compare", *_typed({**runs[0].config, **words}), f"--seeds {count}"]


def _is_own(config: dict[str, Any], key: str) -> bool:
    """Is the period, or the overlap, what the method has unless another is given?"""
    own = METHODS.get(config["method"])
    if own is None:
        return key == "overlap" and not config.get(key)
    return bool(config.get(key) == getattr(own, key))


def _given(config: dict[str, Any], key: str) -> Any:
    """What was typed; the seconds of a round follow from its period, where it has one."""
    if key == "overlap" and _is_own(config, key):
        return None
    return None if key == "seconds" and config.get("period") is not None else config.get(key)


def _typed(config: dict[str, Any]) -> list[str]:
    given = {key: _given(config, key) for key in _OPTIONS}
    own = OPTIMIZERS.get(str(config.get("optimizer")))
    usual = {
        **_USUAL,
        **({} if own is None else {key: str(value) for key, value in asdict(own).items() if key != "lr"}),
    }
    shown = {key: value for key, value in given.items() if value is not None and str(value) != usual.get(key)}
    shown |= {key: shlex.quote(shown[key]) for key in _PATHS if key in shown}
    return [f"--{key.replace('_', '-')} {value}" for key, value in shown.items()]


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
    if all(name.removeprefix("period ").isdigit() for name in names):
        *numbers, last = (name.removeprefix("period ") for name in names)
        return (
            "The runs differ in how often the workers average their models: "
            f"every {', '.join(numbers)} or {last} steps. Everything else is the same."
        )
    keys = differing(run for group in groups for run in group.runs)
    more = f" They differ in {' and '.join(key.replace('_', ' ') for key in keys)} too." if keys else ""
    return f"Runs that differ in when and how the workers average their models: {'; '.join(names)}.{more}"


def method_words(groups: Sequence[Group]) -> dict[str, str]:
    """What the methods' names mean."""
    used = dict.fromkeys(str(run.config["method"]) for group in groups for run in group.runs)
    return {name: METHODS[name].words for name in used if name in METHODS}


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
