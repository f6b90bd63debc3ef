"""The package's source, parsed and walked once a process: the tests of where code lives go through all of it."""

from __future__ import annotations

import ast
import functools
import importlib
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(path)))


def exports(door):
    """The names that a folder gives to others: `__all__`, else what its `__init__.py` imports from the folder."""
    if hasattr(door, "__all__"):
        return set(door.__all__)
    found = set()
    for node in ast.walk(parsed(Path(door.__file__))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith(door.__package__):
            named = {each.name for each in node.names}
            found |= exports(importlib.import_module(node.module)) if named == {"*"} else named
    return found
