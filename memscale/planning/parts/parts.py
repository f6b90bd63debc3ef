"""The parts of a model that a plan decides about one by one: blocks, stages, towers, found by what they keep."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from memscale.core import matches, template
from memscale.planning.parts.blocks import could_be_block, repeated_blocks
from memscale.planning.parts.heads import loss_head
from memscale.simulation import Trace, runs_of, shares

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
        members: of a part around others, a group, the numbers of those; none of a part that is around no other.
    """

    path: str
    module: nn.Module
    children: tuple[str, ...]
    alike: object
    members: tuple[int, ...] = ()


class Uses:
    """What the modules of a model have of a step, with what is inside them.

    Attributes:
        modules: by path.
        kept: by path, the bytes that wait for backward.
        seconds: by path, the time of its operators.
        first: by path, when the step comes to it, as the number of an operator; not of those that never run.
    """

    def __init__(self, model: nn.Module, step: Trace) -> None:
        self.modules = dict(model.named_modules())
        paths = list(self.modules)
        found = shares(step, paths)
        self.kept: dict[str, int] = dict(zip(paths, found.kept_bytes.tolist(), strict=False))
        self.seconds: dict[str, float] = dict(zip(paths, found.seconds.tolist(), strict=False))
        self.first: dict[str, float] = {
            path: at for path, at in zip(paths, found.first.tolist(), strict=False) if at >= 0
        }
        for path in reversed(paths):  # children come after their parents
            if path:
                parent = path.rpartition(".")[0]
                self.kept[parent] += self.kept[path]
                self.seconds[parent] += self.seconds[path]
                self.first[parent] = min(self.first.get(parent, math.inf), self.first.get(path, math.inf))

    def children(self, path: str) -> list[str]:
        """The paths of the modules in the one at `path`."""
        prefix = f"{path}." if path else ""
        return [prefix + name for name, child in self.modules[path].named_children() if prefix + name in self.modules]

    def parts(self, paths: Iterable[str]) -> tuple[Part, ...]:
        """The modules at `paths` as parts, those that are alike with the same `alike`."""
        families: dict[object, list[tuple[int, float]]] = {}
        found = []
        for path in paths:
            # Stages on the way down and up may have the same shapes, but not the same neighbours.
            shape = (template(path), _shape(self.modules[path]))
            known = families.setdefault(shape, [])
            use = (self.kept[path], self.seconds[path])
            family = next((at for at, other in enumerate(known) if _close(use, other)), len(known))
            if family == len(known):
                known.append(use)
            children = tuple(child.removeprefix(f"{path}.") for child in self._large(path))
            found.append(Part(path, self.modules[path], children, (shape, family)))
        return tuple(found)

    def _large(self, path: str) -> list[str]:
        """The modules inside that could be regions of their own and keep a tenth to nine tenths of what it keeps."""
        found = []
        for child in self.children(path):
            if self.kept[child] > _MOST * self.kept[path]:
                return self._large(child)
            if self.kept[child] >= _LEAST * self.kept[path] and could_be_block(self.modules[child]):
                found.append(child)
        return found


def parts_of(model: nn.Module, step: Trace, *, tiles: bool = False) -> tuple[Part, ...]:
    """The parts of `model`, none inside another, in the order in which the step comes to them.

    Repeated blocks are parts, at whatever depth, and what runs repeatedly. What is not repeated is taken apart until a
    part keeps a small share of what backward waits for, or most of that is made by its own code, which may be the
    whole model's; and where its rows may be cut (`tiles`), down to the loss head, which is outside.
    """
    uses = Uses(model, step)
    modules, kept, first = uses.modules, uses.kept, uses.first
    patterns = repeated_blocks(model)
    blocks = {path for path in modules if any(matches(pattern, path) for pattern in patterns)}
    around = _above(blocks)
    head = loss_head(model, blocks) if tiles and blocks else None
    # What comes before a block is no loss head; what is around one can be recomputed as a whole, but cut it is cheaper.
    late = head is not None and first.get(head, -1.0) >= max(first.get(path, math.inf) for path in blocks)
    opened = _above([head]) if head is not None and late else frozenset[str]()

    def is_small(path: str) -> bool:
        if kept[path] <= _LARGE * kept[""]:
            return True
        # What is around a loop does not itself recur, though its operators do.
        return all(kept[child] <= _MOST * kept[path] for child in uses.children(path)) and runs_of(step, path) >= _RUNS

    def within(path: str) -> list[str]:
        """The parts at and below `path`."""
        if kept[path] <= _SMALL * kept[""]:
            return []
        can_be = path not in opened and could_be_block(modules[path])
        if can_be and (path in blocks or (path and path not in around and is_small(path))):
            return [path]
        below = [each for child in uses.children(path) for each in within(child)]
        has_blocks = path in around if path else bool(blocks)
        least = 0.0 if has_blocks else kept[path] * (_COVERED if path else _COVERED_OF_ALL)
        return [path] if can_be and sum(kept[each] for each in below) <= least else below

    return uses.parts(sorted(within(""), key=lambda path: first.get(path, 0)))


def _above(paths: Collection[str]) -> frozenset[str]:
    """The paths of the modules around those at `paths`, but for the model."""
    return frozenset(path[:at] for path in paths for at, letter in enumerate(path) if letter == ".")


def _close(one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Whether two parts keep as much and take as long, but for what happens where they meet their neighbours."""
    return all(abs(first - second) <= _ALIKE * max(first, second) for first, second in zip(one, other, strict=True))


def _shape(module: nn.Module) -> object:
    """What two modules share that are alike: their classes, and the shapes of what they hold."""
    return (
        type(module).__qualname__,
        tuple((name, type(each).__qualname__) for name, each in module.named_modules()),
        tuple(
            (name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in module.named_parameters()
        ),
    )
