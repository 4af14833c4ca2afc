"""Which states there are, and from which the workers go on: all choose alike, and no machine need see all files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from prsgd import _json
from prsgd._warn import warn
from prsgd.comm.base import Communicator
from prsgd.errors import CheckpointError
from prsgd.saving.states import DamagedCheckpointError, States, in_place

KEEP = 3
"""States that a worker keeps. When it has written one, another may still write the one before: it saves the next one
only then, and no average comes in between. So the third is there of all."""


class Kept(NamedTuple):
    """A whole state that a process can read: of which run, after which average, of how many workers, of which of them.

    States of one run and one round fit together. Whoever goes on from other workers' states, or begins, is another run:
    a machine that was away may have states with the same numbers.
    """

    run: str
    round: int
    num_workers: int
    start: int
    stop: int


@dataclass(frozen=True)
class Found:
    """The states from which all workers go on."""

    run: str
    round: int
    num_workers: int
    """How many the run had."""
    exact: bool
    """Has every worker its own, and are they as many?"""
    bearers: Mapping[Kept, int]
    """By state: one of the workers now that can read it. In a folder that all share, each has its part."""

    @property
    def is_all(self) -> bool:
        """Are there states of all workers that the run had?"""
        return self.num_found == self.num_workers

    @property
    def num_found(self) -> int:
        """Of how many workers there are states."""
        return sum(kept.stop - kept.start for kept in self.bearers)

    def lost(self, num_workers: int) -> str:
        """What is told where ``num_workers`` go on otherwise than to the last bit."""
        among = self.num_found if self.is_all else f"{self.num_found} of {self.num_workers}"
        start = "one worker's state" if self.num_found == 1 else f"the mean of {among} workers' states"
        return (
            f"after round {self.round} the run goes on from {start}, with {num_workers} now: what each had of its own "
            "(momentum, random numbers, an average under way) is lost, and it is not the run that it would have been"
        )

    def forget_newer(self, folder: Path) -> None:
        """Remove what is newer, and could be taken for a state of this run later, and what was never finished. (Others
        that see it do so too.)"""
        finished = set(_all_in(folder))
        for round, worker in _begun_in(folder):
            if round > self.round or (round, worker) not in finished:
                states_of(folder, worker).forget(round)


def forget_strangers(folder: Path, *, before: int, num_workers: int) -> None:
    """Remove what workers left that are no more, from rounds before this one, of which all that are have a state."""
    for round, worker in _all_in(folder):
        if round < before and worker >= num_workers:
            states_of(folder, worker).forget(round)


def split_states(folder: Path) -> set[Path]:
    """Where there are states of workers that were several processes (``split.py``)."""
    return {path.parent for path in folder.glob("worker-*/round-*/process-*.json")}


def states_of(folder: Path, worker: int) -> States:
    """Of the process whose first worker this was."""
    owner, remedy = ("worker", worker), "begin anew in another folder"
    return States(folder, numbered="round", owner=owner, remedy=remedy, keep=KEEP)


def find(folder: Path, comm: Communicator, device: torch.device, *, loads: bool = False) -> tuple[Found | None, str]:
    """The newest states that are there of all workers that a run had; if there are none, those of most of its workers.

    A collective, after which all have found the same; None: nothing was saved. What one cannot read ends all. Beside
    it, how the run is called from now on. ``loads``: nothing is to be saved there, and there may be
    states of workers that were several processes, which are none of these.
    """
    mine: dict[str, Any] = {"kept": [], "damaged": [], "hosted": [comm.workers.start, comm.workers.stop]}
    refusal: Exception | None = None
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"states are kept in a folder, and {folder} is a file")
        if not loads:
            folder.mkdir(parents=True, exist_ok=True)
        mine["kept"], mine["damaged"] = _readable(folder)
        if not (mine["kept"] or loads) and split_states(folder):
            raise CheckpointError(
                f"the states in {folder} are of workers that were several processes each: go on from them by "
                "prsgd.load, or begin anew in another folder"
            )
    except (CheckpointError, OSError) as error:
        refusal = error
    mine["refusal"], mine["run"] = None if refusal is None else str(refusal), os.urandom(8).hex()
    everyones = gathered(json.dumps(mine).encode(), comm, device)
    if refusal is not None:
        raise refusal
    for worker, one in enumerate(everyones):
        if one["refusal"] is not None:
            raise CheckpointError(f"worker {worker}: {one['refusal']}")
    readers: dict[tuple[str, int, int], dict[Kept, list[int]]] = {}
    for now, one in enumerate(everyones):
        for state in (Kept(*numbers) for numbers in one["kept"]):
            readers.setdefault((state.run, state.round, state.num_workers), {}).setdefault(state, []).append(now)
    if not readers:
        lost = [line for one in everyones for line in one["damaged"]]
        if lost:
            raise CheckpointError(f"{lost[0]}, and no other state in {folder} is whole: begin anew in another folder")
        return None, str(everyones[0]["run"])
    found = [
        Found(run, round, workers, False, {kept: by[kept.start % len(by)] for kept, by in states.items()})
        for (run, round, workers), states in readers.items()
    ]
    best = max(found, key=lambda f: (f.is_all, f.round if f.is_all else f.num_found, f.round))
    own = all([best.run, best.round, best.num_workers, *one["hosted"]] in one["kept"] for one in everyones)
    exact = own and best.num_workers == comm.num_workers
    return replace(best, exact=exact), best.run if exact else str(everyones[0]["run"])


def _readable(folder: Path) -> tuple[list[Kept], list[str]]:
    """The whole states that this process can read, and what is wrong with others. A newer format's is an error."""
    kept, damaged = [], []
    for round, worker in sorted(_all_in(folder)):
        try:
            manifest = states_of(folder, worker).check(round)
            num_workers, hosted = (int(manifest.get(name)) for name in ("num_workers", "hosted"))  # type: ignore[arg-type]
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            warn(f"{error}; it is passed over", RuntimeWarning)
        except CheckpointError:
            raise
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"{folder} holds no states of prsgd.resumable ({error})") from None
        else:
            kept.append(Kept(str(manifest.get("run")), round, num_workers, worker, worker + hosted))
    return kept, damaged


def _all_in(folder: Path) -> Iterator[tuple[int, int]]:
    """Round and first worker of all states."""
    for place in list(folder.glob("round-*")):
        for path in in_place(place, "manifest-*.json"):
            names = re.fullmatch(r"round-(\d+)/manifest-(\d+)\.json", f"{place.name}/{path.name}")
            if names is not None:
                yield int(names[1]), int(names[2])


def _begun_in(folder: Path) -> set[tuple[int, int]]:
    """The same of all states of which anything is there: who is killed while it writes one leaves a part of it."""
    found = set()
    for place in list(folder.glob("round-*")):
        for path in in_place(place, "*"):
            names = re.fullmatch(r"round-(\d+)/\.?(?:manifest|worker)-(\d+)\..*", f"{place.name}/{path.name}")
            if names is not None:
                found.add((int(names[1]), int(names[2])))
    return found


def gathered(text: bytes, comm: Communicator, device: torch.device) -> list[Any]:
    """What each worker's process says, by worker: text in tensors, of which nothing is unpickled."""
    hosted = len(comm.workers)
    sizes = comm.all_gather(torch.tensor([[len(text)]] * hosted, device=device)).wait().cpu()[:, 0].tolist()
    page = torch.zeros(max(sizes), dtype=torch.uint8)
    page[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    pages = comm.all_gather(page.to(device).repeat(hosted, 1)).wait().cpu()
    return [_json.parse(bytes(row[:size].tolist())) for row, size in zip(pages, sizes)]
