"""For the reference page: the examples in docstrings, which have no heading of their own, as blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a line that begins with >>> to the next empty line.
_EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Fences them."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called with each function, class, attribute and module."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
