"""The loss head of a model: the linear layer whose results are the largest tensors of a step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def loss_head(model: nn.Module, blocks: Iterable[str]) -> str | None:
    """The path of the linear layer outside of `blocks` with the most outputs, the last of several; None without one."""
    inside = tuple(f"{block}." for block in blocks)
    heads = {
        path: module.out_features
        for path, module in model.named_modules()
        if path and isinstance(module, nn.Linear) and not f"{path}.".startswith(inside)
    }
    return max(reversed(heads), key=heads.__getitem__, default=None)


def is_tied(model: nn.Module, head: str) -> bool:
    """Whether another module of `model` has the weight of the layer at `head` too, as an embedding."""
    weight = model.get_submodule(head).weight
    return sum(each is weight for module in model.modules() for each in module._parameters.values()) > 1
