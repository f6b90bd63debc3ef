"""Packs the arguments of all pieces of a tiled region before the first piece runs, for a surrounding recompute.

A checkpoint around a tiled region recomputes up to the last tensor that backward asks for, and the arguments of pieces
are among these tensors. Packed piece by piece, these would make the checkpoint recompute other pieces in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from memscale.regions import PacksSeveral, hooks_around, recomputes
from memscale.transforms.tile.cutting import Cut


class PackedPieces(PacksSeveral):
    """The arguments of all pieces, packed by the surrounding hooks, which recompute."""

    def __init__(self, cut: Cut, hooks: Any) -> None:
        self._pack, self._unpack = hooks
        self._current: dict[int, Any] = {}
        with torch.no_grad():
            tensors = [(at, leaf.detach()) for at, leaf in enumerate(cut.leaves) if isinstance(leaf, torch.Tensor)]
            whole = {at: self._pack(tensor) for at, tensor in tensors if at not in cut.dims}
            self._pieces = [
                whole
                | {
                    at: self._pack(tensor.narrow(cut.dims[at], start, length))
                    for at, tensor in tensors
                    if at in cut.dims
                }
                for start, length in cut.ranges
            ]

    @contextmanager
    def piece(self, number: int, leaves: Sequence[Any]) -> Iterator[None]:
        """Within the body, piece `number` runs with `leaves` as the leaves of its arguments."""
        self._current = {id(leaves[at]): packed for at, packed in self._pieces[number].items()}
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self._unpack):
                yield
        finally:
            self._current = {}

    def pack(self, tensor: torch.Tensor) -> Any:
        """Packs a tensor that autograd saves."""
        return self._pack(tensor)

    def pack_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Packs tensors that a region keeps; arguments of the piece are packed already."""
        return [
            self._current[id(tensor)] if id(tensor) in self._current else self._pack(tensor.detach())
            for tensor in tensors
        ]


def packed_pieces_of(cut: Cut) -> PackedPieces | None:
    """Returns the packed arguments of the pieces of `cut` if a recompute surrounds the region, else None.

    None without grad mode as well: autograd saves nothing then, and only a first call looks for projections.
    """
    hooks = hooks_around() if torch.is_grad_enabled() else None
    return PackedPieces(cut, hooks) if hooks is not None and recomputes(hooks[1]) else None
