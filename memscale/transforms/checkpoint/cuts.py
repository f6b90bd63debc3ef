"""Cuts of an `nn.Sequential` into segments of its children; each segment except the last is a checkpointed region.

A segment keeps its input. With a cut behind each convolution of a VGG, the outputs of the convolutions are kept, and
BatchNorm, activation and pooling are recomputed, up to the input of the next convolution. If the children are
nn.Sequentials with these layers, a cut goes through a child, and a segment begins in one child and ends in the next.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import pairwise
from types import MethodType
from typing import Any

import torch
from torch import nn

from memscale.algebra import OwnForward, Transformed
from memscale.core import ConfigError, TransformError, shown

#: The child before which a segment begins: its index, or the indices of its parents followed by its own index.
Cut = int | tuple[int, ...]
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_cuts(cuts: Any) -> tuple[Cut, ...]:
    """Returns the cuts as a tuple.

    Raises:
        ConfigError: `cuts` are not positions between children, in increasing order.
    """
    counted = isinstance(cuts, (tuple, list)) and all(map(_is_cut, cuts))
    if not counted or any(_place(one) >= _place(two) for one, two in pairwise(cuts)):
        raise ConfigError(
            f"checkpoint(cuts={cuts!r}) must be a tuple of positions in increasing order, at which regions "
            "begin: ints of at least 1 for children of an nn.Sequential, and tuples that do not end in 0 for children "
            "of its children, such as (2, 1) for child 1 of child 2"
        )
    return tuple(at if isinstance(at, int) else tuple(at) for at in cuts)


def check_row(fn: Callable[..., Any], cuts: tuple[Cut, ...]) -> None:
    """Raises `TransformError` unless `fn` is an `nn.Sequential`, or the forward of one, that has all `cuts`."""
    row = _row(fn)
    if row is None:
        raise TransformError(
            f"checkpoint(cuts={cuts}) is for an nn.Sequential with the forward of its class and nothing around it, and "
            f"this is {shown(getattr(fn, 'module', fn))}; name its children, or leave cuts out"
        )
    for cut in cuts:
        at, *inside = _place(cut)
        within, where = row, "this nn.Sequential"
        for deeper in (*inside, None):
            if at >= len(within):
                raise TransformError(
                    f"checkpoint(cuts={cuts}) cuts before child {at}, and {where} has {len(within)} children, from 0 "
                    f"to {len(within) - 1}"
                )
            if deeper is not None:
                within, where, at = _opened(within[at], at, cuts), f"child {at} of it", deeper


def segments(fn: Callable[..., Any], cuts: tuple[Cut, ...]) -> list[Callable[..., Any]]:
    """Returns the segments of `fn`, in order, as functions of its present children."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace `check_row`
        row = fn.__self__ if isinstance(fn, MethodType) else fn  # Dynamo before torch 2.12 cannot trace a getattr here
        return _cut(fn.module if isinstance(fn, OwnForward) else row, cuts)
    check_row(fn, cuts)
    return _cut(_row(fn), cuts)


def _cut(row: Any, cuts: tuple[Cut, ...]) -> list[Callable[..., Any]]:
    places = [_place(cut) for cut in cuts]
    found: list[list[nn.Module]] = [[]]
    opened = {place[:depth] for place in places for depth in range(1, len(place))}
    for place, child in _in_order(row, opened, ()):
        # A cut before a child that other cuts go through is a cut before the first layer in that child.
        while places and place >= places[0]:
            places = places[1:]
            found.append([])
        found[-1].append(child)
    return [functools.partial(_in_a_row, tuple(children)) for children in found]


def layers(module: nn.Module) -> list[tuple[Cut, nn.Module]]:
    """Returns the layers that `module` runs in a row, each with the cut before it; empty if `module` is no row."""
    row = _row(module)
    if row is None:
        return []
    found: list[tuple[Cut, nn.Module]] = []
    for number, child in enumerate(row):
        inside = layers(child) if _opens(child) else []
        found += [((number, *_place(cut)) if at else number, each) for at, (cut, each) in enumerate(inside)]
        found += [] if inside else [(number, child)]
    return found


def _opens(module: nn.Module) -> bool:
    """Whether a cut may go through `module`: an `nn.Sequential` that runs only its children."""
    hooked = any(getattr(module, name) for name in _HOOKS) or vars(module).get("_compiled_call_impl") is not None
    return _row(module) is not None and type(module).__call__ is nn.Module.__call__ and not hooked


def _opened(module: nn.Module, at: int, cuts: tuple[Cut, ...]) -> nn.Sequential:
    if not _opens(module):
        raise TransformError(
            f"checkpoint(cuts={cuts}) cuts through child {at}, a {type(module).__name__}; a cut can go only "
            "through an nn.Sequential with the forward of its class, without transforms, hooks and compiler; cut "
            "before or behind the child"
        )
    assert isinstance(module, nn.Sequential)
    return module


def _is_cut(cut: Any) -> bool:
    place = cut if isinstance(cut, (tuple, list)) and len(cut) > 1 else (cut,)
    # (2, 0) and 2 are the same position: only 2 is valid, so that equal cuts are `==`.
    return all(type(at) is int and at >= 0 for at in place) and place[-1] > 0


def _place(cut: Cut) -> tuple[int, ...]:
    return (cut,) if isinstance(cut, int) else tuple(cut)


def _in_order(
    row: nn.Sequential, opened: set[tuple[int, ...]], at: tuple[int, ...]
) -> list[tuple[tuple[int, ...], nn.Module]]:
    """Returns the modules of `row` and their positions, with the children of the rows at `opened` in their place."""
    found: list[tuple[tuple[int, ...], nn.Module]] = []
    for number, child in enumerate(row):
        place = (*at, number)
        if place in opened and isinstance(child, nn.Sequential):
            found += _in_order(child, opened, place)
        else:
            found.append((place, child))
    return found


def _row(fn: Callable[..., Any]) -> nn.Sequential | None:
    if isinstance(fn, Transformed):
        return None
    forward = getattr(fn, "forward", None) if isinstance(fn, nn.Module) else fn
    if forward is fn or isinstance(forward, OwnForward):  # `wrap` assigns such a forward while it plans
        forward = inspect.unwrap(forward)
    row = getattr(forward, "__self__", None)
    is_own = getattr(forward, "__func__", None) is nn.Sequential.forward
    return row if is_own and isinstance(row, nn.Sequential) else None


def _in_a_row(children: tuple[nn.Module, ...], value: Any) -> Any:
    for child in children:
        value = child(value)
    return value
