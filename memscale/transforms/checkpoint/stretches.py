"""Where an `nn.Sequential` is cut into regions: stretches of its children, each but the last checkpointed by itself.

What a stretch keeps is its input, so where to cut says what is kept: behind each convolution of a VGG, that is what the
convolutions give, and BatchNorm, activation and pooling are computed again, up to the next convolution's input.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import nn

from memscale.algebra import Transformed
from memscale.core import ConfigError, TransformError


def check_cuts(cuts: Any) -> tuple[int, ...]:
    """The cuts as a tuple.

    Raises:
        ConfigError: they are no places between children, in their order.
    """
    counted = isinstance(cuts, (tuple, list)) and all(type(at) is int and at > 0 for at in cuts)
    if not counted or any(one >= two for one, two in pairwise(cuts)):
        raise ConfigError(
            f"checkpoint(cuts={cuts!r}) must be a tuple of increasing ints of at least 1: before which children of an "
            "nn.Sequential another region begins"
        )
    return tuple(cuts)


def check_row(fn: Callable[..., Any], cuts: tuple[int, ...]) -> None:
    """Raise TransformError unless `fn` is an `nn.Sequential`, or the forward of one, that can be cut there."""
    row = _row(fn)
    if row is None:
        raise TransformError(
            f"checkpoint(cuts={cuts}) is for an nn.Sequential with the forward of its class and nothing around it, and "
            f"this is {fn!r}; name its children, or leave cuts out"
        )
    if cuts[-1] >= len(row):
        raise TransformError(
            f"checkpoint(cuts={cuts}) cuts before child {cuts[-1]}, and this nn.Sequential has {len(row)} children, "
            f"from 0 to {len(row) - 1}"
        )


def stretches(fn: Callable[..., Any], cuts: tuple[int, ...]) -> list[Callable[..., Any]]:
    """The functions, one after the other, that `fn` is, with the children that it has now."""
    check_row(fn, cuts)
    children = tuple(_row(fn) or ())
    return [functools.partial(_in_a_row, children[begin:end]) for begin, end in pairwise((0, *cuts, len(children)))]


def _row(fn: Callable[..., Any]) -> nn.Sequential | None:
    if isinstance(fn, Transformed):
        return None
    forward = getattr(fn, "forward", None) if isinstance(fn, nn.Module) else inspect.unwrap(fn)
    row = getattr(forward, "__self__", None)
    is_own = getattr(forward, "__func__", None) is nn.Sequential.forward
    return row if is_own and isinstance(row, nn.Sequential) else None


def _in_a_row(children: tuple[nn.Module, ...], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
