"""What kind of model it is, by the shapes of its parameters: no name of a class or of a module is looked at."""

from __future__ import annotations

from torch import nn

_MOSTLY = 0.8  # embeddings, before a model counts as made of them
_LEAST_EXPERTS = 4


def architecture_of(model: nn.Module) -> str:
    """One of the closed list.

    >>> import torch
    >>> architecture_of(torch.nn.Conv2d(3, 8, 3)), architecture_of(torch.nn.LSTM(4, 4))
    ('convnet', 'recurrent')
    """
    parameters = list(model.parameters())
    total = sum(each.numel() for each in parameters)
    if not total:
        return "other"
    modules = list(model.modules())
    recurrent = sum(_own(each) for each in modules if isinstance(each, (nn.RNNBase, nn.RNNCellBase)))
    embedding = sum(_own(each) for each in modules if isinstance(each, (nn.Embedding, nn.EmbeddingBag)))
    convolved = sum(each.numel() for each in parameters if each.dim() in (4, 5))
    if 2 * recurrent > total - embedding:
        return "recurrent"
    if embedding > _MOSTLY * total:
        return "embedding"
    stacks = [each for each in modules if isinstance(each, (nn.ModuleList, nn.Sequential)) and _is_a_stack(each)]
    if any(each.dim() == 3 and each.shape[0] >= _LEAST_EXPERTS and min(each.shape) > 4 for each in parameters) or any(
        _is_a_stack(inner) and len(inner) >= _LEAST_EXPERTS and not _attends(inner[0])
        for stack in stacks
        for block in stack
        for inner in block.modules()
        if isinstance(inner, nn.ModuleList)
    ):
        return "mixture"
    if 2 * convolved > total:
        return "convnet"
    if any(_scans(stack[0]) for stack in stacks):
        return "state_space"
    attending = [stack for stack in stacks if _attends(stack[0])]
    if not attending:
        return "other"
    if len({_shapes(stack[0]) for stack in attending}) > 1:
        return "encoder_decoder"
    tables = {each.weight.shape for each in modules if isinstance(each, nn.Embedding)}
    has_head = any(isinstance(each, nn.Linear) and each.weight.shape in tables for each in modules)
    return "decoder" if has_head else "encoder"


def _own(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _shapes(module: nn.Module) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(each.shape) for each in module.parameters())


def _is_a_stack(parts: nn.ModuleList | nn.Sequential) -> bool:
    """Whether its parts are alike, and more than one."""
    shapes = {_shapes(each) for each in parts}
    return len(parts) > 1 and len(shapes) == 1 and shapes != {()}


def _attends(block: nn.Module) -> bool:
    """Whether it has matrices enough for queries, keys, values, an output and an inner layer."""
    matrices = [each for each in block.parameters() if each.dim() == 2]
    outer = {min(each.shape) for each in matrices}
    return len(matrices) >= 4 and len(outer) <= 3 and len(list(block.modules())) > 5


def _scans(block: nn.Module) -> bool:
    """Whether it has a depthwise convolution over the sequence."""
    return any(isinstance(each, nn.Conv1d) and each.groups == each.in_channels > 1 for each in block.modules())
