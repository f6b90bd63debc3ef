"""A forward in mixed precision, as accelerate prepares it for a Trainer's ``bf16=True`` or ``fp16=True``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memscale.algebra import OwnForward
from memscale.core import device_type, pytrees, tensors

_HALF = (torch.float16, torch.bfloat16)


class MixedPrecisionForward(OwnForward):
    """A module's own forward under autocast, with float32 outputs.

    >>> model = torch.nn.Linear(4, 4)
    >>> model.forward = MixedPrecisionForward(model, None, torch.bfloat16)
    >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
    (torch.float32, torch.float32)
    """

    def __init__(self, module: nn.Module, patched: Callable[..., Any] | None, dtype: torch.dtype) -> None:
        super().__init__(module, patched)
        self.dtype = dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of_device = next(map(device_type, tensors((args, kwargs))), "cpu")
        with torch.autocast(of_device, self.dtype):
            output = super().__call__(*args, **kwargs)
        leaves, spec = pytrees.flatten(output)
        wide = [leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF else leaf for leaf in leaves]
        return pytrees.unflatten(spec, wide)

    def reassembled(self, remap: Callable[[Any], Any]) -> OwnForward:
        return MixedPrecisionForward(remap(self.module), remap(self.patched), self.dtype)
