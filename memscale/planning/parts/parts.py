"""The parts of a model that a plan decides about one by one: blocks, stages, towers, found by what they keep."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from memscale.core import matches, template
from memscale.planning.parts.blocks import could_be_block, repeated_blocks
from memscale.planning.parts.heads import loss_head
from memscale.simulation import SimulatedStep

# A part of more than this share of what the step keeps is looked into, for its own parts decide better than it can.
_LARGE = 1 / 8
# What keeps less than this share is left alone: no decision about it shows in the peak.
_SMALL = 1 / 1000
# Of what a part keeps: a module inside with less is no part of its own, and one with more is the part itself.
_LEAST, _MOST = 1 / 10, 9 / 10
# Where the parts of a module keep less than this share of what it keeps, its own code makes most, and it is the part.
# Of what the whole model seems to keep the loss has its share.
_COVERED, _COVERED_OF_ALL = 1 / 2, 1 / 10
# What runs so often in a step is a block in a row, as if there were as many.
_RUNS = 3
# The first and the last block of a row keep a little more or less than the others.
_ALIKE = 0.1


@dataclass(frozen=True)
class Part:
    """One part of the model.

    Attributes:
        path: of its module.
        module: the module.
        children: paths, relative to `path`, of the modules inside that keep a good share of what it keeps: the
            attention and the feed-forward layers of a block.
        alike: what two parts share that are alike in code, shapes, and what the step does with them.
    """

    path: str
    module: nn.Module
    children: tuple[str, ...]
    alike: object


def parts_of(model: nn.Module, step: SimulatedStep, *, tiles: bool = False) -> tuple[Part, ...]:
    """The parts of `model`, none inside another, in the order in which the step comes to them.

    Repeated blocks are parts, at whatever depth, and what runs repeatedly. What is not repeated is taken apart until a
    part keeps a small share of what backward waits for, or most of that is made by its own code, which may be the
    whole model's; and where its rows may be cut (`tiles`), down to the loss head, which is outside.
    """
    modules = dict(model.named_modules())
    paths = list(modules)
    found = step.shares(paths)
    kept = dict(zip(paths, found.kept_bytes.tolist(), strict=False))
    seconds = dict(zip(paths, found.seconds.tolist(), strict=False))
    first: dict[str, float] = {path: at for path, at in zip(paths, found.first.tolist(), strict=False) if at >= 0}
    for path in reversed(paths):  # children come after their parents
        if path:
            parent = path.rpartition(".")[0]
            kept[parent] += kept[path]
            seconds[parent] += seconds[path]
            first[parent] = min(first.get(parent, math.inf), first.get(path, math.inf))
    patterns = repeated_blocks(model)
    blocks = {path for path in paths if any(matches(pattern, path) for pattern in patterns)}
    around = _above(blocks)
    head = loss_head(model, blocks) if tiles and blocks else None
    # What comes before a block is no loss head; what is around one can be recomputed as a whole, but cut it is cheaper.
    late = head is not None and first.get(head, -1.0) >= max(first.get(path, math.inf) for path in blocks)
    opened = _above([head]) if head is not None and late else frozenset[str]()

    def is_small(path: str) -> bool:
        if kept[path] <= _LARGE * kept[""]:
            return True
        # What is around a loop does not itself recur, though its operators do.
        return all(kept[child] <= _MOST * kept[path] for child in _children(path, modules)) and step.runs(path) >= _RUNS

    def within(path: str) -> list[str]:
        """The parts at and below `path`."""
        if kept[path] <= _SMALL * kept[""]:
            return []
        can_be = path not in opened and could_be_block(modules[path])
        if can_be and (path in blocks or (path and path not in around and is_small(path))):
            return [path]
        below = [each for child in _children(path, modules) for each in within(child)]
        has_blocks = path in around if path else bool(blocks)
        least = 0.0 if has_blocks else kept[path] * (_COVERED if path else _COVERED_OF_ALL)
        return [path] if can_be and sum(kept[each] for each in below) <= least else below

    chosen = sorted(within(""), key=lambda path: first.get(path, 0))
    families: dict[object, list[tuple[int, float]]] = {}
    found_parts = []
    for path in chosen:
        # Stages on the way down and up may have the same shapes, but not the same neighbours.
        shape = (template(path), _shape(modules[path]))
        known = families.setdefault(shape, [])
        use = (kept[path], seconds[path])
        family = next((at for at, other in enumerate(known) if _close(use, other)), len(known))
        if family == len(known):
            known.append(use)
        children = tuple(child.removeprefix(f"{path}.") for child in _large(path, modules, kept))
        found_parts.append(Part(path, modules[path], children, (shape, family)))
    return tuple(found_parts)


def _above(paths: Collection[str]) -> frozenset[str]:
    """The paths of the modules around those at `paths`, but for the model."""
    return frozenset(path[:at] for path in paths for at, letter in enumerate(path) if letter == ".")


def _close(one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Whether two parts keep as much and take as long, but for what happens where they meet their neighbours."""
    return all(abs(first - second) <= _ALIKE * max(first, second) for first, second in zip(one, other, strict=True))


def _large(path: str, modules: dict[str, nn.Module], kept: dict[str, int]) -> list[str]:
    """The modules inside that could be regions of their own and keep a tenth to nine tenths of what this one keeps."""
    found = []
    for child in _children(path, modules):
        if kept[child] > _MOST * kept[path]:
            return _large(child, modules, kept)
        if kept[child] >= _LEAST * kept[path] and could_be_block(modules[child]):
            found.append(child)
    return found


def _shape(module: nn.Module) -> object:
    """What two modules share that are alike: their classes, and the shapes of what they hold."""
    return (
        type(module).__qualname__,
        tuple((name, type(each).__qualname__) for name, each in module.named_modules()),
        tuple(
            (name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in module.named_parameters()
        ),
    )


def _children(path: str, modules: dict[str, nn.Module]) -> list[str]:
    prefix = f"{path}." if path else ""
    return [prefix + name for name, child in modules[path].named_children() if prefix + name in modules]
