"""Stand-in tensors: while a region runs, they take the place of values that live in another tier.

A region that will be recomputed keeps a `Note` of each stand-in instead of its bytes; the note can make it again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

_ORIGIN = "_memscale_origin"


class Note:
    """Makes the stand-in of a value again for a recompute, without keeping its bytes. Compared by identity."""

    def bring_back(self, notes: Sequence[Any]) -> AbstractContextManager[Mapping[Any, torch.Tensor]]:
        """Gives a new stand-in for each of `notes`, all of this class, valid while the context is open."""
        raise NotImplementedError


class Origin:
    """The value in another tier whose place a stand-in tensor takes."""

    def note(self, stand_in: torch.Tensor) -> Note:
        """Returns a note from which `stand_in` can be made again."""
        raise NotImplementedError


def stand_for(origin: Origin, tensor: torch.Tensor) -> None:
    """Marks `tensor` as the stand-in for `origin` in a running region."""
    setattr(tensor, _ORIGIN, origin)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a stand-in."""
    return hasattr(tensor, _ORIGIN)


def is_sharded(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor, of which this process holds a shard."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "device_mesh")


def is_own(tensor: torch.Tensor) -> bool:
    """Whether a copy can replace `tensor`, which holds unless `tensor` is a stand-in or a shard."""
    return not (is_stand_in(tensor) or is_sharded(tensor))


def any_stand_in(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of `tensors` is a stand-in."""
    return True in [hasattr(tensor, _ORIGIN) for tensor in tensors]


def origin_of(stand_in: torch.Tensor) -> Any:
    """Returns the `Origin` of `stand_in`."""
    return getattr(stand_in, _ORIGIN)
