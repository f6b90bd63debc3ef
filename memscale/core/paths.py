"""Patterns over module paths: ``*`` is one segment (or part of one), ``**`` any number of segments, ``""`` the root."""

from __future__ import annotations

import functools
import re
from typing import Any

from memscale.core.misuse import shown

_NUMBER = re.compile(r"\d+")


def matches(pattern: str, path: str) -> bool:
    """Whether the module path `path` matches `pattern`.

    >>> matches("layers.*", "layers.0"), matches("layers.*", "layers.0.mlp"), matches("**.mlp", "layers.0.mlp")
    (True, False, True)
    """
    return _regex(pattern).fullmatch(f".{path}" if path else "") is not None


def template(path: str) -> str:
    """`path` with a star for each number: the pattern of all that differ from it in numbers alone.

    >>> template("layers.0.mlp"), numbers("layers.12.mlp.3")
    ('layers.*.mlp', [12, 3])
    """
    return _NUMBER.sub("*", path)


def numbers(path: str) -> list[int]:
    """The numbers in `path`."""
    return [int(number) for number in _NUMBER.findall(path)]


def misfit(pattern: Any) -> str | None:
    """Why `pattern` is not a path pattern; `None` if it is one."""
    if not isinstance(pattern, str):
        return f"a path pattern is a string such as 'layers.*', got {shown(pattern)}"
    if pattern and any(not segment for segment in pattern.split(".")):
        return f"the path pattern {pattern!r} has an empty segment; write 'a.b', or '' for the root"
    if any("**" in segment and segment != "**" for segment in pattern.split(".")):
        return f"in the path pattern {pattern!r}, '**' must be a whole segment, as in 'layers.**.mlp'"
    return None


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    """`pattern` as a regular expression over the path with a dot put before every segment (the root is "")."""
    regex = ""
    for segment in pattern.split(".") if pattern else []:
        if segment == "**":
            regex += r"(?:\.[^.]+)*"
        else:
            regex += r"\." + re.escape(segment).replace(r"\*", "[^.]*")
    return re.compile(regex)
