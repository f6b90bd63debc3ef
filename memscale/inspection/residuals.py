"""`saved_residuals`: lists the tensors that autograd saves in the forward of a function for its backward."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import torch

from memscale.core import internals, pytrees
from memscale.regions import Captures, OperatorWatch
from memscale.transforms import listeners
from memscale.transforms.checkpoint import is_view

_Origin = tuple[str, str, str | None]  # the source, the name and the line of code of a `Residual`


@dataclasses.dataclass(frozen=True)
class Residual:
    """A storage that is saved in forward for backward.

    >>> import torch, memscale as ms
    >>> [residual] = ms.saved_residuals(torch.exp, torch.ones(10, requires_grad=True))
    >>> print(residual)
    float32[10] (40 bytes) intermediate aten.exp at ...

    Attributes:
        shape: the shape of the saved tensor. A tensor saved several times, or as several views, is listed once.
        dtype: the element type.
        nbytes: the bytes of the whole storage.
        source: ``"argument"``, ``"captured"`` (a parameter, buffer or closure variable, which is alive anyway) or
            ``"intermediate"`` (computed by the function; a transform can free its memory).
        name: the argument, the path of the parameter, or the operator that computed the tensor.
        label: the label given by `memscale.name`, or `None`.
        where: ``file:line`` of the code that computed an intermediate; `None` for the others.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    source: str
    name: str
    label: str | None = None
    where: str | None = None

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        label = f" named {self.label!r}" if self.label else ""
        where = f" at {self.where}" if self.where else ""
        return f"{dtype}{list(self.shape)} ({self.nbytes} bytes) {self.source} {self.name}{label}{where}"


def saved_residuals(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Residual]:
    """Returns the tensors that ``fn(*args, **kwargs)`` saves for backward, in the order in which they are saved.

    >>> import torch, memscale as ms
    >>> def f(x):
    ...     return torch.sin(torch.exp(x))
    >>> x = torch.ones(10, requires_grad=True)
    >>> [(r.source, r.name, r.nbytes) for r in ms.saved_residuals(f, x)]
    [('intermediate', 'aten.exp', 40)]
    >>> [(r.source, r.name, r.nbytes) for r in ms.saved_residuals(ms.checkpoint()(f), x)]
    [('argument', 'args[0]', 40)]

    Runs the function once, with its side effects (random draws, buffer updates).

    Args:
        fn: any function or module; inside it, transforms show their true effect.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        One `Residual` for each saved storage.

    Source: ``jax.ad_checkpoint.print_saved_residuals``.
    """
    known = _storages_before(fn, args, kwargs)
    watch = _Provenance()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())  # a result with its graph would refer to its operator, and so to this list
        return saved[-1]

    listeners.stack.append(watch.on_label)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), watch:
            # Kept alive until the list is made, so that no two storages have the same address.
            result = fn(*args, **kwargs)
    finally:
        listeners.stack.remove(watch.on_label)
    residuals: dict[int, Residual] = {}
    for tensor in saved:
        storage = tensor.untyped_storage()
        key, shape = storage._cdata, tuple(tensor.shape)
        source, name, where = known.get(key) or watch.made.get(key, ("intermediate", "unknown", None))
        found = Residual(shape, tensor.dtype, storage.nbytes(), source, name, watch.labels.get(key), where)
        residuals.setdefault(key, found)
    del result
    return list(residuals.values())


def _storages_before(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, _Origin]:
    """Returns the storages that exist before the call: those of arguments and of captures, by key."""
    arguments = [*((f"args[{index}]", each) for index, each in enumerate(args)), *kwargs.items()]
    found = [(tensor, "argument", name) for name, argument in arguments for tensor in pytrees.tensors(argument)]
    captures = Captures(fn, reruns=False)
    for module in captures.modules[:1]:
        named = [*module.named_parameters(), *module.named_buffers()]
        found += [(tensor, "captured", path) for path, tensor in named]
    found += [(tensor, "captured", str(key)) for _, key, tensor in captures.tensors]
    # In reverse, so that a storage has the first of its names.
    return {tensor.untyped_storage()._cdata: (source, name, None) for tensor, source, name in reversed(found)}


class _Provenance(OperatorWatch):
    """Records the operator and the line of code that made each storage."""

    keeps_compiled = True

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, _Origin] = {}
        self.labels: dict[int, str] = {}

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        is_plain = isinstance(func, internals.OpOverload)  # others are of higher order, and have no schema
        if not (is_plain and is_view(func)):
            op = func._schema.name.replace("::", ".") if is_plain else str(func)
            for tensor in pytrees.tensors(result):
                self.made[tensor.untyped_storage()._cdata] = ("intermediate", op, _caller())
        return result

    def on_label(self, tensor: torch.Tensor, label: str) -> None:
        self.labels[tensor.untyped_storage()._cdata] = label


_LIBRARIES = tuple(__import__(name).__path__[0] for name in ("torch", "memscale"))


def _caller() -> str | None:
    """Returns the innermost line of code outside of torch and memscale, or `None`."""
    for frame, line in traceback.walk_stack(None):
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            return f"{frame.f_code.co_filename}:{line}"
    return None
