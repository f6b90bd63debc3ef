"""Decides which modules of a region compute in the region's precision, and which keep their own.

The decision is by structure, so no class names are listed: a normalization has only vectors as parameters, and a table
(rotary frequencies, a codebook, running statistics) has buffers and no parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memscale.core import internals, matches, pytrees
from memscale.regions import refuse_lazy

NORMS = "<norms>"
"""The pattern of ``cast(keep=...)`` for every submodule that keeps its own precision by structure."""


def is_castable(value: Any) -> bool:
    """Whether `value` is a floating tensor of at least 16 bits; 8-bit floats need their scales to compute."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype.itemsize > 1


def promoted(values: Iterable[Any]) -> torch.dtype | None:
    """Returns the promoted dtype of the floating tensors among `values`, or None if there are none."""
    found: torch.dtype | None = None
    for value in values:
        if is_castable(value) and value.dtype != found:
            found = value.dtype if found is None else torch.promote_types(found, value.dtype)
    return found


def keeps_by_structure(module: nn.Module) -> bool:
    """Whether `module` is a normalization, or a table that is not trained.

    True for a leaf whose parameters are all vectors or scalars; for a leaf without parameters that has an epsilon, such
    as a normalization without affine parameters; and for a module with floating buffers and no parameters at any depth.
    """
    if not module._modules:
        parameters = [parameter for parameter in module._parameters.values() if parameter is not None]
        if parameters:
            return all(parameter.dim() <= 1 for parameter in parameters)
        if any(name.endswith(("eps", "epsilon")) for name in module.__dict__):
            return True
    return not _has_parameters(module) and any(is_castable(buffer) for buffer in module.buffers())


def _has_parameters(module: nn.Module) -> bool:
    # Runs for every module in every call; `nn.Module.parameters` is ten times slower.
    if any(parameter is not None for parameter in module._parameters.values()):
        return True
    return any(child is not None and _has_parameters(child) for child in module._modules.values())


class Survey:
    """The modules that a region reaches, sorted by what a cast does with them.

    Attributes:
        cast: modules whose parameters and buffers are cast.
        kept: modules that keep their precision, with the dtype of their state or None; inputs and outputs are cast.
        inner: regions of another cast, which cast their own state; outputs are cast.
        seen: all of these, and the modules below.
    """

    def __init__(self, keep: tuple[str, ...], is_inner: Callable[[nn.Module], bool]) -> None:
        self.cast: list[nn.Module] = []
        self.kept: list[tuple[nn.Module, torch.dtype | None]] = []
        self.inner: list[nn.Module] = []
        self._keep = keep
        self._is_inner = is_inner
        self.seen: set[nn.Module] = set()

    def add(self, root: nn.Module) -> list[nn.Module]:
        """Sorts the new modules below `root`; returns those that are cast."""
        start, inner = len(self.cast), len(self.inner)
        stack = [("", root)]
        while stack:
            path, module = stack.pop()
            if module in self.seen:
                continue
            self.seen.add(module)
            refuse_lazy(module)
            if self._is_inner(module):
                self.inner.append(module)
            elif is_kept(module, path, self._keep):
                self.kept.append((module, own_dtype(module)))
                self._skip(module)
            else:
                if not isinstance(module, internals.NormBase):
                    # BatchNorm kernels take float32 statistics with any input, and update these without autograd.
                    self.cast.append(module)
                for name, child in module._modules.items():
                    if child is not None:
                        stack.append((f"{path}.{name}" if path else name, child))
        for module in self.inner[
            inner:
        ]:  # after all others: a module that is also reachable from outside of an inner cast is cast
            self._skip(module)
        return self.cast[start:]

    def _skip(self, module: nn.Module) -> None:
        if module._modules:
            self.seen.update(module.modules())


def own_dtype(module: nn.Module) -> torch.dtype | None:
    """Returns the promoted dtype of the module's floating parameters, or of its buffers if it has none."""
    if not module._modules:
        return promoted(module._parameters.values()) or promoted(module._buffers.values())
    return promoted(module.parameters()) or promoted(module.buffers())


def is_kept(module: nn.Module, path: str, keep: tuple[str, ...]) -> bool:
    """Whether the module at `path` of a region keeps its own precision."""
    return any(keeps_by_structure(module) if pattern == NORMS else matches(pattern, path) for pattern in keep)


def cast_floating(tree: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns `tree` with `convert` applied to its floating tensors, at any depth."""

    leaves, spec = pytrees.flatten(tree)
    return pytrees.unflatten(spec, [convert(leaf) if is_castable(leaf) else leaf for leaf in leaves])


@contextmanager
def own_kernels(found: Survey) -> Iterator[None]:
    """Disables the fused kernels of `nn.TransformerEncoder` in the body: they bypass the forward of submodules."""
    mha = torch.backends.mha
    if not found.kept or torch.compiler.is_compiling() or not mha.get_fastpath_enabled():
        yield
        return
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(True)
