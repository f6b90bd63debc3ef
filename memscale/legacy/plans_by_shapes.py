"""`PlansByShapes`: which plan serves which shapes of a batch, and when another plan is due."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch

from memscale.core import batches, pytrees, tensors, unflatten
from memscale.legacy.decide import Verdict

Shapes = tuple[tuple[int, ...], ...]

#: Plans for one model, after which a plan for a larger batch also serves all batches that were planned for before.
_MANY = 8


def shapes_of(batch: Any) -> Shapes:
    """Returns the shapes of the tensors of a batch, in order."""
    return tuple(tuple(tensor.shape) for tensor in tensors(batch))


def covers(larger: Shapes, smaller: Shapes) -> bool:
    """Whether a step with `larger` has room for one with `smaller`: the same tensors, none longer in any dimension.

    >>> covers(((4, 128), (4,)), ((4, 100), (3,))), covers(((4, 128),), ((8, 16),))
    (True, False)
    """
    return _are_alike(larger, smaller) and merged(larger, smaller) == larger


def merged(one: Shapes, other: Shapes) -> Shapes:
    """Returns the smallest shapes that cover both batches; `other` if their tensors or dimensions differ in number.

    >>> merged(((4, 128),), ((8, 16),)), merged(((4, 128),), ((8,),))
    (((8, 128),), ((8,),))
    """
    if not _are_alike(one, other):
        return other
    return tuple(tuple(map(max, *pair)) for pair in zip(one, other, strict=True))


def _are_alike(one: Shapes, other: Shapes) -> bool:
    """Whether two batches have equally many tensors with equally many dimensions."""
    return list(map(len, one)) == list(map(len, other))


def rounded_up(shapes: Shapes, former: Shapes) -> Shapes:
    """Returns `shapes` with the lengths that differ from those of an earlier batch rounded up to a power of two.

    >>> rounded_up(((8, 70),), ((8, 60),))
    ((8, 128),)
    """
    return tuple(
        tuple(now if now == before else 1 << (now - 1).bit_length() for now, before in zip(*pair, strict=True))
        for pair in zip(shapes, former, strict=True)
    )


@dataclass
class PlansByShapes:
    """The plan for each shape of batch, as a state machine with two states and two events.

    |                   | a batch that the plan covers | a larger batch                               |
    |-------------------|------------------------------|----------------------------------------------|
    | between two steps | continue                     | plan for it now                              |
    | within a step     | continue                     | before the next step, plan for the step's    |
    |                   |                              | batches together                             |

    Plans change between two steps only, because the graph of a step must be recomputed under the plan that made it.
    """

    known: dict[Shapes, Verdict] = field(default_factory=dict)
    present: Shapes | None = None  # the shapes for which the plan in force was made, or None if no batch was known
    between_steps: bool = True
    rounds_up: bool = True  # until the model does not take a batch that was rounded up
    _waiting: Shapes | None = None

    @property
    def is_new(self) -> bool:
        """Whether no plan was made for a batch, nor is due."""
        return self.present is None and self._waiting is None

    def serves(self, shapes: Shapes) -> bool:
        """Whether the present plan covers `shapes` and no other plan is due."""
        return self._waiting is None and self._covers(shapes)

    def due(self, shapes: Shapes) -> Shapes | None:
        """Returns the shapes to plan for before a call with `shapes`, or None if the present plan stays."""
        wanted = shapes if self._waiting is None else merged(self._waiting, shapes)
        self._waiting = None if self.between_steps else wanted
        return None if self._waiting is not None or self._covers(wanted) else wanted

    def forget(self) -> None:
        """Drops all plans: the next call plans for the shapes of the present plan, or for larger ones of its own."""
        self._waiting, self.present = self._waiting or self.present, None
        self.known.clear()

    def drop(self) -> None:
        """Drops the present plan, made for a batch that the model does not take: it says nothing of other batches."""
        if self.present is not None:
            self.known.pop(self.present, None)
        self.present, self.rounds_up = None, True

    def find(self, shapes: Shapes) -> tuple[Verdict, Shapes] | None:
        """Returns a verdict that covers `shapes`, with the shapes for which it was made."""
        return next(((verdict, larger) for larger, verdict in self.known.items() if covers(larger, shapes)), None)

    def take(self, verdict: Verdict, shapes: Shapes | None) -> None:
        """Puts the plan of `verdict`, made for `shapes`, in force."""
        self.present = shapes
        if shapes is not None:
            self.known[shapes] = verdict

    def widened(self, shapes: Shapes) -> Shapes:
        """Returns the shapes to plan for in place of `shapes`, so that a loop with many shapes plans a few times."""
        alike = [each for each in self.known if _are_alike(each, shapes)]
        if alike and self.rounds_up:
            shapes = rounded_up(shapes, alike[0])
        return reduce(merged, alike, shapes) if len(self.known) >= _MANY else shapes

    def _covers(self, shapes: Shapes) -> bool:
        return self.present is not None and covers(self.present, shapes)


def with_shapes(batch: Any, shapes: Shapes) -> Any:
    """Returns the batch with other tensors in place of those with other shapes, which take next to no memory.

    They are ones, valid as token, label and mask, or tensors without memory if they are floating-point.
    """
    leaves, spec = pytrees.flatten(batch)
    wanted = iter(shapes)

    def fitted(leaf: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if tuple(leaf.shape) == shape:
            return leaf
        return torch.ones(shape, dtype=leaf.dtype, device="meta" if leaf.is_floating_point() else leaf.device)

    return unflatten(spec, [fitted(leaf, next(wanted)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def as_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the arguments of a call as one batch, detached from the caller's graph.

    A simulated backward must not run into the caller's graph, which it would free.
    """
    leaves, spec = pytrees.flatten((args, kwargs))
    cut = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    args, kwargs = unflatten(spec, cut)
    return batches.Arguments(args, kwargs) if args and kwargs else kwargs or args
