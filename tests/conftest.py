"""One thread, as in the spawned ranks: the order of a sum depends on it. And what lets tests run side by side."""

from __future__ import annotations

import multiprocessing
from typing import Any

import hypothesis
import pytest
import torch

from tests.ranks import warmed

torch.set_num_threads(1)
hypothesis.settings.register_profile("busy", deadline=None)  # how long an example takes is the machine's affair
hypothesis.settings.load_profile("busy")

LONG = ("test_cli", "test_vectorized", "test_verify", "test_install", "test_launch", "test_closing", "test_cluster")
"""Files with the longest tests: begun first, they do not run on when all others are done."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "browser" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("browser"))  # one is enough
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture
def warm_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch()`` and the pool of a comparison fork a server that has imported torch: for tests of what their
    processes do, and not of how they start and end."""
    get_context = multiprocessing.get_context

    def instead(method: str | None = None) -> Any:
        return warmed() if method == "spawn" else get_context(method)

    monkeypatch.setattr(multiprocessing, "get_context", instead)
