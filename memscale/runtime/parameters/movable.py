"""Decides which parameters may live on another tier."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memscale.core import internals
from memscale.runtime.engine.entry import is_unshared


def is_movable(parameter: torch.Tensor, *, besides: Callable[[torch.UntypedStorage], int] = lambda storage: 0) -> bool:
    """Whether moving `parameter` frees its memory and affects nobody else.

    `besides` returns how many references to a storage do not count.
    """
    if type(parameter) is not torch.nn.Parameter or parameter.layout is not torch.strided or parameter.is_meta:
        return False
    if parameter.numel() == 0 or parameter.is_quantized or isinstance(parameter.data, internals.FakeTensor):
        return False
    storage = parameter.untyped_storage()
    if storage.nbytes() != parameter.nbytes or not is_dense(parameter):
        return False
    if parameter.is_cpu and storage.is_shared():  # with other processes
        return False
    return is_unshared(parameter, besides=besides(storage))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for size, stride in sorted(zip(tensor.size(), tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
