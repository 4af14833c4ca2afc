"""One data set for many workers: shards of it, who gets which part, and where data sets come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prsgd.data.shards import Shards

__all__ = ["Shards"]


def __getattr__(name: str) -> Any:
    """``Shards`` when it is asked for: it imports torch, which splits and downloads do without."""
    if name == "Shards":
        from prsgd.data.shards import Shards

        return Shards
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
