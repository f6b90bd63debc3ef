"""The caller's tensors during a simulation: the same objects, with contents that a simulation may change freely."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale.core import ConfigError, in_process_group
from memscale.simulation.dispatch.live_storages import is_small
from memscale.simulation.kernels.shapes import is_sparse, strided_parts
from memscale.simulation.process.fake_storages import FakeStorages


@contextmanager
def contents_kept(tensors: list[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Restores the storage and shape of each tensor afterwards: a step may assign ``.data``, or resize a tensor.

    Yields the tensors, each with an alias of its contents.
    """
    before = [(tensor, tensor.detach()) for tensor in tensors]
    try:
        yield before
    finally:
        for tensor, alias in before:
            if tensor.data_ptr() != alias.data_ptr() or tensor.shape != alias.shape or tensor.dtype != alias.dtype:
                tensor.data = alias


@contextmanager
def on_cpu(tensors: list[torch.Tensor], inputs: list[torch.Tensor], fakes: FakeStorages) -> Iterator[frozenset[int]]:
    """Gives every tensor off the CPU fake contents there; the tensor objects keep their identity.

    Yields the addresses of the fake storages.
    """
    # DDP's C++ reducer waits for the gradients of its own parameters, and would communicate these.
    distributed = in_process_group()
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    storages: dict[int, torch.UntypedStorage] = {}
    given: set[int] = set()
    try:
        real = any(tensor.requires_grad and not tensor.is_meta for tensor in tensors)
        given = {id(tensor) for tensor in inputs}
        for tensor in tensors:
            if tensor.is_meta and real and id(tensor) not in given:
                continue  # a meta tensor beside real parameters is the caller's skeleton
            if tensor.device.type == "cpu":
                if distributed and tensor.requires_grad and tensor.is_leaf:
                    _exchange(tensor, tensor.detach(), swapped)
                continue
            if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
                raise ConfigError(
                    f"a {type(tensor).__name__} on {tensor.device} cannot be simulated; move the model to the CPU first"
                )
            own = tensor.untyped_storage()
            if own._cdata not in storages:
                # Values that may be computed need memory; all fake storages share one range.
                is_fake = tensor.requires_grad or not is_small(tensor)
                storages[own._cdata] = fakes.storage(own.nbytes()) if is_fake else _zeros(own.nbytes())
            stand_in = fakes.like(tensor, storages[own._cdata])
            if not tensor.is_floating_point() and tensor.device.type != "meta" and tensor.numel() <= 1 << 20:
                stand_in = tensor.detach().cpu()  # the model may decide by these values
            given.add(stand_in.untyped_storage()._cdata)
            _exchange(tensor, stand_in, swapped)
        yield frozenset(given)
    finally:
        for tensor, stand_in in swapped:
            torch._C._swap_tensor_impl(tensor, stand_in)


@contextmanager
def wrapped_on_cpu(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Rebuilds wrapper subclasses, so that each reports the device of its inner tensors."""
    swapped: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor in tensors:
            if is_traceable_wrapper_subclass(tensor) and tensor.device.type != "cpu":
                inner, (_, context) = wrapped(tensor), tensor.__tensor_flatten__()
                if all(part.device.type == "cpu" for part in with_storages([tensor])):
                    stand_in = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
                    _exchange(tensor, stand_in.detach(), swapped)
        yield
    finally:
        for tensor, stand_in in swapped:
            torch._C._swap_tensor_impl(tensor, stand_in)


def _exchange(tensor: torch.Tensor, stand_in: torch.Tensor, swapped: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Swaps the implementations of `tensor` and `stand_in`, keeping the Python hooks on the gradient."""
    stand_in.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, stand_in)
    swapped.append((tensor, stand_in))
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, name)) is not None:
            setattr(tensor, name, hooks)


def _zeros(nbytes: int) -> torch.UntypedStorage:
    return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage()


def with_storages(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors that have storages; a wrapper subclass is replaced by its inner tensors."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            found += with_storages([part for part in wrapped(tensor).values() if isinstance(part, torch.Tensor)])
        elif is_sparse(tensor):
            found += with_storages(strided_parts([tensor]))
        elif tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0:
            found.append(tensor)
    return found


def wrapped(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the parts of a wrapper subclass, by name: its inner tensors, and the mesh of a DTensor."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}  # type: ignore[attr-defined]
