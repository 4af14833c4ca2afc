"""What works where only torch, numpy and safetensors are installed, and what the rest says: the extra prsgd[lab]."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prsgd.cli import COMMANDS
from prsgd.cli.parser import LAB

BLOCK = f"import sys\nsys.modules.update(dict.fromkeys({list(LAB)}))\n"
"""As sitecustomize.py: in the processes that a command starts, too."""
RUN = """
import contextlib, io, json, sys
import prsgd.theory.verify
from prsgd.cli import main
from prsgd.data import datasets

datasets.get = lambda name, given: datasets._from_pngs(given)  # as if an archive of pictures were here
prsgd.theory.verify.claims = lambda effort: []  # they take a while, and import nothing of the lab
found = []
for line in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(line.split())
        except SystemExit as stopped:
            code = stopped.code
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps([sorted(name for name in %r if sys.modules[name] is not None), found]))
"""

WORK = {
    "train --workers 2 --epochs 1 --out a": "done in",
    "methods": "pr-sgd",
    "doctor": "The job as a whole: torchrun",
    "plan --workers 4 --steps 1000": "4 workers, 1,000 steps each",
    "probe --steps 2 --looks 2": "the largest along the path:",
    "calibrate --processes 1 --steps 24": "1 processes, a step of the slowest takes",
    "verify": "0 of 0 claims hold",
    "bench --models mlp --links loopback --contestants prsgd --rounds 1 --period 2": "throughput",
    "data list": "handwritten digits",
    "compare --help": "--seeds",
    "launch --help": "--elastic",
}
"""Commands that do not need it, and a part of what they say."""
NEED = {
    "compare --workers 2 --epochs 1 --out c": "rich",
    "report a": "rich",
    "timeline a": "rich",
    "plan --workers 4 --steps 1000 --plot p.png": "rich",
    "verify --out v": "rich",
    "bench --out b": "rich",
    "data get cifar10": "pillow",
}
"""Commands that do, and what they find missing."""


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment in which the extra's modules cannot be imported."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(BLOCK)
    places = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}


def test_every_command_without_the_lab_extra(tmp_path: Path, bare: dict[str, str]) -> None:
    lines = [*WORK, *NEED]
    assert {line.split()[0] for line in lines} == set(COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", RUN % list(LAB), json.dumps(lines)],
        cwd=tmp_path, env=bare, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported, found = json.loads(done.stdout)
    assert not imported
    outcomes = dict(zip(lines, found))
    for line, part in WORK.items():
        code, out, err = outcomes[line]
        assert code == 0, err
        assert part in out
    for line, missing in NEED.items():
        code, out, err = outcomes[line]
        why = f"this command needs the lab extra: pip install 'prsgd[lab]' ({missing} is missing)"
        said = err.removeprefix("fetching cifar10 ...\n")
        assert (code, out, said) == (2, "", f"prsgd {line.split()[0]}: error: {why}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "cluster.toml", "site"]


def test_the_library_needs_no_extra(bare: dict[str, str]) -> None:
    code = (
        "import prsgd, torch\n"
        "model = torch.nn.Linear(1, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "with prsgd.LocalSGD(model, optimizer, schedule=prsgd.every(1)): print('trains')\n"
        "[getattr(prsgd, name) for name in prsgd.__all__]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=bare, capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout == "trains\n"
