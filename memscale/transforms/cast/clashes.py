"""Explains errors of a cast region in which an operator was given two floating dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import nn

from memscale.core import MemscaleError, TransformError

# How PyTorch's error messages spell dtypes: "BFloat16", "c10::BFloat16", "Half", "bfloat16".
_SPELLINGS = {
    torch.float16: ("half", "float16"),
    torch.bfloat16: ("bfloat16",),
    torch.float32: ("float", "float32"),
    torch.float64: ("double", "float64"),
}


@contextmanager
def explained(how: object, roots: Iterable[nn.Module], kept: tuple[str, ...]) -> Iterator[None]:
    """Re-raises an error about two floating dtypes as a `TransformError` that names the module and the remedy."""
    try:
        yield
    except RuntimeError as error:
        dtypes = named_in(str(error))
        if isinstance(error, MemscaleError) or len(dtypes) < 2:
            raise
        met = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        path, module = _innermost(error.__traceback__, roots)
        place = f"{type(module).__name__} {path!r}" if path else "the region's own code"
        keep = f", or keep that module in its own precision: keep={(*kept, path)!r}" if path else ""
        raise TransformError(
            f"{how!r}: {place} was given {met} together ({error}). The batch and the state of the region were "
            "converted, so one of them comes from a tensor that the region makes or converts itself (a table of "
            f"positions, a mask, .float()); convert that tensor to the dtype of the other, .to(x.dtype){keep}"
        ) from error


def named_in(message: str) -> list[torch.dtype]:
    """Returns the floating dtypes that an error message of PyTorch names.

    >>> named_in("expected m1 and m2 to have the same dtype, but got: c10::BFloat16 != float")
    [torch.bfloat16, torch.float32]
    """
    words = {word.lower() for word in re.findall(r"\w+", message)}
    return [dtype for dtype, names in _SPELLINGS.items() if words.intersection(names)]


def _innermost(trace: TracebackType | None, roots: Iterable[nn.Module]) -> tuple[str, nn.Module | None]:
    """Returns the path in the region and the module of the innermost forward in a traceback."""
    paths = {id(module): (path, module) for root in roots for path, module in root.named_modules()}
    found: tuple[str, nn.Module | None] = ("", None)
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found
