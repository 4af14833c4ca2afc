"""A run that is killed at a random moment and resumed ends with the same weights, to the last bit.

python bench/kills.py --times 20                 # about five minutes
python bench/kills.py --times 5 --processes 2    # all of a launch's processes are killed
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = ["--task", "digits", "--workers", "8", "--overlap", "2", "--epochs", "40"]


def prsgd(*args: str) -> list[str]:
    return [sys.executable, "-m", "prsgd", "train", *args]


def weights(folder: Path) -> str:
    found: str = json.loads((folder / "summary.json").read_text())["weights_sha256"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill and resume.")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    run = [*RUN, "--processes", str(args.processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        began = time.monotonic()
        subprocess.run(prsgd(*run, "--out", str(whole)), check=True, capture_output=True, env=environment)
        seconds = time.monotonic() - began
        print(f"unbroken: {seconds:.1f} s, {weights(whole)[:16]}", flush=True)
        chance = random.Random(args.seed)
        equal = broken = turn = attempt = 0
        while turn < args.times:
            folder = Path(place) / f"attempt-{attempt}"
            attempt += 1
            command, kills = prsgd(*run, "--out", str(folder)), 0
            while not (folder / "summary.json").exists():
                with subprocess.Popen(
                    command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
                ) as process:
                    try:
                        # At most twice in a turn, so that it comes to its end; the first seconds are imports.
                        _, said = process.communicate(timeout=chance.uniform(0, seconds) if kills < 2 else 120)
                        assert process.returncode == 0, said.decode()
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)  # a session of its own: it and its processes
                        kills += 1
                begun = (folder / "config.json").exists()
                command = prsgd("--resume", str(folder)) if begun else prsgd(*run, "--out", str(folder), "--overwrite")
            if not kills:
                continue  # it was faster: it does not count
            same = weights(folder) == weights(whole)
            equal, broken, turn = equal + same, broken + kills, turn + 1
            print(f"turn {turn}: killed {kills} times, {'equal' if same else 'DIFFERENT'}", flush=True)
        print(f"{equal} of {args.times} equal after {broken} kills")


if __name__ == "__main__":
    main()
