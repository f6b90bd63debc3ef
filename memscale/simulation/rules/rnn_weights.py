"""The flat storage in which a CUDA device holds all weights of an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``, for cuDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
GATES = (1, 1, 4, 3)
# The dtypes whose weights a module flattens (torch/backends/cudnn/__init__.py); bfloat16 is never flattened.
FLATTENED = (torch.float16, torch.float32, torch.float64)


def halved_together(
    weights: Sequence[torch.Tensor], mode: int, hidden: int, directions: int
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Returns one flat float16 tensor for all weights, and each weight's copy as a view of it.

    Source: ``_cudnn_rnn_cast_reflatten`` in aten/src/ATen/cudnn/AutocastRNN.cpp, where autograd sees the copies.
    """
    if any(weight.dtype is torch.float64 for weight in weights) or weights[0].dtype is torch.float16:
        return stand_in(weights), weights
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    flat = weights[0].new_empty(matrices + directions * 2 * GATES[mode] * hidden, dtype=torch.float16)
    parts = flat[: sum(weight.numel() for weight in weights)].split([weight.numel() for weight in weights])
    return flat, [
        _Reflatten.apply(weight, part.view_as(weight))  # type: ignore[no-untyped-call]
        for weight, part in zip(weights, parts, strict=True)
    ]


class _Reflatten(torch.autograd.Function):
    """The differentiable copy of a weight into its view of the flat tensor; backward casts to the weight's dtype."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        part.copy_(weight)
        return part.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.to(ctx.dtype), None


def are_flattened(weights: Sequence[torch.Tensor]) -> bool:
    """Whether a module on the card has `weights` in one flat storage: distinct parameters of a flattened dtype.

    Tensors in place of parameters (casts, streamed copies, a parametrization) are separate; cuDNN's operator copies
    them into a flat buffer at each call, and saves the buffer for backward.
    """
    own = all(isinstance(weight, nn.Parameter) and weight.dtype in FLATTENED for weight in weights)
    return own and len({id(weight) for weight in weights}) == len(weights)


def flattened_bytes(module: nn.Module) -> int:
    """Returns the bytes of the flat storage that ``Module.to`` makes for `module` on a card; 0 without a flat storage.

    Source: ``flatten_parameters`` in torch/nn/modules/rnn.py, ``copy_weights_to_flat_buf_views`` in cudnn/RNN.cpp.
    """
    if not isinstance(module, nn.RNNBase) or not torch.backends.cudnn.enabled:
        return 0
    weights = weights_of(module)
    if not are_flattened(weights) or len({weight.untyped_storage()._cdata for weight in weights}) < len(weights):
        return 0
    matrices = sum(weight.numel() for weight in weights if weight.dim() == 2)
    biases = module.num_layers * (1 + module.bidirectional) * 2 * GATES[MODES[module.mode.lower()]] * module.hidden_size
    return int((matrices + biases) * weights[0].itemsize)


def weights_of(module: nn.RNNBase) -> list[torch.Tensor]:
    """Returns the weights of a recurrence, in the order in which cuDNN takes them."""
    return [weight for weights in module.all_weights for weight in weights]


def stand_in(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns a tensor in place of the flat storage of all weights: the first weight's data, without new memory."""
    return weights[0].data


def halved(tensor: Any) -> Any:
    """Returns `tensor` in float16, as autocast casts for cuDNN's RNNs whatever its own dtype; float64 and None stay."""
    return tensor if tensor is None or tensor.dtype is torch.float64 else tensor.to(torch.float16)
