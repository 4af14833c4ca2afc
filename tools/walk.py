"""Which files of ours one blocking average passes through: from the update of ``optimizer.step()`` to the collective,
and back. Prints each file with how often control enters it from another, and the chain of calls to the collective.

    python tools/walk.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

import prsgd

HOME = Path(prsgd.__file__).parent
COLLECTIVES = ("allreduce", "errand")
"""What starts one: torch's, or the thread in which two processes swap small models by a message each way."""


def rank() -> tuple[list[str], list[str], list[str], Counter[str]] | None:
    """One of two processes: a model with BatchNorm and momentum, averaged in every second step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen: list[tuple[str, int]] = []
    launched: list[int] = []
    chain: list[str] = []

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        started = arg.__name__ if event == "c_call" else frame.f_code.co_name if event == "call" else ""
        if started in COLLECTIVES and not launched:
            launched.append(len(seen))
            on_stack = [f for f in _stack(frame) if f is not None]
            chain[:] = [file for i, file in enumerate(on_stack) if i == 0 or on_stack[i - 1] != file]
        if event == "call" and (file := _ours(frame)) is not None:
            caller = _ours(frame.f_back) if frame.f_back is not None else None
            if caller != file:
                seen.append((file, len(seen)))

    steps = 0

    def begin(*_: Any) -> None:
        if steps == 8:  # an average as all others; the first ones make memory
            sys.setprofile(watch)

    optimizer.register_step_post_hook(begin)  # before those of LocalSGD
    torch.manual_seed(dist.get_rank())
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2)) as local:
        for steps in range(1, 9):  # noqa: B007 - a hook reads it
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            local.log(loss=0.5, samples=4)
            optimizer.step()
            sys.setprofile(None)
    if dist.get_rank():
        return None
    there = list(dict.fromkeys(file for file, _ in seen[: launched[0]]))
    back = list(dict.fromkeys(file for file, _ in seen[launched[0] :]))
    return there, back, chain[::-1], Counter(file for file, _ in seen)


def _ours(frame: FrameType | None) -> str | None:
    if frame is None:
        return None
    path = Path(frame.f_code.co_filename)
    return str(path.relative_to(HOME)) if path.is_relative_to(HOME) else None


def _stack(frame: FrameType | None) -> list[str | None]:
    found = []
    while frame is not None:
        found.append(_ours(frame))
        frame = frame.f_back
    return found


def main() -> None:
    there, back, chain, entries = prsgd.launch(rank, processes=2)[0]
    print("on the way to the collective:", len(there), *there, sep="\n  ")
    print("on the way back:", len(back), *back, sep="\n  ")
    print("in all:", len(entries), *(f"{file}: entered {n} times" for file, n in entries.items()), sep="\n  ")
    print("the chain of calls:", " -> ".join(chain))


if __name__ == "__main__":
    main()
