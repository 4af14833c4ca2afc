"""The public names, the direction of imports, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import prsgd

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


# Data flow one way (DESIGN §4): a module may import from its own layer's left only.
ORDER = [
    "errors", "_check", "_json", "_toml", "units", "links", "recipe", "splits", "data", "datasets", "trace",
    "records", "clocks", "cluster", "schedules", "worker", "comm", "averaging", "state", "other_buffers", "buffers",
    "optimizer_state", "vectorized", "fleet", "entering", "ledger", "resuming", "flight", "tower", "local_sgd",
    "several", "calibration", "launching", "tasks", "methods", "config", "checkpoint", "events", "feed", "experiment",
    "folders", "jobs", "running", "theory", "report", "cli", "__main__",
]  # fmt: skip


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("prsgd"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
    return found


def test_imports_go_one_way() -> None:
    seen = set()
    for path in sorted(SOURCE.rglob("*.py")):
        layer = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if layer == "__init__":
            continue
        seen.add(layer)
        for other in imports_of(path):
            assert ORDER.index(other) <= ORDER.index(layer), f"{path.name} imports {other}"
    assert seen == set(ORDER)
