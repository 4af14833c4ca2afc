"""A rank of a launch that raises, exits or is killed, again and again: how soon does launch() end, and is anybody left?

python bench/faults.py              # 20 launches of each kind, a few minutes
python bench/faults.py --times 2
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import prsgd

EXPECTED = {
    "raise": "rank 1 of 3 failed:",
    "exit": "rank 1 of 3 exited with code 7",
    "kill": "rank 1 of 3 was killed by SIGKILL",
}


def train(how: str, folder: str) -> None:
    """Rank 1 fails at its sixth step, after writing when."""
    rank = prsgd.init().workers.start
    Path(folder, f"pid {os.getpid()}").touch()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(2)):
        for step in range(10**6):
            if rank == 1 and step == 5:
                Path(folder, "failed at").write_text(repr(time.time()))
                if how == "raise":
                    raise KeyError("mine")
                if how == "exit":
                    os._exit(7)
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()


def attempt(how: str) -> tuple[float, bool, int]:
    """Seconds from the failure to the end of launch(), whether the message is right, and how many ranks are left."""
    with tempfile.TemporaryDirectory() as folder:
        said = ""
        try:
            prsgd.launch(train, processes=3, args=(how, folder))
        except prsgd.LaunchError as error:
            said = str(error)
        ended = time.time()
        seconds = ended - float(Path(folder, "failed at").read_text())
        pids = [int(path.name.split()[1]) for path in Path(folder).glob("pid *")]
        return seconds, said.startswith(EXPECTED[how]), sum(Path(f"/proc/{pid}").exists() for pid in pids)


def main() -> None:
    parser = argparse.ArgumentParser(description="Failures of launched ranks.")
    parser.add_argument("--times", type=int, default=20)
    times = parser.parse_args().times
    print("how     right message   nobody left   slowest end   (of", times, "launches each)")
    for how in EXPECTED:
        found = [attempt(how) for _ in range(times)]
        right, clean = sum(ok for _, ok, _ in found), sum(left == 0 for *_, left in found)
        print(f"{how:<7} {right:>13}   {clean:>11}   {max(s for s, *_ in found):>9.2f} s", flush=True)


if __name__ == "__main__":
    main()
