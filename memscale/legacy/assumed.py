"""What `wrap` assumes of a step where it was not told: AdamW, dense gradients, and a cross entropy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from memscale.algebra import copy_tree, walk
from memscale.config import Config
from memscale.core import batches, tensors
from memscale.legacy.log import say


def or_adamw(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    """Returns `optimizer`, or AdamW of the trained parameters if it is unknown."""
    return optimizer or torch.optim.AdamW(filter(lambda each: each.requires_grad, model.parameters()))


def is_as_assumed(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of `optimizer` takes the memory of the AdamW that `or_adamw` makes."""
    plain = {"amsgrad": False, "foreach": None, "fused": None}
    are_plain = all(group.get(name) is value for group in optimizer.param_groups for name, value in plain.items())
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and are_plain


def with_dense_gradients(model: nn.Module, batch: Any, config: Config) -> nn.Module:
    """Returns `model`, or a copy that shares all tensors, whose embeddings have dense gradients: AdamW takes no others.

    Tables with fewer rows than the batch has integers keep their sparse gradients, which take more memory than dense
    ones; a step with such a table cannot be simulated.
    """
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    picked = sum(tensor.numel() for tensor in tensors(batch) if not tensor.is_floating_point())
    sparse = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, embeddings) and module.sparse and module.num_embeddings >= picked
    }
    if not sparse:
        return model
    say(config, f"sparse gradients count as dense ones, of AdamW: {', '.join(map(repr, sparse))}")
    return with_attribute(model, sparse.values(), "sparse", False)


def with_attribute(model: nn.Module, modules: Iterable[nn.Module], name: str, value: object) -> nn.Module:
    """Returns a copy of `model` that shares all tensors and in which an attribute of `modules` has another value."""
    copies = copy_tree(walk(model))  # other threads may be training the model
    for module in modules:
        setattr(copies[id(module)], name, value)
    copy: nn.Module = copies[id(model)]
    return copy


def any_loss(output: Any, _: Any) -> torch.Tensor:
    """A loss for a model whose loss is unknown: the output's own loss, else a cross entropy of the largest output.

    Usual losses take at most as much memory as a cross entropy in float32, which autocast makes of it: one more tensor
    of the output's size in forward, and two in backward. All other outputs are summed.
    """
    own = batches.own_loss(output)
    if isinstance(own, torch.Tensor) and own.numel() == 1:
        return own
    found = [tensor for tensor in tensors(output) if tensor.requires_grad]
    largest = max(filter(_has_rows, found), key=torch.Tensor.numel, default=None)
    return torch.stack([(_entropy if each is largest else torch.sum)(each).real.float() for each in found]).sum()


def _has_rows(output: torch.Tensor) -> bool:
    """Whether a cross entropy takes `output`: no scalar, no complex numbers, and no layout or class of its own."""
    is_plain = type(output) is torch.Tensor and output.layout is torch.strided
    return is_plain and output.dim() > 0 and output.numel() > 0 and not output.is_complex()


def _entropy(output: torch.Tensor) -> torch.Tensor:
    rows = output.reshape(-1, output.shape[-1]).float()
    return functional.cross_entropy(rows, rows.new_zeros(len(rows), dtype=torch.long))
