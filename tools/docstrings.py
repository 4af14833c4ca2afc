"""For the reference: examples in docstrings are fenced, or Markdown would take ``>>>`` for quotations."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n(?!>>> )|\Z)", re.DOTALL | re.MULTILINE)


class Doctests(Extension):
    """Each run of examples up to an empty line that no example follows becomes one block of code."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", obj.docstring.value)
