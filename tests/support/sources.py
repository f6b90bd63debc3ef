"""The package's source, parsed and walked once a process: the tests of where code lives go through all of it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file, in the order of `ast.walk`."""
    return tuple(ast.walk(parsed(path)))
