"""One thread, as in the spawned ranks: the order of a sum depends on it. And what lets tests run side by side."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from prsgd import files
from prsgd.report import figures, page
from prsgd.report.figures.base import Picture
from tests.ranks import warm_context

torch.set_num_threads(1)
hypothesis.settings.register_profile("busy", deadline=None)  # how long an example takes is the machine's affair
hypothesis.settings.load_profile("busy")

LONG = ("test_cli", "test_vectorized", "test_verify", "test_install", "test_launch", "test_closing", "test_cluster",
        "test_lightning", "test_transformers", "test_integration_pages", "test_release", "test_docs")  # fmt: skip
"""Files with the longest tests: begun first, they do not run on when all others are done."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    without_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="the extra elastic is not installed")
    for item in items:
        if item.name == "prsgd.comm.torch_ft.TorchFT":  # its docstring's example
            item.add_marker(without_torchft)
        if isinstance(item, pytest.Function) and "browser" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("browser"))  # one is enough
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported by now stays: collections, of which tests ask for many, need not look at it


_drawn: dict[tuple[str, bytes], list[tuple[str, bytes]]] = {}


@pytest.fixture(scope="module")
def drawn_once() -> Iterator[None]:
    """Pages with the same numbers share their figures, which take longer than all the rest of a page: the same numbers
    give the same bytes (test_figures_are_drawn_and_the_same_twice)."""

    def draw_once(pictures: Sequence[Picture[Any]], folder: Path) -> list[Path]:
        paths = []
        for picture in pictures:
            key = picture.name, pickle.dumps(picture.numbers)
            if key not in _drawn:
                _drawn[key] = [(path.name, path.read_bytes()) for path in figures.draw([picture], folder)]
            (folder / files.FIGURES).mkdir(parents=True, exist_ok=True)
            for name, content in _drawn[key]:
                paths.append(folder / files.FIGURES / name)
                paths[-1].write_bytes(content)
        return paths

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(page, "draw", draw_once)
        yield


@pytest.fixture
def warm_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch()`` and the pool of a comparison fork a server that has imported torch: for tests of what their
    processes do, and not of how they start and end."""
    monkeypatch.setattr(multiprocessing, "get_context", warm_context)
