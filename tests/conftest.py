"""One thread, as in the spawned ranks: the order of a sum depends on it."""

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


@pytest.fixture
def warm_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """``launch()`` and the pool of a comparison fork a server that has imported torch: for tests of what their
    processes do, and not of how they start and end."""
    get_context = multiprocessing.get_context

    def instead(method: str | None = None) -> Any:
        return warmed() if method == "spawn" else get_context(method)

    monkeypatch.setattr(multiprocessing, "get_context", instead)
