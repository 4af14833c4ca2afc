"""What is released works: the sdist makes the wheel, and the wheel alone runs where torch is and this folder is not."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import prsgd

ROOT = Path(__file__).parents[1]


def run(*args: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "COVERAGE_PROCESS_START")}
    done = subprocess.run(args, cwd=cwd, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an index would: what the sdist lacks is missing."""
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: the extra [dev]")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    (sdist,) = folder.glob("prsgd-*.tar.gz")
    assert sdist.name == f"prsgd-{prsgd.__version__}.tar.gz"
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=source)
    (built,) = folder.glob("prsgd-*.whl")
    return built


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that has the wheel, and sees torch by a .pth file."""
    folder = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text("\n".join(seen_here()))
    python = str(folder / "bin" / "python")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel),
        cwd=folder,
    )
    return folder / "bin"


def seen_here() -> list[str]:
    """Where this interpreter's packages lie. What their own .pth files name (this folder's src) is not seen there."""
    return [
        place for place in dict.fromkeys([*site.getsitepackages(), *sys.path]) if Path(place).name == "site-packages"
    ]


def test_the_wheel_holds_what_it_must(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as held:
        names = set(held.namelist())
        (about,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = held.read(about).decode()
    assert "prsgd/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    ours = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("prsgd/")} == {n for n in ours if "__pycache__" not in n}
    assert re.search(r"^License-Expression: Apache-2.0$", metadata, re.MULTILINE)
    assert "Project-URL" not in metadata  # until there is one
    assert re.search(r"^Requires-Python: >=3.10$", metadata, re.MULTILINE)
    classifiers = re.findall(r"^Classifier: (.*)$", metadata, re.MULTILINE)
    assert [f"Programming Language :: Python :: 3.{minor}" in classifiers for minor in range(9, 15)] == [
        False, True, True, True, True, False,
    ]  # fmt: skip
    assert re.search(rf"^Version: {re.escape(prsgd.__version__)}$", metadata, re.MULTILINE)


def test_the_wheel_works_by_itself(bin_folder: Path, tmp_path: Path) -> None:
    where = run(str(bin_folder / "python"), "-c", "import prsgd; print(prsgd.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(bin_folder.parent)
    assert "compare" in run(str(bin_folder / "prsgd"), "--help", cwd=tmp_path)
    out = run(str(bin_folder / "prsgd"), "train", "--workers", "2", "--epochs", "2", "--json", cwd=tmp_path)
    assert json.loads(out)["test_score"] > 0.8


def test_the_citation_names_this_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {re.escape(prsgd.__version__)}$", text, re.MULTILINE)
    assert f"## [{prsgd.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
