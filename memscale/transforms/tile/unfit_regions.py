"""Refuses regions that are unfit for pieces for a reason that no operator shows: what a call stores or changes.

`rowwise` watches the operators.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale.core import TransformError, modules_in, pytrees
from memscale.regions import ArgumentSpec, Captures, code_names, read, refuse_iterators
from memscale.transforms.tile.pieces import Take

#: The error of a region whose norms take the statistics of the batch.
BATCH_NORM = (
    "{what} would cut the rows over which {func} computes its statistics (BatchNorm in training), and the numbers "
    "would change; use checkpoint() for this region, or put its norms in eval()"
)


def _modules(parts: list[Any]) -> list[nn.Module]:
    """Returns the modules that `parts` are or consist of, and those below them."""
    return [module for part in parts for root in modules_in(part) for module in root.modules()]


def names(parts: list[Any], name: str) -> bool:
    """Whether user code that `parts` run contains the name `name`."""
    forwards = {type(module).forward for module in _modules(parts) if not type(module).__module__.startswith("torch.")}
    named = [code_names(fn.__code__) for fn in (*forwards, *parts) if isinstance(fn, types.FunctionType)]
    return any(name in each for each in named)


def refuse_stored_tensors(captures: Captures, what: str) -> None:
    """Raises `TransformError` if the region has stored a tensor or module since `captures` was read."""
    for slot, content in zip(captures.slots, captures.contents, strict=True):
        now = read(slot)
        for key, value in now.items() if isinstance(now, dict) else enumerate(now):
            before = content.get(key) if isinstance(content, dict) else dict(enumerate(content)).get(key)
            if isinstance(value, nn.Module) and before is None:
                raise TransformError(
                    f"{what}: the region makes a module, {key!r}, and would make another one for every piece; now that "
                    "it is there, call the region again, or make it before the first call"
                )
            if isinstance(value, torch.Tensor) and value is not before:
                raise TransformError(
                    f"{what}: the region stores a tensor of shape {list(value.shape)} under {key!r}, and of several "
                    "pieces only the last would remain; return it from the region instead, or use checkpoint()"
                )


_OUT_OF_BOUNDS = re.compile(r"index (\d+) is out of bounds for dimension \d+ with size (\d+)")


@contextmanager
def index_explained(what: str, length: int, total: int) -> Iterator[None]:
    """Explains PyTorch's error of an index that is no row of the piece of `length` rows, but one of all `total`."""
    try:
        yield
    except IndexError as error:
        found = _OUT_OF_BOUNDS.search(str(error))
        if found is None or int(found[2]) != length or int(found[1]) >= total:
            raise
        raise TransformError(
            f"{what}: the region picks row {found[1]} of {total} where a piece has {length} ({error}); tile a part of "
            "it that computes each row by itself, or use checkpoint()"
        ) from error


# Autograd's error about an in-place change of a piece or of a view of one. It says the same of the outputs of `split`.
_CHANGED_PIECE = re.compile(rf"Output \d+ of ({Take.__name__}|(?!\w*Split|Unbind)\w+ .* returns multiple views)")


@contextmanager
def refuse_changed_arguments(args: Any, kwargs: Any, what: str) -> Iterator[None]:
    """Raises `TransformError` if the body changes a list, dictionary or object reachable from `args` and `kwargs`.

    It also raises if the body changes in place one of their tensors, or a view of one, that requires a gradient.
    """
    refuse_iterators(pytrees.flatten((args, kwargs))[0])
    given = ArgumentSpec(args, kwargs, None, hold=True)
    before = given.contents()
    try:
        yield
    except RuntimeError as error:
        if not _CHANGED_PIECE.match(str(error)):
            raise
        raise TransformError(
            f"{what}: the region changes an argument in place, or a view of one, and backward would see that of one "
            "piece alone; write out of place, or clone the argument first"
        ) from error
    for (thing, then), (_, now) in zip(before, given.contents(), strict=True):
        if not then.same(now):
            raise TransformError(
                f"{what}: the region changes one of its arguments, a {type(thing).__name__}, and every piece would do "
                "so again; use checkpoint() for this region, or do without (use_cache=False, if it is the cache of a "
                "Hugging Face model)"
            )
