"""Regions that run uncompiled under `torch.compile`, between two graphs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch


def uncompiled(run: Callable[..., Any], why: str, *arguments: Any) -> Any:
    """``run(*arguments)``, at the price of a graph break where Dynamo traces it; `why` is what Dynamo reports then."""
    # In a `try`, because Dynamo cannot resume in the middle of one, and so leaves this whole frame to Python.
    try:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break(msg=why)
    finally:
        pass
    if "torch._dynamo" in sys.modules:  # loading it takes longer than importing memscale
        run = _without_dynamo(run)
    return run(*arguments)


@functools.cache
def _without_dynamo(run: Callable[..., Any]) -> Callable[..., Any]:
    # What a compiled graph keeps is decided by its compiler, before any hook is asked.
    return torch.compiler.disable(run)  # type: ignore[no-any-return]
