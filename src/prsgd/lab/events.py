"""Event files for TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prsgd import files

AVERAGE = ("loss", "drift", "bytes_sent", "wait_seconds", "lr")
EVALUATION = ("train_loss", "test_loss", "test_score")


def check() -> None:
    """A ValueError if the package is not there."""
    try:
        import tensorboard  # type: ignore[import-untyped]  # noqa: F401 - is it there?
    except ImportError:
        raise ValueError("--tensorboard needs a package that is not there: pip install tensorboard") from None


class Events:
    """A run's lines as TensorBoard's scalars, by step."""

    def __init__(self, folder: Path, *, from_step: int = 0) -> None:
        check()
        from torch.utils.tensorboard import SummaryWriter

        # What a run that is continued had written beyond its checkpoint is not shown twice.
        self._writer = SummaryWriter(str(folder / files.TENSORBOARD), purge_step=from_step + 1 if from_step else None)

    def add(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        for name in AVERAGE if kind == "average" else EVALUATION:
            if line[name] is not None:
                self._writer.add_scalar(f"{kind}/{name}", line[name], line["step"])

    def close(self) -> None:
        self._writer.close()
