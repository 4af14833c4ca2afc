"""Which parameters travel together: a model's layers dealt to fragments, or as their names say."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import Parameter

from prsgd._check import shown, whole_number
from prsgd.averaging.base import Averaging, Setting
from prsgd.replicas.names import plainly
from prsgd.schedules.base import Schedule

Names = list[str]


def dealt(
    named: Mapping[str, Parameter],
    fragments: int | Sequence[str | Sequence[str]],
    tied: Mapping[str, str] | None = None,
) -> list[Names]:
    """The names of each fragment's parameters, in the model's order; fragments in the order of their first ones.
    ``tied``: other names of parameters that have several, and those that ``named`` has.

    A number: the layers, which are the modules that own parameters, are dealt out, the largest first, each to the
    fragment that has the least so far. Patterns (or lists of them), one for each fragment: as in file names, where
    "blocks.0.*" is everything whose name begins so.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    >>> dealt(dict(model.named_parameters()), 2)
    [['0.weight', '0.bias', '2.weight', '2.bias'], ['1.weight', '1.bias']]
    >>> dealt(dict(model.named_parameters()), ["[01].*", "2.*"])
    [['0.weight', '0.bias', '1.weight', '1.bias'], ['2.weight', '2.bias']]
    """
    if isinstance(fragments, str) or (not isinstance(fragments, int) and not isinstance(fragments, Sequence)):
        raise ValueError(f"fragments must be a number, or a pattern of names for each, got {shown(fragments)}")
    if isinstance(fragments, Sequence):
        found = _by_patterns(named, fragments, tied or {})
    else:
        found = _by_size(named, whole_number("fragments", fragments, at_least=1))
    order = {name: place for place, name in enumerate(named)}
    return sorted((sorted(names, key=order.__getitem__) for names in found), key=lambda names: order[names[0]])


def tied_names(model: nn.Module) -> dict[str, str]:
    """The names by which ``named_parameters()`` does not call a parameter that has several, and the one that it uses.

    >>> import torch
    >>> model = torch.nn.ModuleDict({"first": torch.nn.Linear(2, 2, False), "last": torch.nn.Linear(2, 2, False)})
    >>> model["last"].weight = model["first"].weight
    >>> tied_names(model)
    {'last.weight': 'first.weight'}
    """
    first: dict[int, str] = {}
    pairs = plainly(model.named_parameters(remove_duplicate=False)).items()
    return {name: other for name, p in pairs if (other := first.setdefault(id(p), name)) != name}


def dealing(fragments: Sequence[Names]) -> str:
    """In a few words, which are others if anything is dealt otherwise.

    >>> dealing([["0.weight", "0.bias"]]), dealing([["0.weight"], ["0.bias"]])
    ('1', '2 (of deal 344ad5af)')
    """
    if len(fragments) == 1:
        return "1"
    return f"{len(fragments)} (of deal {zlib.crc32(repr([list(names) for names in fragments]).encode()):08x})"


def layers_of(names: Iterable[str]) -> dict[str, Names]:
    """The parameters of each module that owns some.

    >>> layers_of(["0.weight", "0.bias", "2.weight"])
    {'0': ['0.weight', '0.bias'], '2': ['2.weight']}
    """
    layers: dict[str, Names] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return layers


def _by_size(named: Mapping[str, Parameter], fragments: int) -> list[Names]:
    layers = layers_of(named)
    if fragments > len(layers):
        raise ValueError(f"fragments must be at most the number of layers that train, {len(layers)}, got {fragments}")
    sizes = {layer: sum(named[name].numel() for name in names) for layer, names in layers.items()}
    found: list[Names] = [[] for _ in range(fragments)]
    totals = [0] * fragments
    for layer in sorted(layers, key=lambda layer: -sizes[layer]):  # of equal ones in the model's order
        least = min(range(fragments), key=totals.__getitem__)
        found[least] += layers[layer]
        totals[least] += max(1, sizes[layer])
    return found


def _by_patterns(
    named: Mapping[str, Parameter], fragments: Sequence[str | Sequence[str]], tied: Mapping[str, str]
) -> list[Names]:
    if not fragments:
        raise ValueError("fragments must have at least one pattern of names, got none")
    found: list[Names] = []
    taken: dict[str, str] = {}
    for patterns in fragments:
        own: Names = []
        several = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(several, Sequence) or not all(isinstance(pattern, str) for pattern in several):
            raise ValueError(f"fragments must be patterns of names, or lists of them, got {shown(patterns)} among them")
        for pattern in several:
            matches = [name for name in named if fnmatchcase(name, pattern)]
            others = [name for name, first in tied.items() if first in named and fnmatchcase(name, pattern)]
            if others and not matches:
                raise ValueError(
                    f"fragments: {pattern!r} matches {others[0]!r}, which is tied to {tied[others[0]]!r} and travels "
                    "as that, in its fragment: leave the pattern out"
                )
            if not matches:
                first = ", ".join(map(repr, list(named)[:3]))
                raise ValueError(
                    f"fragments: {pattern!r} matches no parameter that trains (they are called {first}, ...)"
                )
            for name in matches:
                if name in taken:
                    raise ValueError(f"fragments: parameter {name!r} is matched by {taken[name]!r} and by {pattern!r}")
                taken[name] = pattern
            own += matches
        if not own:
            raise ValueError("fragments: a list of patterns is empty")
        found.append(own)
    left = [name for name in named if name not in taken]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise ValueError(f"fragments leave out parameter {left[0]!r}{more}: every one that trains must be in one")
    return found


def check_fragments(count: int, schedule: Schedule, averaging: Averaging, setting: Setting) -> None:
    """Raise a ValueError that says why so many do not go with the other parts."""
    if count == 1:
        return
    if setting.elastic:
        raise ValueError(f"where workers come and go all of a model is averaged at once, got {count} fragments")
    if setting.by_clock or setting.shares_speed:
        raise ValueError(
            f"with {schedule!r} workers take different numbers of steps, by the clock, and {count} fragments go by "
            "steps, one after the other: use a schedule such as every(8) or per_worker()"
        )
    if averaging.hears_neighbours_only:
        raise ValueError(
            f"with {averaging!r} workers hear their neighbours only, and {count} fragments need averages of all, one "
            "after the other: use an averaging such as mean()"
        )
    if setting.learns:
        raise ValueError(
            f"{schedule!r} weighs how far whole models drift apart, and with {count} fragments no average "
            "knows that: use a schedule such as every(8)"
        )
    try:
        schedule.check(setting.num_workers, setting.overlap * count)
    except ValueError as error:
        raise ValueError(
            f"{count} fragments travel one after the other, each for {setting.overlap} steps: {error}"
        ) from None
