"""Warnings that point at the user's own line, however deep below it they are noticed."""

from __future__ import annotations

import sys
import warnings

BETWEEN = frozenset(
    ("prsgd", "torch", "contextlib", "functools", "lightning", "lightning_fabric", "pytorch_lightning", "transformers",
     "accelerate")
)  # fmt: skip
"""What stands between a user's line and what is noticed: this package, torch, whose ``step()`` calls its hooks, what
``with`` and decorators go through, and the trainers that call torch."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """``warnings.warn``, with the place of the innermost call that is not of these packages; where all are, of the
    outermost.

    A line of a loop warns once in the same words, as with ``warnings.warn``. What a thread of ours notices has no line
    of the user's.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in BETWEEN:
        frame = frame.f_back
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__") or "<unknown>",
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )
