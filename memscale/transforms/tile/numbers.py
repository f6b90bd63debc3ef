"""Operator calls as text, for the comparison of two runs of a region with different numbers of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memscale.core import pytrees

# Names of arguments that hold sizes, which contain the number of rows.
_SIZES = frozenset(("size", "N"))
# The values of a tensor made in Python are compared up to this many numbers.
_FEW = 64


def arguments_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operator call by name, including defaults."""
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return given | {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)


def spelled(func: Any, given: Mapping[str, Any]) -> str:
    """Returns an operator call as text: its arguments except tensors and sizes, and small constant tensors."""
    said = {name: value for name, value in given.items() if name not in _SIZES and not pytrees.tensors(value)}
    if func is torch.ops.aten.lift_fresh.default and given["self"].numel() <= _FEW:
        said["self"] = given["self"].tolist()
    return f"{func} {said}"
