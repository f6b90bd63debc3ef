"""Version counters of tensors, and the error about a tensor that was changed after it was saved."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from memscale.core.errors import CorrectnessError


def version(tensor: torch.Tensor) -> int:
    """Returns the version counter of `tensor`, which in-place changes increase; -1 for an inference tensor."""
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor has none
        return -1


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Returns the version of each of `tensors`, in a third of the time of calls of `version`."""
    try:
        return list(map(_read_version, tensors))
    except RuntimeError:  # one is an inference tensor, which has no version
        return [version(tensor) for tensor in tensors]


_read_version = operator.attrgetter("_version")


def described(what: str, dtype: torch.dtype, size: torch.Size) -> str:
    """Returns the words by which an error names the tensor `what`, with dtype and shape."""
    return f"{what}, {str(dtype).removeprefix('torch.')}{list(size)},"


def changed_error(
    what: str, now: int, expected: int, remedy: str = "Change a clone of it, or call backward first"
) -> CorrectnessError:
    """Returns the error, worded as autograd's, about a saved tensor that was changed."""
    return CorrectnessError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is at version {now}, expected version {expected}. {remedy}"
    )
