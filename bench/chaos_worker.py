"""One worker of ``bench/chaos.py``: trains 0.3M parameters until the folder holds a file ``end``, and writes down when
which average has landed."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

import prsgd

PERIOD, EVERY = 8, 5
"""Steps of a round; rounds between two states."""


def main() -> None:
    folder, level = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(784, 380), torch.nn.ReLU(), torch.nn.Linear(380, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    comm = prsgd.TorchFT() if level == "torchft" else prsgd.init()
    worker = comm.workers.start
    local = prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(PERIOD), comm=comm)
    states = None
    if level == "torchrun":
        states = prsgd.resumable(folder / "states", local, every=EVERY, model=model, optimizer=optimizer)
    generator = torch.Generator().manual_seed(worker)
    x, y = torch.randn(8, 784, generator=generator), torch.randint(10, (8,), generator=generator)
    said = (folder / f"said-{worker}.jsonl").open("a", buffering=1)

    def say(**what: object) -> None:
        print(json.dumps({"at": time.time(), "pid": os.getpid(), "round": local.round, **what}), file=said)

    say(starts=True)
    with local if states is None else states:
        say(starts=True)
        before = local.round
        while not (folder / "end").exists():
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if states is not None:
                states.tick()
            if local.round > before:
                before = local.round
                say()
            time.sleep(0.001)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    (folder / f"model-{worker}").write_text(digest)


if __name__ == "__main__":
    main()
