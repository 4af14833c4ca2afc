"""Numbers with units, as people write them: 1Gbit, 125MB/s, 50ms, 8h."""

from __future__ import annotations

import math
import re

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def bytes_per_second(name: str, text: str) -> float:
    """A bandwidth: bits with "bit" or "bit/s", bytes with "B/s".

    >>> bytes_per_second("bandwidth", "1Gbit"), bytes_per_second("bandwidth", "100 Mbit/s")
    (125000000.0, 12500000.0)
    >>> bytes_per_second("bandwidth", "fast")
    Traceback (most recent call last):
    ValueError: bandwidth must be a number with a unit such as 1Gbit or 125MB/s, got 'fast'
    """
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*([kKMGT]?)(bit|bit/s|bps|B/s)\s*", text)
    value = _number(found[1]) if found else None
    if found is None or value is None:
        raise ValueError(f"{name} must be a number with a unit such as 1Gbit or 125MB/s, got {text!r}")
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {text!r}")
    return value * _PREFIX[found[2]] / (1.0 if found[3] == "B/s" else 8.0)


def seconds(name: str, text: str, *, at_least: float = 0.0) -> float:
    """A time.

    >>> seconds("latency", "50ms"), seconds("budget", "8h")
    (0.05, 28800.0)
    >>> seconds("latency", "50")
    Traceback (most recent call last):
    ValueError: latency must be a time with a unit such as 50ms, 20s or 8h, got '50'
    """
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(ns|us|µs|ms|s|min|h|d)\s*", text)
    value = _number(found[1]) if found else None
    if found is None or value is None:
        raise ValueError(f"{name} must be a time with a unit such as 50ms, 20s or 8h, got {text!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least:g}, got {text!r}")
    return value * _SECONDS[found[2]]


def count(name: str, text: str) -> int:
    """A whole number of things, as 25M or 100k.

    >>> count("parameters", "25M"), count("parameters", "270_000")
    (25000000, 270000)
    """
    found = re.fullmatch(r"\s*([0-9._eE+]+)\s*([kKMGT]?)\s*", text)
    value = _number(found[1].replace("_", "")) if found else None
    whole = None if found is None or value is None else round(value * _PREFIX[found[2]], 6)  # 2.01M is whole
    if whole is None or whole < 1 or whole != int(whole):
        raise ValueError(f"{name} must be a whole number >= 1 such as 270000 or 25M, got {text!r}")
    return int(whole)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
