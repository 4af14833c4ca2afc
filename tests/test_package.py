"""The public names, the direction of imports, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import prsgd
from prsgd import files

SOURCE = Path(prsgd.__file__).parent


def test_public_names_are_exactly_all() -> None:
    assert list(prsgd.__all__) == sorted(prsgd.__all__)
    assert set(prsgd.__all__) == set(prsgd._HOME)
    for name in prsgd.__all__:
        assert getattr(prsgd, name).__name__ == name


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60).stdout


def test_importing_the_package_imports_no_torch() -> None:
    assert run("import prsgd, sys; print('torch' in sys.modules, 'matplotlib' in sys.modules)") == "False False\n"


def test_using_it_imports_no_plotting() -> None:
    assert run("import prsgd, sys; prsgd.LocalSGD; print('matplotlib' in sys.modules)") == "False\n"


# Data flow one way (DESIGN §4): a folder is a layer, and imports from its own line or from lines above it.
LAYERS = [
    "errors _check _fields _json _toml _warn units metrics records files",
    "clocks",
    "comm",
    "schedules averaging",
    "replicas",
    "core",
    "saving",
    "preflight",
    "cluster",
    "data tasks",
    "lab",
    "theory",
    "report",
    "bench",
    "integrations",
    "cli __main__",
]
PLACE = {name: place for place, line in enumerate(LAYERS) for name in line.split()}
FORBIDDEN = {("theory", "core"), ("report", "core"), ("report", "averaging"), ("report", "comm")}
"""Below, but not to be reached into: reports and the theory read numbers, and never the loop."""
EXCEPT = {
    ("report", "comm.links"): "the seconds of a link are numbers, and need no torch",
    ("theory", "core.local_sgd"): "probe() measures a real run, and is no part of the plans and bounds",
}


def imports_of(path: Path) -> Iterator[str]:
    """What a file imports of ours, dotted, by whatever form: ``import a.b``, ``from a import b``, ``from . import b``,
    ``importlib.import_module("a.b")``, at the top, in a function or for type checks alone."""
    package = ["prsgd", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            yield from (str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant))


def ours(dotted: str) -> str | None:
    """``core.loop`` for ``prsgd.core.loop.Loop``; None for what is not ours, or only a name of the lazy table."""
    parts = dotted.split(".")
    if parts[0] != "prsgd" or len(parts) == 1 or parts[1] not in PLACE:
        return None
    return ".".join(parts[1:3]) if (SOURCE / parts[1]).is_dir() and len(parts) > 2 else parts[1]


def test_imports_go_one_way() -> None:
    seen = set()
    for path in sorted(SOURCE.rglob("*.py")):
        layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if layer == "__init__":
            continue
        seen.add(layer)
        for other in filter(None, map(ours, imports_of(path))):
            below = other.partition(".")[0]
            assert PLACE[below] <= PLACE[layer], f"{path.relative_to(SOURCE)} imports {other}"
            if (layer, below) in FORBIDDEN:
                assert (layer, other) in EXCEPT, f"{path.relative_to(SOURCE)} imports {other}"
    assert seen == set(PLACE)


@pytest.mark.parametrize(
    "line",
    ["import prsgd.cli.train", "from prsgd import cli", "from prsgd.cli import train", "from . import cli",
     "from .cli.train import run", "def f():\n    import prsgd.cli", "import_module('prsgd.cli.train')"],
)  # fmt: skip
def test_every_form_of_import_is_seen(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    (tmp_path / "cli").mkdir()
    (tmp_path / "core.py").write_text(line)
    assert any((ours(name) or "").startswith("cli") for name in imports_of(tmp_path / "core.py"))


def test_one_module_reads_torchruns_environment() -> None:
    readers = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(f'"{name}"' in path.read_text() for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"))
    }
    assert readers == {"comm/job.py"}


def test_one_module_names_the_files_of_a_folder() -> None:
    """Those that are no common words: in every text but a docstring's or a message's, alone or behind a folder."""
    names = tuple(name for name in (*files.OURS, files.TRACES) if "." in name)
    spelled = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.split("/")[-1] in names
    }
    assert spelled == {"files.py"}
