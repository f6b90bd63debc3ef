"""The shapes that a model is called with, in buckets: a plan is for one, and serves every call that it covers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memscale.core import pytrees, tensors, unflatten

Shapes = tuple[tuple[int, ...], ...]

_HALVINGS = 3  # of what a bucket is longer than the batch, where the model does not take so much


def shapes_of(batch: Any) -> Shapes:
    """The shapes of the tensors of a batch, in order."""
    return tuple(tuple(tensor.shape) for tensor in tensors(batch))


def covers(larger: Shapes, smaller: Shapes) -> bool:
    """Whether a step with `larger` has room for one with `smaller`: the same tensors, none longer in a dimension.

    >>> covers(((4, 128), (4,)), ((4, 100), (3,))), covers(((4, 128),), ((8, 16),))
    (True, False)
    """
    return are_alike(larger, smaller) and all(
        low <= high for most, least in zip(larger, smaller, strict=True) for high, low in zip(most, least, strict=True)
    )


def are_alike(one: Shapes, other: Shapes) -> bool:
    """Whether two batches hold as many tensors, of as many dimensions."""
    return [len(shape) for shape in one] == [len(shape) for shape in other]


def bucket(shapes: Shapes, known: Shapes) -> Shapes:
    """`shapes` with each length that is another one in `known` rounded up to a power of two: those are what varies.

    >>> bucket(((8, 100), (8, 80)), ((8, 60), (8, 80)))
    ((8, 128), (8, 80))
    """
    return tuple(
        tuple(
            length if length == former else 1 << (length - 1).bit_length()
            for length, former in zip(shape, before, strict=True)
        )
        for shape, before in zip(shapes, known, strict=True)
    )


def buckets(shapes: Shapes, known: Shapes, refused: Sequence[Shapes]) -> list[Shapes]:
    """The buckets to try for `shapes`, widest first, itself last: a model may take nothing as long as a power of two.

    >>> buckets(((8, 70),), ((8, 60),), []), buckets(((8, 90),), ((8, 60),), [((8, 128),), ((8, 99),)])
    ([((8, 128),), ((8, 99),), ((8, 84),), ((8, 77),), ((8, 70),)], [((8, 94),), ((8, 90),)])

    Args:
        shapes, known: as in `bucket`.
        refused: shapes that the model has not taken; it takes none that covers them.
    """
    found = [bucket(shapes, known)]
    for _ in range(_HALVINGS):
        found.append(
            tuple(
                tuple((high + low) // 2 for high, low in zip(most, least, strict=True))
                for most, least in zip(found[-1], shapes, strict=True)
            )
        )
    tried = [each for each in dict.fromkeys(found) if not any(covers(each, wide) for wide in refused)]
    return [*(each for each in tried if each != shapes), shapes]


def with_shapes(batch: Any, shapes: Shapes) -> Any:
    """The batch with tensors of ones where it has tensors of other shapes: one is a token, a label and an open mask."""
    leaves, spec = pytrees.flatten(batch)
    wanted = iter(shapes)
    found: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            shape = next(wanted)
            leaf = leaf if tuple(leaf.shape) == shape else torch.ones(shape, dtype=leaf.dtype, device=leaf.device)
        found.append(leaf)
    return unflatten(spec, found)


def as_batch(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """The arguments of a call as one batch, cut off from the graph that made them; None where they are none.

    A simulated backward must not run on into the caller's own graph, which it would free.
    """
    leaves, spec = pytrees.flatten((args, kwargs))
    cut = [
        leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    args, kwargs = unflatten(spec, cut)
    if not kwargs:
        return args or None
    if not args:
        return kwargs
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.name in named and parameter.kind is parameter.VAR_KEYWORD:
            named |= named.pop(parameter.name)
        elif parameter.name in named and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            return None
    return named
