"""`saved_residuals`: what autograd keeps between forward and backward of a function, as a list."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import torch

from memscale.core import pytrees
from memscale.regions import Captures, OperatorWatch
from memscale.transforms import listeners
from memscale.transforms.checkpoint import is_view


@dataclasses.dataclass(frozen=True)
class Residual:
    """One piece of memory that is alive from forward to backward.

    >>> import torch, memscale as ms
    >>> [residual] = ms.saved_residuals(torch.exp, torch.ones(10, requires_grad=True))
    >>> print(residual)
    float32[10] (40 bytes) intermediate aten.exp at ...

    Attributes:
        shape: the shape it was saved with; a tensor saved several times, or as several views, is listed once.
        dtype: its element type.
        nbytes: bytes of its whole storage.
        source: ``"argument"``, ``"captured"`` (a parameter, buffer or closure variable: alive anyway) or
            ``"intermediate"`` (computed by the function: the memory that a transform can save).
        name: which argument, parameter path, or the operator that computed it.
        label: the label given by `memscale.name`, or `None`.
        where: ``file:line`` of the code that computed it, `None` for what was not computed.
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
    """What ``fn(*args, **kwargs)`` keeps for backward, in the order it is kept.

    >>> import torch, memscale as ms
    >>> def f(x):
    ...     return torch.sin(torch.exp(x))
    >>> x = torch.ones(10, requires_grad=True)
    >>> [(r.source, r.name, r.nbytes) for r in ms.saved_residuals(f, x)]
    [('intermediate', 'aten.exp', 40)]
    >>> [(r.source, r.name, r.nbytes) for r in ms.saved_residuals(ms.checkpoint()(f), x)]
    [('argument', 'args[0]', 40)]

    The function is run once, with its effects (random draws, buffer updates).

    Args:
        fn: any function or module; inside it, transforms show their true effect.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        One `Residual` for each storage that is kept.

    Source: ``jax.ad_checkpoint.print_saved_residuals``.
    """
    known = _known(fn, args, kwargs)
    watch = _Provenance()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())  # with its graph, an operator's own result would hold the operator, and this list
        return saved[-1]

    listeners.stack.append(watch.on_label)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), watch:
            # Held until the list is made: a freed storage's address would be reused, and two confused.
            result = fn(*args, **kwargs)
    finally:
        listeners.stack.remove(watch.on_label)
    residuals: dict[int, Residual] = {}
    for tensor in saved:
        storage = tensor.untyped_storage()._cdata
        if storage in residuals:
            continue
        nbytes = tensor.untyped_storage().nbytes()
        if storage in known:
            source, name = known[storage]
            made: _Made = _Made(name, None)
        else:
            source = "intermediate"
            made = watch.made.get(storage, _Made("unknown", None))
        residuals[storage] = Residual(
            tuple(tensor.shape), tensor.dtype, nbytes, source, made.op, watch.labels.get(storage), made.where
        )
    del result
    return list(residuals.values())


def _known(fn: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, tuple[str, str]]:
    """The storages that exist before the call: arguments, and what the function captures."""
    known: dict[int, tuple[str, str]] = {}

    def add(tensor: torch.Tensor, source: str, name: str) -> None:
        known.setdefault(tensor.untyped_storage()._cdata, (source, name))

    for index, argument in enumerate(args):
        for tensor in pytrees.tensors(argument):
            add(tensor, "argument", f"args[{index}]")
    for key, argument in kwargs.items():
        for tensor in pytrees.tensors(argument):
            add(tensor, "argument", key)
    captures = Captures(fn, reruns=False)
    for module in captures.modules[:1]:
        for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
            add(tensor, "captured", path)
    for _, key, tensor in captures.tensors:
        add(tensor, "captured", str(key))
    return known


@dataclasses.dataclass(frozen=True)
class _Made:
    op: str
    where: str | None


class _Provenance(OperatorWatch):
    """Notes which operator, called from which line, made each storage."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, _Made] = {}
        self.labels: dict[int, str] = {}

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if not is_view(func):
            for tensor in pytrees.tensors(result):
                op = func._schema.name.replace("::", ".")
                self.made[tensor.untyped_storage()._cdata] = _Made(op, _caller())
        return result

    def on_label(self, tensor: torch.Tensor, label: str) -> None:
        self.labels[tensor.untyped_storage()._cdata] = label


_LIBRARIES = tuple(__import__(name).__path__[0] for name in ("torch", "memscale"))


def _caller() -> str | None:
    """The innermost line that is neither torch's nor ours."""
    for frame, line in traceback.walk_stack(None):
        if not frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
            return f"{frame.f_code.co_filename}:{line}"
    return None
