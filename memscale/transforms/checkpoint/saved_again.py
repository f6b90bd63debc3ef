"""Placeholders for a double backward, such as that of a model which returns an energy and its forces.

The nodes of a backward with ``create_graph=True`` save tensors for the second backward. Recomputed tensors among them
would stay in memory, and the checkpoint would free next to nothing. So while a node runs that has unpacked a recomputed
tensor, saved-tensor hooks replace that tensor, or a transpose of the tensor, by its placeholder.

NOTE: the hooks are pushed inside an unpack hook and never popped. Autograd's engine runs each node under the
thread-local state of the whole backward, which includes the stack of hooks, and restores that state after the node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memscale.core import changed_error, internals
from memscale.regions import hooks_around, memory_of, never_compiled, recomputing

_autograd = internals.autograd
_Layout = tuple[torch.dtype, int, list[tuple[int, int]]]  # dtype, offset, and the size and stride of each dimension


def save_again(placeholder: Any, tensor: torch.Tensor, unpack: Callable[[Any], torch.Tensor]) -> None:
    """Lets the current node of a backward save `placeholder` in place of the recomputed `tensor` and its transposes.

    If the caller has saved-tensor hooks around the backward, these receive the tensors, as without checkpoint.

    Args:
        placeholder: the placeholder from which `unpack` brings the tensor back.
        tensor: the tensor that the node has just unpacked.
        unpack: the unpack hook of the checkpoint.
    """
    around = hooks_around()
    own: Any = _SavedAgain(unpack) if around is None else getattr(around[0], "__self__", None)
    if around is None:
        _autograd._push_saved_tensors_default_hooks(own.pack, _unpack_again)
    if isinstance(own, _SavedAgain) and (layout := _layout(tensor)) is not None:
        storage = StorageWeakRef(tensor.untyped_storage())
        own.known[storage.cdata] = storage, placeholder, layout


class _Transposed(NamedTuple):
    """A tensor that is saved as a placeholder, with the order of its dimensions."""

    unpack: Callable[[Any], torch.Tensor]
    placeholder: Any
    dims: list[int]


class _SavedAgain:
    """The saved-tensor hooks of one node.

    Attributes:
        unpack: the unpack hook of the checkpoint.
        known: maps the address of a storage to a weak reference, which keeps the address unique, and to the placeholder
            and the layout of the recomputed tensor in the storage.
    """

    __slots__ = ("known", "unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor]) -> None:
        self.unpack = unpack
        self.known: dict[int, tuple[StorageWeakRef, Any, _Layout]] = {}

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the placeholder of a recomputed tensor, and any other tensor itself, detached, with its version."""
        if (known := self.known.get(memory_of(tensor))) is not None:
            _, placeholder, layout = known
            if (dims := _permutation(layout, _layout(tensor))) is not None:
                return _Transposed(self.unpack, placeholder, dims)
        # Detached, since a node that saves its own result would be in a reference cycle with the result.
        return tensor.detach() if tensor.requires_grad else tensor, tensor._version


def _layout(tensor: torch.Tensor) -> _Layout | None:
    """Returns the layout of `tensor` in its storage; `None` if sizes and strides do not describe the layout."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.dtype, int(tensor.storage_offset()), list(zip(tensor.shape, tensor.stride(), strict=True))


def _permutation(of: _Layout, layout: _Layout | None) -> list[int] | None:
    """Returns the order of the dimensions of `of` that gives `layout`; `None` if no order does.

    Only transposes count, and no other views, since a recompute may return a tensor with other strides.
    """
    if layout is None or of[:2] != layout[:2] or sorted(of[2]) != sorted(layout[2]):
        return None
    theirs, ours = (sorted(range(len(each)), key=each.__getitem__) for each in (layout[2], of[2]))
    return [ours[theirs.index(at)] for at in range(len(ours))]


@recomputing
@never_compiled
def _unpack_again(saved: Any) -> torch.Tensor:
    if isinstance(saved, _Transposed):
        return saved.unpack(saved.placeholder).permute(saved.dims)
    tensor: torch.Tensor
    tensor, expected = saved
    if tensor._version != expected:
        raise changed_error("a tensor that a backward with create_graph=True saved", tensor._version, expected)
    return tensor
