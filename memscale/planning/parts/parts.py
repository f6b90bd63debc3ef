"""Finds the parts of a model that a plan decides about: blocks, stages and towers, by the bytes that each keeps.

"Keeps" means: saves for backward. All shares are of kept bytes in the step as written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from memscale.core import matches, template
from memscale.planning.parts.blocks import could_be_block, repeated_blocks
from memscale.planning.parts.heads import loss_head
from memscale.simulation import Trace, runs_of, shares

# Share of the step's kept bytes above which a module is divided: decisions about its parts are finer, and take more
# simulations: benchmarks/bench_simulate.py --plan.
_LARGE = 1 / 8
# Share of the step's kept bytes below which a module is no part: no decision about the module shows in the peak; more
# parts take longer to plan: benchmarks/bench_simulate.py --plan.
_SMALL = 1 / 1000
# Shares of a part's kept bytes: a module inside is a child of the part if its share is between these two; children are
# what the smallest steps recompute one by one: benchmarks/bench_plan.py --smallest.
_LEAST, _MOST = 1 / 10, 9 / 10
# Share of a module's kept bytes: if the parts inside keep less, the module's own code keeps most, and the module is the
# part. The second share is for the whole model, whose kept bytes include those of the loss: benchmarks/bench_plan.py.
_COVERED, _COVERED_OF_ALL = 1 / 2, 1 / 10
# Calls in a step from which a module counts as a repeated block, as a row of so many blocks does:
# benchmarks/bench_plan.py --only lstm.
_RUNS = 3
# Share by which alike parts may differ in kept bytes and seconds, as the first and the last block of a row do; unlike
# parts are simulated one by one: benchmarks/bench_simulate.py --plan.
_ALIKE = 0.1


@dataclass(frozen=True)
class Part:
    """A part of the model: the unit that a plan decides about.

    Attributes:
        path: the path of the part's module.
        module: the module.
        children: paths, relative to `path`, of modules inside that keep a tenth to nine tenths of the part's bytes,
            such as the attention and the feed-forward layer of a block.
        alike: the key of the part's family: equal for parts with equal classes and shapes, and about equal kept bytes
            and seconds.
        members: the numbers of the parts inside, if the part is a group; empty for any other part.
    """

    path: str
    module: nn.Module
    children: tuple[str, ...]
    alike: object
    members: tuple[int, ...] = ()


class ModuleShares:
    """The shares of a model's modules in a step; a module's share includes the modules inside.

    Attributes:
        modules: the modules by path.
        kept: by path, the bytes that the module saves for backward.
        seconds: by path, the seconds of the module's operators.
        first: by path, the number of the module's first operator in the step; only for modules that run.
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
        """Returns the paths of the child modules of the module at `path`."""
        prefix = f"{path}." if path else ""
        return [prefix + name for name, child in self.modules[path].named_children() if prefix + name in self.modules]

    def parts(self, paths: Iterable[str]) -> tuple[Part, ...]:
        """Returns the modules at `paths` as parts, grouped into families by `Part.alike`."""
        families: dict[object, list[tuple[int, float]]] = {}
        found = []
        for path in paths:
            # The key has the path's template: a U-Net's stages down and up may have equal shapes, but other neighbours.
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
        """Returns the paths of modules inside that can be regions and keep a tenth to nine tenths of the bytes.

        A single child with more than nine tenths stands in for the module at `path`.
        """
        found = []
        for child in self.children(path):
            if self.kept[child] > _MOST * self.kept[path]:
                return self._large(child)
            if self.kept[child] >= _LEAST * self.kept[path] and could_be_block(self.modules[child]):
                found.append(child)
        return found


def parts_of(model: nn.Module, step: Trace, *, tiles: bool = False) -> tuple[Part, ...]:
    """Returns the parts of `model`, disjoint, in the order in which the step runs them.

    Repeated blocks at any depth are parts, and so are modules that run repeatedly in a step. Other modules are divided
    until a module keeps a small share of the step's bytes, or until the module's own code keeps most of its bytes; the
    whole model may be one part.

    Args:
        model: the model.
        step: the trace of the model's step as written.
        tiles: whether `tile` is allowed. Modules around the loss head are then divided, so that the head is outside all
            parts and can be tiled by itself.
    """
    found = ModuleShares(model, step)
    modules, kept, first = found.modules, found.kept, found.first
    patterns = repeated_blocks(model)
    blocks = {path for path in modules if any(matches(pattern, path) for pattern in patterns)}
    around = _above(blocks)
    head = loss_head(model, blocks) if tiles and blocks else None
    # A linear layer that runs before a block is no loss head. A module around the loss head could be recomputed as a
    # whole, but a tiled head is cheaper: such modules are divided.
    late = head is not None and first.get(head, -1.0) >= max(first.get(path, math.inf) for path in blocks)
    opened = _above([head]) if head is not None and late else frozenset[str]()

    def is_small(path: str) -> bool:
        if kept[path] <= _LARGE * kept[""]:
            return True
        # A module around a loop runs once, though its operators run often: one of its children keeps nearly all bytes.
        return all(kept[child] <= _MOST * kept[path] for child in found.children(path)) and runs_of(step, path) >= _RUNS

    def within(path: str) -> list[str]:
        """Returns the paths of the parts at and below `path`."""
        if kept[path] <= _SMALL * kept[""]:
            return []
        can_be = path not in opened and could_be_block(modules[path])
        if can_be and (path in blocks or (path and path not in around and is_small(path))):
            return [path]
        below = [each for child in found.children(path) for each in within(child)]
        has_blocks = path in around if path else bool(blocks)
        least = 0.0 if has_blocks else kept[path] * (_COVERED if path else _COVERED_OF_ALL)
        return [path] if can_be and sum(kept[each] for each in below) <= least else below

    return found.parts(sorted(within(""), key=lambda path: first.get(path, 0)))


def _above(paths: Collection[str]) -> frozenset[str]:
    """Returns the paths of the modules around the modules at `paths`, without the model itself."""
    return frozenset(path[:at] for path in paths for at, letter in enumerate(path) if letter == ".")


def _close(one: tuple[int, float], other: tuple[int, float]) -> bool:
    """Returns whether two pairs (kept bytes, seconds) are about equal; alike parts differ a little at their borders."""
    return all(abs(first - second) <= _ALIKE * max(first, second) for first, second in zip(one, other, strict=True))


def _shape(module: nn.Module) -> object:
    """Returns a key that is equal for alike modules: the classes, and the parameters' shapes and dtypes."""
    return (
        type(module).__qualname__,
        tuple((name, type(each).__qualname__) for name, each in module.named_modules()),
        tuple(
            (name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in module.named_parameters()
        ),
    )
