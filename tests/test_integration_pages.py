"""The scripts of docs/integrations run as they stand there, and few of their lines are ours."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from prsgd.integrations import require
from tests import ranks
from tests.ranks import Program, free_port

PAGES = Path(__file__).parent.parent / "docs" / "integrations"


def script(library: str, folder: Path) -> Path:
    """The first Python block of a library's page, which is complete; at most three of its lines tell of us."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: the extra [integrations]")
    text = re.search(r"```python\n(.*?)```", (PAGES / f"{library}.md").read_text(), re.DOTALL)
    assert text is not None
    assert 1 <= len([line for line in text[1].splitlines() if re.search(r"\bprsgd\b|local_sgd\(", line)]) <= 3
    path = folder / "script.py"
    path.write_text(text[1])
    return path


def launch(path: str) -> None:
    """``python PATH``, where Lightning starts the second process by itself, with this interpreter."""
    ranks.script(path)


def test_lightning_starts_its_own_processes(tmp_path: Path) -> None:
    path = script("lightning", tmp_path)
    env = {"MASTER_PORT": str(free_port()), "NO_COLOR": "1"}
    with Program(launch, str(path), cwd=tmp_path, env=env) as program:
        out, err = program.communicate(280)
    assert program.process.exitcode == 0, err
    said = out.splitlines()[-1]
    assert "'prsgd/rounds': 8.0" in said  # 60 steps: seven rounds of 8, and the last average
    assert "'val_loss'" in said
    (folder,) = (tmp_path / "checkpoints").glob("*.workers")
    assert sorted(path.name for path in folder.iterdir()) == ["0.ckpt", "1.ckpt"]


@pytest.mark.parametrize(("library", "said"), [("transformers", "'prsgd/rounds': 1"), ("accelerate", "epoch 3: loss")])
def test_under_torchrun(library: str, said: str, tmp_path: Path) -> None:
    path = script(library, tmp_path)
    result = ranks.torchrun(
        "--nproc-per-node", "2", "--master-port", str(free_port()), str(path), cwd=tmp_path, timeout_seconds=280
    )
    assert result.returncode == 0, result.stderr
    assert said in result.stdout
    shutil.rmtree(tmp_path / "classified", ignore_errors=True)


@pytest.mark.parametrize(
    ("at_least", "below", "said"),
    [
        ("99", "100", "prsgd.integrations needs torch >= 99 and < 100, and torch"),
        ("1.0", "2.0.1", "prsgd.integrations needs torch >= 1.0 and < 2.0.1, and torch"),
    ],
)
def test_a_version_out_of_range_is_one_line(at_least: str, below: str, said: str) -> None:
    with pytest.raises(ImportError, match=re.escape(said)) as caught:
        require("torch", at_least=at_least, below=below)
    assert "\n" not in str(caught.value)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def test_slurms_script_is_one_and_what_it_starts_trains(tmp_path: Path) -> None:
    """SLURM is not here; bash reads the script, and torchrun starts the page's program."""
    (batch,), (program,) = blocks("slurm.md", "bash"), blocks("slurm.md", "python")
    subprocess.run(["bash", "-n"], input=batch, text=True, check=True, timeout=60)
    path = tmp_path / "train.py"
    path.write_text(program.replace("STEPS = 4000", "STEPS = 800"))
    result = ranks.torchrun(
        "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
        str(path), str(tmp_path / "states"), cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == "2 workers, from step 0 on"
    assert result.stdout.splitlines()[-1].endswith("after 800 steps")
    assert "round-00000100" in {folder.name for folder in (tmp_path / "states").iterdir()}


def test_rays_script_is_one() -> None:
    """Ray is not installed for the tests: the page tells what was run."""
    (program,) = blocks("ray.md", "python")
    compile(program, "ray.md", "exec")
