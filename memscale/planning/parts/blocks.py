"""Finds the repeated blocks of a model from the model's structure alone, without a step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memscale.core import matches

# Share of the smaller block's parameters that have the same name and shape in the other, if both count as alike.
# ResNet's first block of a stage (another input width and a shortcut) shares 5 of 6; rows of blocks:
# benchmarks/bench_plan.py --only resnet.
_ALIKE = 0.5

_Signature = frozenset[tuple[str, tuple[int, ...]]]


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Returns plan patterns that match exactly the repeated blocks of ``model``, in the model's order.

    Modules whose paths differ only in numbers (``h.0`` and ``h.1``; ``block1`` and ``block2``) form a family. All
    members of one class in a family are blocks if at least two members are alike, which means: half of their parameters
    have equal names and shapes. So a first block with a shortcut or a relative position bias is a block like the
    others. In an ``nn.ModuleList`` that is mostly blocks, the other modules are blocks as well (the one attention layer
    among Mamba layers). Outer families take precedence over inner families. A model without such a family, such as a
    U-Net whose stages differ in width, gives its numbered stages, or nothing.

    Never blocks are: a module without parameters; a single operation, such as ``nn.Linear``, which has nothing to
    recompute; a container whose forward is never called, such as ``nn.ModuleList``; a plain ``nn.Sequential`` that
    is a row of blocks itself.

    Raises:
        TypeError: ``model`` is not an ``nn.Module``.

    >>> layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU())
    >>> repeated_blocks(nn.Sequential(layer(), layer(), layer()))
    ('*',)
    >>> repeated_blocks(nn.Sequential(nn.Embedding(8, 4), layer(), layer()))
    ('1', '2')
    >>> repeated_blocks(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    ()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"repeated_blocks() takes an nn.Module, got {type(model).__name__}; pass the model itself")
    # Duplicates are kept: a module listed three times in a ModuleList is a block that runs three times.
    modules = dict(model.named_modules(remove_duplicate=False))
    families: dict[str, list[str]] = defaultdict(list)
    for path, module in modules.items():
        if path and could_be_block(module):
            families[_family(path, modules)].append(path)
    # Outermost first; named_modules lists a family's members in the model's order.
    by_depth = sorted(families.items(), key=lambda item: item[0].count("."))
    for same_code_is_enough in (False, True):
        chosen: list[str] = []
        patterns: list[str] = []
        for _, paths in by_depth:
            free = [path for path in paths if not _inside(path, chosen) and not _is_tower(path, modules)]
            blocks = _repeats(free, modules, same_code_is_enough)
            chosen += blocks
            patterns += _patterns(blocks, modules)
        if patterns:
            order = {path: position for position, path in enumerate(modules)}
            first = {pattern: min(order[path] for path in _matches(pattern, modules)) for pattern in patterns}
            return tuple(sorted(patterns, key=first.__getitem__))
    return ()


def could_be_block(module: nn.Module) -> bool:
    """Returns whether `module` is more than one operation, and has a forward that Python calls."""
    parameters = list(module.parameters())
    if (
        not is_called(module)
        or not parameters
        or (type(module).forward is nn.Sequential.forward and _is_row_of_blocks(module))
    ):
        return False
    # A childless module with at most one matrix is one operation (Linear, Conv2d, LayerNorm, Embedding), which saves
    # its input only, as a checkpoint would. A childless module with more matrices, such as an LSTM, saves more.
    return any(True for _ in module.children()) or sum(parameter.ndim >= 2 for parameter in parameters) >= 2


def is_called(module: nn.Module) -> bool:
    """Returns whether `module` has a forward that Python calls."""
    # TorchScript runs its own graph and never calls the forwards of the original modules.
    return not isinstance(module, torch.jit.ScriptModule) and type(module).forward is not nn.Module.forward


def _is_row_of_blocks(module: nn.Module) -> bool:
    rows = [child for child in module.children() if any(True for _ in child.parameters())]
    return (
        len(rows) >= 2
        and all(type(row) is type(rows[0]) and could_be_block(row) for row in rows)
        and all(_alike(_signature(rows[0]), _signature(row)) for row in rows[1:])
    )


def _family(path: str, modules: dict[str, nn.Module]) -> str:
    """Returns `path` with its numbers, and the keys of a ``ModuleDict``, masked by ``#``."""
    masked = []
    parent = ""
    for segment in path.split("."):
        keyed = isinstance(modules.get(parent), nn.ModuleDict)
        masked.append("#" if keyed else re.sub(r"\d+", "#", segment))
        parent = f"{parent}.{segment}" if parent else segment
    return ".".join(masked)


def _is_tower(path: str, modules: dict[str, nn.Module]) -> bool:
    """Returns whether a ``ModuleDict``'s key names a module with blocks of its own, such as an encoder."""
    parent, _, key = path.rpartition(".")
    named = isinstance(modules[parent], nn.ModuleDict) and not any(character.isdigit() for character in key)
    return named and bool(repeated_blocks(modules[path]))


def _inside(path: str, outer: Iterable[str]) -> bool:
    return any(path.startswith(f"{block}.") for block in outer)


def _repeats(paths: Sequence[str], modules: dict[str, nn.Module], same_code_is_enough: bool) -> list[str]:
    """Returns the members of one family that are blocks."""
    chosen: set[str] = set()
    by_class: dict[type[nn.Module], list[str]] = defaultdict(list)
    for path in paths:
        by_class[type(modules[path])].append(path)
    for cls, members in by_class.items():
        clusters: list[tuple[_Signature, list[str]]] = []
        for path in members:
            signature = _signature(modules[path])
            for representative, cluster in clusters:
                if _alike(representative, signature):
                    cluster.append(path)
                    break
            else:
                clusters.append((signature, [path]))
        found = [path for _, cluster in clusters if len(cluster) >= 2 for path in cluster]
        # Instances of a user's class share their forward; instances of nn.Sequential share nothing.
        if cls is not nn.Sequential and len(members) >= 2 and (found or same_code_is_enough):
            found = members
        chosen.update(found)
    for parent in {path.rpartition(".")[0] for path in chosen}:
        siblings = [path for path in paths if path.rpartition(".")[0] == parent]
        if isinstance(modules[parent], nn.ModuleList) and 2 * len(chosen & set(siblings)) > len(siblings):
            chosen.update(siblings)
    return [path for path in paths if path in chosen]


def _signature(module: nn.Module) -> _Signature:
    return frozenset((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _alike(one: _Signature, other: _Signature) -> bool:
    return len(one & other) >= _ALIKE * min(len(one), len(other))


def _patterns(blocks: Sequence[str], modules: dict[str, nn.Module]) -> list[str]:
    """Returns the fewest globs that match ``blocks`` and nothing else; a block that no glob can match has its path."""
    patterns: list[str] = []
    uncovered = list(blocks)
    # Wide globs first: a star for every index that varies, then a star for the last such index only.
    for only_last in (False, True):
        for pattern in dict.fromkeys(_pattern(path, blocks, modules, only_last) for path in uncovered):
            matched = _matches(pattern, modules)
            if len(matched) >= 2 and set(matched) <= set(uncovered):
                patterns.append(pattern)
                uncovered = [path for path in uncovered if path not in set(matched)]
    # A plan reaches a module with several names by the first name.
    first_names = {id(module): path for path, module in reversed(modules.items())}
    return patterns + list(dict.fromkeys(first_names[id(modules[path])] for path in uncovered))


def _pattern(path: str, blocks: Sequence[str], modules: dict[str, nn.Module], only_last: bool) -> str:
    """Returns ``path`` with ``*`` for its indices that vary over ``blocks``, the blocks of one family."""
    segments = path.split(".")
    values = [set(column) for column in zip(*(block.split(".") for block in blocks), strict=True)]
    masked = _family(path, modules).split(".")
    varying = [at for at, segment in enumerate(masked) if segment == "#" and len(values[at]) > 1]
    for at in varying[-1:] if only_last else varying:
        segments[at] = "*"
    return ".".join(segments)


def _matches(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    return [path for path in modules if matches(pattern, path)]
