"""JSON that others may have written."""

from __future__ import annotations

import json
from typing import Any


def parse(text: str | bytes) -> Any:
    """What ``text`` says; a ValueError if it is no JSON, or nested so deeply that Python cannot read it.

    >>> parse('{"workers": 8}')
    {'workers': 8}
    >>> parse("[" * 100_000)
    Traceback (most recent call last):
    ValueError: nested too deeply
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
