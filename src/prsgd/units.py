"""Numbers with units, as people write them: 1Gbit, 125MB/s, 50ms, 8h.

What is far beyond anything that there is, 1e300d or 1e-320bit, is refused: numbers that are made from it would leave
what a float can hold.
"""

from __future__ import annotations

import math
import re

from prsgd._check import shown

MOST = 10**15
"""Of what is counted: 1,000T."""
MOST_SECONDS = 1e12
"""30,000 years."""
LEAST_SECONDS = 1e-15
"""Of what takes time at all."""
BANDWIDTHS = (0.125, 1e18)
"""Bytes per second."""

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
        raise ValueError(f"{name} must be a number with a unit such as 1Gbit or 125MB/s, got {shown(text)}")
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {shown(text)}")
    rate = value * _PREFIX[found[2]] / (1.0 if found[3] == "B/s" else 8.0)
    if not BANDWIDTHS[0] <= rate <= BANDWIDTHS[1]:
        raise ValueError(f"{name} must be from 1bit to 1e18B/s, got {shown(text)}")
    return rate


def seconds(name: str, text: str, *, above_zero: bool = False) -> float:
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
        raise ValueError(f"{name} must be a time with a unit such as 50ms, 20s or 8h, got {shown(text)}")
    if value < 0 or (above_zero and not value):
        raise ValueError(f"{name} must be {'above' if above_zero else 'at least'} 0, got {shown(text)}")
    time = value * _SECONDS[found[2]]
    if above_zero and time < LEAST_SECONDS:
        raise ValueError(f"{name} must be at least {LEAST_SECONDS:g} seconds, got {shown(text)}")
    if time > MOST_SECONDS:
        raise ValueError(f"{name} must be at most {MOST_SECONDS:g} seconds, got {shown(text)}")
    return time


def count(name: str, text: str) -> int:
    """A whole number of things, as 25M or 100k.

    >>> count("parameters", "25M"), count("parameters", "270_000")
    (25000000, 270000)
    >>> count("parameters", "1e308")
    Traceback (most recent call last):
    ValueError: parameters must be at most 1,000T, got '1e308'
    """
    found = re.fullmatch(r"\s*([0-9._eE+]+)\s*([kKMGT]?)\s*", text)
    value = _number(found[1].replace("_", "")) if found else None
    if found is not None and value is not None and value * _PREFIX[found[2]] > MOST:
        raise ValueError(f"{name} must be at most {MOST // 10**12:,}T, got {shown(text)}")
    whole = None if found is None or value is None else round(value * _PREFIX[found[2]], 6)  # 2.01M is whole
    if whole is None or whole < 1 or whole != int(whole):
        raise ValueError(f"{name} must be a whole number >= 1 such as 270000 or 25M, got {shown(text)}")
    return int(whole)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
