"""Patterns over module paths: ``*`` matches a segment or a part of one, ``**`` any number of segments, ``""`` the root.

``[0-3]`` matches one of these characters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from memscale.core.misuse import shown

_NUMBER = re.compile(r"\d+")
_WRAPPER = re.compile(r"(?:^|(?<=\.))_orig_mod\.")
_CLASS = re.compile(r"\[(?:\w-\w|\w)+\]")
_Item = TypeVar("_Item")
_PIECES = re.compile(rf"\*|{_CLASS.pattern}|[^*\[]+|\[")


def matches(pattern: str, path: str) -> bool:
    """Whether the module path `path` matches `pattern`.

    >>> matches("layers.*", "layers.0"), matches("layers.*", "layers.0.mlp"), matches("**.mlp", "layers.0.mlp")
    (True, False, True)
    >>> [number for number in range(12) if matches("layers.[0-37]", f"layers.{number}")]
    [0, 1, 2, 3, 7]

    ``torch.compile`` wraps a module, which becomes the wrapper's child ``_orig_mod``. A pattern without
    ``_orig_mod`` matches the wrapper, and the modules inside as if there were no wrapper:

    >>> matches("layers.*", "_orig_mod.layers.0"), matches("layers.*", "layers.0"), matches("*", "_orig_mod")
    (True, True, False)
    """
    if "_orig_mod" in path and "_orig_mod" not in pattern:
        if path.endswith("_orig_mod"):
            return False
        path = written(path)
    return pattern == path or _regex(pattern).fullmatch(f".{path}" if path else "") is not None


def written(path: str) -> str:
    """Returns `path` without the ``_orig_mod`` segments of ``torch.compile``, except one at its end.

    >>> written("_orig_mod.layers.0._orig_mod.mlp"), written("layers.0._orig_mod")
    ('layers.0.mlp', 'layers.0._orig_mod')
    """
    return _WRAPPER.sub("", path)


def template(path: str) -> str:
    """Returns `path` with a star for each number: a pattern for the paths that differ only in numbers.

    >>> template("layers.0.mlp"), numbers("layers.12.mlp.3")
    ('layers.*.mlp', [12, 3])
    """
    return _NUMBER.sub("*", path)


def numbers(path: str) -> list[int]:
    """Returns the numbers in `path`."""
    return [int(number) for number in _NUMBER.findall(path)]


def in_rows(
    items: Iterable[_Item], path: Callable[[_Item], str], same: Callable[[_Item], object]
) -> Iterator[list[_Item]]:
    """Groups consecutive items whose paths differ only in numbers and whose `same(item)` are equal."""
    row: list[_Item] = []
    key: object = None
    for item in items:
        its = (template(path(item)), same(item))
        if row and its != key:
            yield row
            row = []
        row.append(item)
        key = its
    if row:
        yield row


def in_runs(
    items: Sequence[_Item], path: Callable[[_Item], str], same: Callable[[_Item], object]
) -> Iterator[list[_Item]]:
    """Groups as `in_rows` does, and also splits where the last number does not increase by one.

    >>> list(in_runs(["h.0", "h.1", "h.3", "head"], lambda path: path, lambda _: None))
    [['h.0', 'h.1'], ['h.3'], ['head']]
    """
    keyed = []
    for at, item in enumerate(items):
        its = numbers(path(item))
        keyed.append((item, (*its[:-1], sum(its[-1:]) - at)))
    for row in in_rows(keyed, lambda each: path(each[0]), lambda each: (same(each[0]), each[1])):
        yield [item for item, _ in row]


def row_label(paths: Sequence[str]) -> str:
    """Returns the label of a row of parts.

    >>> row_label(["layers.2"]), row_label(["layers.0", "layers.1", "layers.2"]), row_label(["a.0.mlp", "a.1.mlp"])
    ('layers.2', 'layers.0 to 2', 'a.0.mlp to a.1.mlp')
    """
    first, last = written(paths[0]) or "(the rest)", written(paths[-1])
    if len(paths) == 1:
        return first
    head, _, tail = last.rpartition(".")
    return f"{first} to {tail if tail.isdecimal() and first.rpartition('.')[0] == head else last}"


def misfit(pattern: Any) -> str | None:
    """Returns why `pattern` is not a path pattern, or `None` if it is one."""
    if not isinstance(pattern, str):
        return f"a path pattern is a string such as 'layers.*', got {shown(pattern)}"
    if pattern and any(not segment for segment in pattern.split(".")):
        return f"the path pattern {pattern!r} has an empty segment; write 'a.b', or '' for the root"
    if any("**" in segment and segment != "**" for segment in pattern.split(".")):
        return f"in the path pattern {pattern!r}, '**' must be a whole segment, as in 'layers.**.mlp'"
    try:
        _regex(pattern)
    except re.error:
        return f"the path pattern {pattern!r} has a range from a later to an earlier character; write it as '[0-3]'"
    return None


def _piece(piece: str) -> str:
    """Returns the regular expression for one piece of a segment: a star, a class such as ``[0-3]``, or text."""
    return "[^.]*" if piece == "*" else piece if _CLASS.fullmatch(piece) else re.escape(piece)


@functools.lru_cache(maxsize=1024)
def _regex(pattern: str) -> re.Pattern[str]:
    """Compiles `pattern` to a regular expression over paths with a dot before every segment (the root is "")."""
    regex = ""
    for segment in pattern.split(".") if pattern else []:
        if segment == "**":
            regex += r"(?:\.[^.]+)*"
        else:
            regex += r"\." + "".join(map(_piece, _PIECES.findall(segment)))
    return re.compile(regex)
