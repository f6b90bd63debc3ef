"""Tensors that stand, while a region runs, for values that live elsewhere.

A region that runs again has kept a note of each, which holds none of its bytes and brings it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

_ORIGIN = "_memscale_origin"


class Note:
    """What a region that runs again needs to know of a value that it had by a stand-in. Compared by identity."""

    def bring_back(self, notes: Sequence[Any]) -> AbstractContextManager[Mapping[Any, torch.Tensor]]:
        """New stand-ins for all `notes`, which are of this class, for as long as the context is open."""
        raise NotImplementedError


class Origin:
    """The value that a tensor stands for."""

    def note(self, stand_in: torch.Tensor) -> Note:
        """A note of what `stand_in` stands for."""
        raise NotImplementedError


def stand_for(origin: Origin, tensor: torch.Tensor) -> None:
    """Mark `tensor` as what a running region has in place of `origin`."""
    setattr(tensor, _ORIGIN, origin)


def is_stand_in(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is what a running region has in place of another value."""
    return hasattr(tensor, _ORIGIN)


def any_stand_in(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of `tensors` is."""
    return True in [hasattr(tensor, _ORIGIN) for tensor in tensors]


def origin_of(stand_in: torch.Tensor) -> Any:
    """What `stand_in` stands for."""
    return getattr(stand_in, _ORIGIN)
