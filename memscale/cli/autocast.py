"""Autocast around a model's forward, as accelerate adds it for a Trainer's ``bf16=True`` or ``fp16=True``."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

from memscale.core import pytrees

AMP = ("bf16", "bfloat16", "fp16", "float16")
_HALF = (torch.float16, torch.bfloat16)


def autocasting(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Puts the forward of `model` under autocast, with float32 outputs, as accelerate does.

    >>> model = torch.nn.Linear(4, 4)
    >>> autocasting(model, "cpu", torch.bfloat16)
    >>> model.weight.dtype, model(torch.ones(1, 4)).dtype
    (torch.float32, torch.float32)
    """
    bound = model.forward
    # The unbound function, so that the forward of a copied module runs the copy.
    inner = getattr(bound, "__func__", lambda _, *args, **kwargs: bound(*args, **kwargs))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            output = inner(self, *args, **kwargs)
        leaves, spec = pytrees.flatten(output)
        wide = [leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF else leaf for leaf in leaves]
        return pytrees.unflatten(spec, wide)

    model.forward = types.MethodType(forward, model)
