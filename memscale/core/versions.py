"""Versions of tensors, and the error about one that was changed after it was saved."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memscale.core.errors import CorrectnessError


def version(tensor: torch.Tensor) -> int:
    """The version counter of `tensor`, which in-place changes raise; -1 for inference tensors, which have none."""
    return -1 if tensor.is_inference() else tensor._version


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The version of each of many tensors, in a third of the time."""
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor
        return [version(tensor) for tensor in tensors]


def described(what: str, dtype: torch.dtype, size: torch.Size) -> str:
    """What an error calls the tensor `what`: with its type and shape."""
    return f"{what}, {str(dtype).removeprefix('torch.')}{list(size)},"


def changed_error(
    what: str, now: int, expected: int, remedy: str = "Change a clone of it, or call backward first"
) -> CorrectnessError:
    """The error that autograd raises for a saved tensor that was changed."""
    return CorrectnessError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is at version {now}, expected version {expected}. {remedy}"
    )
