"""Explains what cannot work in a cast region: two floating dtypes in one operator, and `torch.utils.checkpoint`."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from memscale.core import MemscaleError, TransformError, pytrees
from memscale.regions import OperatorWatch

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


class RecomputeWatch(OperatorWatch):
    """Raises `TransformError` at an operator on a cast weight inside `torch.utils.checkpoint`.

    Such a function runs again in backward, after the cast has ended, and would find the weights in their own dtype.
    """

    keeps_compiled = True

    def __init__(self, how: object, roots: Iterable[nn.Module], weights: Collection[torch.Tensor]) -> None:
        super().__init__()
        self._how = how
        self._paths = {id(module): (path, module) for root in roots for path, module in root.named_modules()}
        self._weights = set(map(id, weights))
        self._region = sys._getframe(1).f_code  # of the caller, which runs the region

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if any(id(tensor) in self._weights for tensor in pytrees.tensors((args, kwargs))):
            self._refuse_recompute()
        return func(*args, **kwargs)

    def _refuse_recompute(self) -> None:
        frame, path, module = sys._getframe(1), "", None
        while frame.f_code is not self._region and frame.f_back is not None:
            if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                place = f"{type(module).__name__} {path!r}" if module is not None else "a function of the region"
                raise TransformError(
                    f"{self._how!r}: {place} runs inside torch.utils.checkpoint, which runs it again in backward, when "
                    "its weights have their own dtype again; use checkpoint() in the plan in place of it (in "
                    "transformers, call model.gradient_checkpointing_disable()), or put the cast on modules that it "
                    "calls"
                )
            path, module = self._paths.get(id(frame.f_locals.get("self")), (path, module))
            frame = frame.f_back


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
