"""Finds the loss head of a model: the linear layer whose results, the logits, are the largest tensors of a step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


def loss_head(model: nn.Module, blocks: Iterable[str]) -> str | None:
    """Returns the path of the linear layer outside `blocks` with the most outputs; None without a linear layer there.

    Of several layers with as many outputs, the last is returned.
    """
    inside = tuple(f"{block}." for block in blocks)
    heads = {
        path: module.out_features
        for path, module in model.named_modules()
        if path and isinstance(module, nn.Linear) and not f"{path}.".startswith(inside)
    }
    return max(reversed(heads), key=heads.__getitem__, default=None)


def is_tied(model: nn.Module, head: str) -> bool:
    """Returns whether another module of `model`, such as an embedding, shares the weight of the layer at `head`."""
    weight = model.get_submodule(head).weight
    return sum(each is weight for module in model.modules() for each in module._parameters.values()) > 1
