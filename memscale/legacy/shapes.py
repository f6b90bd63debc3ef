"""The shapes that a model is called with, and which plan is for which: a plan serves every call that it covers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memscale.core import pytrees, tensors, unflatten
from memscale.legacy.decision import Verdict

Shapes = tuple[tuple[int, ...], ...]

MOST_PLANS = 8  # of one model
_HALVINGS = 3  # of what a plan's lengths exceed the batch's, where the model does not take so much


def shapes_of(batch: Any) -> Shapes:
    """The shapes of the tensors of a batch, in order."""
    return tuple(tuple(tensor.shape) for tensor in tensors(batch))


def covers(larger: Shapes, smaller: Shapes) -> bool:
    """Whether a step with `larger` has room for one with `smaller`: the same tensors, none longer in a dimension.

    >>> covers(((4, 128), (4,)), ((4, 100), (3,))), covers(((4, 128),), ((8, 16),))
    (True, False)
    """
    return _are_alike(larger, smaller) and all(
        low <= high for most, least in zip(larger, smaller, strict=True) for high, low in zip(most, least, strict=True)
    )


def _are_alike(one: Shapes, other: Shapes) -> bool:
    """Whether two batches hold as many tensors, of as many dimensions."""
    return list(map(len, one)) == list(map(len, other))


def widened(shapes: Shapes, former: Shapes, refused: Sequence[Shapes] = ()) -> list[Shapes]:
    """The shapes to try a plan for, widest first, `shapes` last: each length that varies is rounded up.

    To a power of two, or to less, since a model may have no more than so many positions.

    >>> widened(((8, 70),), ((8, 60),)), widened(((8, 90),), ((8, 60),), [((8, 128),), ((8, 99),)])
    ([((8, 128),), ((8, 99),), ((8, 84),), ((8, 77),), ((8, 70),)], [((8, 94),), ((8, 90),)])

    Args:
        shapes: those of a batch that has come.
        former: shapes of an earlier batch; a length that is another one there varies.
        refused: shapes that the model has not taken; it takes none that covers them.
    """

    def between(one: Shapes, other: Shapes, length: Callable[[int, int], int]) -> Shapes:
        return tuple(tuple(map(length, *pair)) for pair in zip(one, other, strict=True))

    found = [between(shapes, former, lambda now, before: now if now == before else 1 << (now - 1).bit_length())]
    for _ in range(_HALVINGS):
        found.append(between(found[-1], shapes, lambda high, low: (high + low) // 2))
    tried = [each for each in dict.fromkeys(found) if not any(covers(each, wide) for wide in refused)]
    return [*(each for each in tried if each != shapes), shapes]


@dataclass
class PlansByShapes:
    """Which plan is for which batch, as a state machine with two states and two events.

    | | a batch that the plan covers | a larger batch |
    |---|---|---|
    | between two steps | goes on | is planned for, now |
    | within a step | goes on | is planned for before the next step |

    A plan follows another one between two steps only: the graph of a step is recomputed under the plan that made it.
    """

    known: dict[Shapes, Verdict] = field(default_factory=dict)
    present: Shapes | None = None  # what the plan in force was made for; None where no batch was known
    refused: list[Shapes] = field(default_factory=list)  # for which no step could be simulated
    between_steps: bool = True
    _waiting: Shapes | None = None

    def serves(self, shapes: Shapes) -> bool:
        """Whether the present plan is for `shapes`, and no other plan is waited for."""
        return self._waiting is None and self._covers(shapes)

    def due(self, shapes: Shapes) -> Shapes | None:
        """The shapes to plan for before a call with `shapes`; None if it goes on under the present plan."""
        if not self.between_steps:
            if self._waiting is None or covers(shapes, self._waiting):
                self._waiting = shapes
            return None
        waited, self._waiting = self._waiting, None
        wanted = waited if waited is not None and covers(waited, shapes) else shapes
        return None if self._covers(wanted) else wanted

    def find(self, shapes: Shapes) -> tuple[Verdict, Shapes] | None:
        """What there is for `shapes`, and what it was made for; once there are `MOST_PLANS`, the last one for any."""
        for larger, verdict in self.known.items():
            if covers(larger, shapes):
                return verdict, larger
        return (list(self.known.values())[-1], shapes) if len(self.known) >= MOST_PLANS else None

    def take(self, verdict: Verdict, shapes: Shapes | None) -> None:
        """From here on the plan in force is that of `verdict`, for `shapes`."""
        self.present = shapes
        if shapes is not None and len(self.known) < MOST_PLANS:
            self.known[shapes] = verdict

    def to_try(self, shapes: Shapes) -> list[Shapes]:
        """The shapes to make a plan for, so that it also serves what comes after `shapes`."""
        alike = next((each for each in self.known if _are_alike(each, shapes)), None)
        return [shapes] if alike is None else widened(shapes, alike, self.refused)

    def _covers(self, shapes: Shapes) -> bool:
        return self.present is not None and covers(self.present, shapes)


def with_shapes(batch: Any, shapes: Shapes) -> Any:
    """The batch with tensors of ones where it has tensors of other shapes: one is a token, a label and an open mask."""
    leaves, spec = pytrees.flatten(batch)
    wanted = iter(shapes)

    def fitted(leaf: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return leaf if tuple(leaf.shape) == shape else torch.ones(shape, dtype=leaf.dtype, device=leaf.device)

    return unflatten(spec, [fitted(leaf, next(wanted)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def as_batch(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The arguments of a call as one batch, cut off from the graph that made them; None where they are none.

    A simulated backward must not run on into the caller's own graph, which it would free.
    """
    leaves, spec = pytrees.flatten((args, kwargs))
    cut = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    args, kwargs = unflatten(spec, cut)
    if not args or not kwargs:
        return args or kwargs or None
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if kinds[name] in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            return None
        named |= value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
    return named
