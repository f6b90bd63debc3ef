"""Finding the repeated blocks of a model from its structure alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from memscale.core import matches

# Two blocks count as alike when at least this share of the smaller one's parameters has the same name and
# shape in the other. ResNet's first block of a stage (another input width and a shortcut) shares 5 of 6.
_ALIKE = 0.5

_Signature = frozenset[tuple[str, tuple[int, ...]]]


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return plan patterns that match exactly the repeated blocks of ``model``, in the model's order.

    Modules whose paths differ only in numbers (``h.0`` and ``h.1``; ``block1`` and ``block2``) form a family.
    The members of one class are blocks when at least two of them are alike: half of their parameters have the
    same names and shapes. Then all the family's modules of that class are, so that a first block with a
    shortcut or a relative position bias stays with the others, and so is the odd one in an ``nn.ModuleList``
    of blocks (the one attention layer among Mamba layers). Outer families win over those inside them. A model
    with no such family, such as a U-Net whose stages all have other widths, gives its numbered stages, or
    nothing.

    Never a block: a module without parameters; one that is a single operation, such as ``nn.Linear``, because
    it has nothing to recompute; a container whose forward is never called, such as ``nn.ModuleList``; a plain
    ``nn.Sequential`` that itself is a row of blocks.

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
    # Duplicates stay: a module listed three times in a ModuleList is a block that runs three times.
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
    """Whether there is something in `module` to recompute, and a forward that is called."""
    # TorchScript runs its own graph and never calls the forwards of the modules that it was made from.
    if isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward:
        return False
    parameters = list(module.parameters())
    if not parameters or (type(module).forward is nn.Sequential.forward and _is_row_of_blocks(module)):
        return False
    # A childless module with one matrix is one operation (Linear, Conv2d, LayerNorm, Embedding): its input is
    # all that it saves, which a checkpoint would keep as well. One with more, an LSTM say, can be recomputed.
    return any(True for _ in module.children()) or sum(parameter.ndim >= 2 for parameter in parameters) >= 2


def _is_row_of_blocks(module: nn.Module) -> bool:
    rows = [child for child in module.children() if any(True for _ in child.parameters())]
    return (
        len(rows) >= 2
        and all(type(row) is type(rows[0]) and could_be_block(row) for row in rows)
        and all(_alike(_signature(rows[0]), _signature(row)) for row in rows[1:])
    )


def _family(path: str, modules: dict[str, nn.Module]) -> str:
    """The path with its numbers, and the keys of a ``ModuleDict``, masked."""
    masked = []
    parent = ""
    for segment in path.split("."):
        keyed = isinstance(modules.get(parent), nn.ModuleDict)
        masked.append("#" if keyed else re.sub(r"\d+", "#", segment))
        parent = f"{parent}.{segment}" if parent else segment
    return ".".join(masked)


def _is_tower(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a ``ModuleDict``'s key names a part with blocks of its own (an encoder), not one of a row."""
    parent, _, key = path.rpartition(".")
    named = isinstance(modules[parent], nn.ModuleDict) and not any(character.isdigit() for character in key)
    return named and bool(repeated_blocks(modules[path]))


def _inside(path: str, outer: Iterable[str]) -> bool:
    return any(path.startswith(f"{block}.") for block in outer)


def _repeats(paths: Sequence[str], modules: dict[str, nn.Module], same_code_is_enough: bool) -> list[str]:
    """The members of one family that are blocks."""
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
        # A class of the user's says what its instances do; being an nn.Sequential says nothing.
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
    """The fewest globs that match ``blocks`` and nothing else; a path itself where no glob does."""
    patterns: list[str] = []
    uncovered = list(blocks)
    # Widest first: every index that varies, then only the last one.
    for only_last in (False, True):
        for pattern in dict.fromkeys(_pattern(path, blocks, modules, only_last) for path in uncovered):
            matched = _matches(pattern, modules)
            if len(matched) >= 2 and set(matched) <= set(uncovered):
                patterns.append(pattern)
                uncovered = [path for path in uncovered if path not in set(matched)]
    # Every other name of a shared module is the same object, and a plan reaches it by its first name.
    first_names = {id(module): path for path, module in reversed(modules.items())}
    return patterns + list(dict.fromkeys(first_names[id(modules[path])] for path in uncovered))


def _pattern(path: str, blocks: Sequence[str], modules: dict[str, nn.Module], only_last: bool) -> str:
    """``path`` with ``*`` for its indices that vary over ``blocks``, which are of one family."""
    segments = path.split(".")
    values = [set(column) for column in zip(*(block.split(".") for block in blocks), strict=True)]
    masked = _family(path, modules).split(".")
    varying = [at for at, segment in enumerate(masked) if segment == "#" and len(values[at]) > 1]
    for at in varying[-1:] if only_last else varying:
        segments[at] = "*"
    return ".".join(segments)


def _matches(pattern: str, modules: dict[str, nn.Module]) -> list[str]:
    return [path for path in modules if matches(pattern, path)]
