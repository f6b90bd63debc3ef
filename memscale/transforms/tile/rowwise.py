"""What a region must not do if its rows are to be computed in pieces.

Looked for where it happens: the first piece of a region's first call runs under a watch that sees every operator
before it executes, so that a refusal comes before anything has changed. What shows in the values only (a softmax or a
mean over the rows) cannot be seen here; `memscale.verify` compares numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memscale.core.errors import TransformError
from memscale.regions.arguments import Remembered
from memscale.regions.scope import Scope, read
from memscale.regions.unrecorded import is_unrecorded

# How batch-normalising kernels call their "use the statistics of this batch" argument.
_BATCH_STATISTICS = ("training", "train", "use_input_stats")


class RowwiseWatch(TorchDispatchMode):
    """Raises `TransformError` at an operator that makes one row's result depend on another, or on how often it runs."""

    def __init__(self, scope: Scope, what: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what
        self._captured = {tensor.untyped_storage()._cdata: str(key) for _, key, tensor in scope.tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_unrecorded():
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        given = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
        if "running_mean" in given and any(given.get(name) is True for name in _BATCH_STATISTICS):
            raise TransformError(
                f"{self._what} would cut the rows over which {func} computes its statistics (BatchNorm in training), "
                "and the numbers would change; use checkpoint() for this region, or put its norms in eval()"
            )
        if func._schema.is_mutable:
            for argument in arguments:
                if argument.is_write and isinstance(value := given.get(argument.name), torch.Tensor):
                    self._refuse_captured(value)
        return func(*args, **kwargs)

    def _refuse_captured(self, tensor: torch.Tensor) -> None:
        name = self._captured.get(tensor.untyped_storage()._cdata)
        if name is not None:
            raise TransformError(
                f"{self._what} would update {name!r} once for every piece, because the region changes it in place "
                "while it runs; use checkpoint() for this region"
            )


def refuse_stored_tensors(scope: Scope, what: str) -> None:
    """Raise `TransformError` if the region, which has run since `scope` was read, left a tensor behind."""
    for place, content in zip(scope.places, scope.contents, strict=True):
        now = read(place)
        for key, value in now.items() if isinstance(now, dict) else enumerate(now):
            before = content.get(key) if isinstance(content, dict) else dict(enumerate(content)).get(key)
            if isinstance(value, torch.Tensor) and value is not before:
                raise TransformError(
                    f"{what}: the region stores a tensor of shape {list(value.shape)} under {key!r}, and of several "
                    "pieces only the last would remain; return it from the region instead, or use checkpoint()"
                )


@contextmanager
def refuse_changed_arguments(args: Any, kwargs: Any, what: str) -> Iterator[None]:
    """Raise `TransformError` if the body changes a list, dictionary or object that `args` and `kwargs` lead to."""
    given = Remembered((args, kwargs), None, hold=True)
    before = given.contents()
    yield
    for (thing, then), (_, now) in zip(before, given.contents(), strict=True):
        if not then.same(now):
            raise TransformError(
                f"{what}: the region changes one of its arguments, a {type(thing).__name__}, and every piece would do "
                "so again; use checkpoint() for this region, or do without (use_cache=False, if it is the cache of a "
                "Hugging Face model)"
            )
