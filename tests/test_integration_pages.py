"""The scripts of docs/integrations and docs/transformers.md run as they stand, and few of their lines are ours."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from prsgd.integrations import require
from prsgd.tasks.gpt import GPT
from tests import ranks
from tests.ranks import Program, free_port

DOCS = Path(__file__).parent.parent / "docs"


def block(page: Path, folder: Path) -> Path:
    """The first Python block of a page, which is complete."""
    text = re.search(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert text is not None
    path = folder / "script.py"
    path.write_text(text[1])
    return path


def script(library: str, folder: Path) -> Path:
    """That of a library's page; at most three of its lines tell of us."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: the extra [integrations]")
    path = block(DOCS / "integrations" / f"{library}.md", folder)
    ours = [line for line in path.read_text().splitlines() if re.search(r"\bprsgd\b|local_sgd\(", line)]
    assert 1 <= len(ours) <= 3
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


def test_a_gpt_by_diloco(tmp_path: Path) -> None:
    """With at most 15 lines added it learns, and saves what all workers have."""
    path = block(DOCS / "transformers.md", tmp_path)
    lines = path.read_text().splitlines()
    assert len([line for line in lines if "# +" in line]) <= 15
    assert not [line for line in lines if "prsgd." in line and "# +" not in line and "prsgd.tasks.gpt" not in line]
    (tmp_path / "input.txt").write_text((DOCS.parent / "README.md").read_text())
    result = ranks.torchrun(
        "--nproc-per-node", "2", "--master-port", str(free_port()), str(path), "input.txt", cwd=tmp_path,
        timeout_seconds=280,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    first, *_, last = map(float, re.findall(r"step \d+: ([\d.]+) bits per byte", result.stdout))
    assert last < first - 0.1
    model = GPT(layers=2, width=64, heads=2, context=64)
    model.load_state_dict(torch.load(tmp_path / "gpt.pt", weights_only=True))


def test_a_gpt_goes_on_after_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's second block in the place of the first one's lines, in this process: one worker."""
    page = DOCS / "transformers.md"
    text = block(page, tmp_path).read_text()
    resumed = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)[1]
    head, body = resumed.split("        ...\n")
    old = re.search(r"with prsgd\.LocalSGD.*\n    for step in .*\n", text)
    assert old is not None
    end = "\nif worker == 0:  # +\n    torch.save"
    text = text.replace(old[0], head).replace(end, body + end)
    text = text.replace("STEPS, BATCH, CONTEXT = 256, 8, 64", "STEPS, BATCH, CONTEXT = 160, 2, 16")
    (tmp_path / "input.txt").write_text((DOCS.parent / "README.md").read_text())
    monkeypatch.setattr("sys.argv", ["script.py", str(tmp_path / "input.txt")])
    models = []
    for folder, stops in (("unbroken", [None]), ("broken", [100, None])):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for stop in stops:
            path = tmp_path / folder / "script.py"
            last = f"        if step == {stop}:\n            raise EOFError\n        run.tick()"
            path.write_text(text.replace("        run.tick()", last))
            with nullcontext() if stop is None else pytest.raises(EOFError):
                runpy.run_path(str(path))
        models.append(torch.load("gpt.pt", weights_only=True))
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


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
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / "integrations" / page).read_text(), re.DOTALL)


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
