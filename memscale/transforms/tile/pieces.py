"""Cuts tensors into pieces and joins them again, without a second copy of a whole tensor.

Autograd's own slicing and concatenation need more memory: the gradient of each slice is a whole tensor of zeros, and
`cat` needs all pieces and the result at once. Here the gradients of pieces are written to one buffer that travels along
a chain of `Take` nodes, and the pieces of an output to one buffer that travels along `_Put` nodes.

The chains are built piece by piece (take, compute, put, take, ...). Autograd runs the latest node first, so the
backward of one piece has ended, and its memory is free, before the backward of the previous piece begins.
"""

from __future__ import annotations

from typing import Any

import torch


class Source:
    """A tensor argument that is handed out in consecutive pieces along `dim`."""

    def __init__(self, whole: torch.Tensor, dim: int, *, in_place: bool) -> None:
        self._rest = whole
        self._dim = dim
        self._chained = in_place and whole.requires_grad and torch.is_grad_enabled()

    def take(self, start: int, length: int) -> torch.Tensor:
        """Returns the next piece, a view; call it just before the piece is computed."""
        if not self._chained:
            return self._rest.narrow(self._dim, start, length)
        piece: torch.Tensor
        piece, self._rest = Take.apply(self._rest, self._dim, start, length)  # type: ignore[no-untyped-call]
        return piece


class Sink:
    """An output that is joined from consecutive pieces along `dim`."""

    def __init__(self, dim: int, total: int, *, in_place: bool) -> None:
        self._dim = dim
        self._total = total
        self._in_place = in_place
        self._whole: torch.Tensor | None = None
        self._pieces: list[torch.Tensor] = []

    def put(self, piece: torch.Tensor, start: int) -> None:
        """Adds the next piece; call it just after the piece was computed."""
        if not self._in_place:
            self._pieces.append(piece)
            return
        if self._whole is None:
            shape = list(piece.shape)
            shape[self._dim] = self._total
            self._whole = torch.empty_permuted(shape, _order(piece), dtype=piece.dtype, device=piece.device)
        self._whole = _Put.apply(self._whole, piece, self._dim, start)  # type: ignore[no-untyped-call]

    def result(self) -> torch.Tensor:
        """Returns the whole output, after the last piece."""
        if self._whole is not None:
            return self._whole
        return torch.cat(self._pieces, self._dim)


def _order(tensor: torch.Tensor) -> list[int]:
    """Returns the dimensions in their order in memory, the outermost first, as in `torch.empty_permuted`.

    >>> _order(torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)), _order(torch.empty(3).expand(2, 3))
    ([0, 2, 3, 1], [0, 1])
    """
    dims, strides = list(range(tensor.dim())), tensor.stride()
    if tensor.is_contiguous() or 0 in strides:  # an expanded tensor has no order
        return dims
    return sorted(dims, key=lambda dim: -strides[dim])


class Take(torch.autograd.Function):
    """Splits off one piece of a tensor; backward writes the piece's gradient to the one buffer for the whole."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, start: int, length: int) -> Any:
        ctx.place = (dim, start, length)
        ctx.shape = whole.shape
        ctx.set_materialize_grads(False)
        return whole.narrow(dim, start, length), torch.ops.aten.alias(whole)

    @staticmethod
    def backward(ctx: Any, piece: torch.Tensor | None, whole: torch.Tensor | None) -> Any:
        given = piece if piece is not None else whole
        if given is None:
            return None, None, None, None
        dim, start, length = ctx.place
        if is_out_of_place(piece, whole):
            return _summed(piece, whole, ctx.shape, ctx.place), None, None, None
        if whole is None:
            whole = torch.zeros(ctx.shape, dtype=given.dtype, device=given.device)
        if piece is not None:
            whole.narrow(dim, start, length).copy_(piece)
        return whole, None, None, None


def is_out_of_place(*gradients: torch.Tensor | None) -> bool:
    """Whether a backward of `gradients` must not write in place.

    This is so if the backward itself is differentiated, or runs once for several gradients, as with
    ``torch.autograd.grad(..., is_grads_batched=True)``: a buffer holds one gradient only.
    """
    functorch = torch._C._functorch
    return torch.is_grad_enabled() or any(
        functorch.is_functorch_wrapped_tensor(each) or functorch.is_legacy_batchedtensor(each)
        for each in gradients
        if each is not None
    )


def _summed(
    piece: torch.Tensor | None, whole: torch.Tensor | None, shape: torch.Size, place: tuple[int, int, int]
) -> torch.Tensor | None:
    if piece is None:
        return whole
    dim, start, length = place
    before, after = list(shape), list(shape)
    before[dim], after[dim] = start, shape[dim] - start - length
    padded = torch.cat([piece.new_zeros(before), piece, piece.new_zeros(after)], dim)
    return padded if whole is None else whole + padded


class _Put(torch.autograd.Function):
    """Writes one piece to the output; backward returns a view of the output's gradient."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, piece: torch.Tensor, dim: int, start: int) -> torch.Tensor:
        ctx.place = (dim, start, piece.shape[dim])
        ctx.mark_dirty(whole)
        whole.narrow(dim, start, piece.shape[dim]).copy_(piece)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, grad.narrow(*ctx.place), None, None
