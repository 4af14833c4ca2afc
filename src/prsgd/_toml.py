"""TOML files that people write: unknown keys are refused with the nearest name."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prsgd._check import nearest, shown


def read(path: Path, allowed: Sequence[str]) -> dict[str, Any]:
    """Its keys, with _ for -; a ValueError names the file and what is wrong with it."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    except ValueError as error:  # no TOML, no text, or a number of thousands of digits
        raise ValueError(f"{path}: {error}") from None
    found = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in allowed:
            raise ValueError(f"{path}: unknown key {key!r}{nearest(name, allowed)} (its value: {shown(value)})")
        found[name] = value
    return found
