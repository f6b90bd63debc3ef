"""What a region computes with beside tensors: the same, however many rows it is given, if they are to be cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memscale.core import pytrees

# What operators call sizes that the rows are of.
_SIZES = frozenset(("size", "N"))
# Of a tensor made in Python, so many numbers are looked at.
_FEW = 64


def arguments_of(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator by name, defaults among them."""
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return given | {argument.name: value for argument, value in zip(arguments, args, strict=False)} | dict(kwargs)


def told(func: Any, given: Mapping[str, Any]) -> str:
    """An operator and what it is given beside tensors and sizes; of a tensor made in Python, its numbers."""
    said = {name: value for name, value in given.items() if name not in _SIZES and not pytrees.tensors(value)}
    if func is torch.ops.aten.lift_fresh.default and given["self"].numel() <= _FEW:
        said["self"] = given["self"].tolist()
    return f"{func} {said}"
