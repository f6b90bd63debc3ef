"""`tile`: runs a region on pieces of its input, so that its large intermediates never exist whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, ClassVar

import torch

from memscale.algebra import Numbers, Transform, Transformed
from memscale.core import (
    ConfigError,
    TransformError,
    by_name,
    factory,
    fsdp_groups_of,
    internals,
    is_of_modules,
    modules_in,
    pytrees,
)
from memscale.policies import everything_saveable, nothing_saveable
from memscale.regions import (
    Captures,
    floats_as_constants,
    functorch_state,
    hidden_changes,
    without_dynamo,
)
from memscale.transforms.checkpoint import Checkpoint, Checkpointed
from memscale.transforms.tile import independence, traced
from memscale.transforms.tile.cutting import Cut, Joined, refuse_cut_steps
from memscale.transforms.tile.halves import Halves, may_compare
from memscale.transforms.tile.head.lazy_logits import LazyLogits, defer
from memscale.transforms.tile.head.linear import is_projection
from memscale.transforms.tile.packed_pieces import packed_pieces_of
from memscale.transforms.tile.pieces import Source
from memscale.transforms.tile.rowwise import RowwiseWatch
from memscale.transforms.tile.unfit_regions import (
    index_explained,
    refuse_changed_arguments,
    refuse_stored_tensors,
)


@dataclasses.dataclass(frozen=True, repr=False)
class Tile(Transform):
    """Made by `tile`."""

    spelling: ClassVar[str] = "tile"
    own_numbers: ClassVar[Numbers] = "rounds"

    chunks: int | None = None
    size: int | None = None
    dim: int = 0
    in_dims: Any = ...
    out_dims: Any = ...
    reduce: str | None = None
    recompute: bool = True
    late_gradient: bool = False

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return Tiled(fn, self)

    def ranges(self, total: int) -> list[tuple[int, int]]:
        """Returns the (start, length) of each piece of `total` rows."""
        if self.size is not None:
            return [(start, min(self.size, total - start)) for start in range(0, total, self.size)]
        assert self.chunks is not None
        # A conditional, because `min` of a dynamic size would stay in the sizes of all later layers under a compiler.
        pieces = self.chunks if total >= self.chunks else total
        bounds = [index * total // pieces for index in range(pieces + 1)] if pieces else []
        return [(start, stop - start) for start, stop in pairwise(bounds)]

    def rows(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `fn` run on pieces of its arguments' first dimension."""
        return Tiled(fn, Tile(self.chunks, self.size))

    @property
    def by_rule(self) -> bool:
        """Whether inputs and outputs are cut and joined by the default rule."""
        return self.in_dims is ... and self.out_dims is ... and self.reduce is None


@by_name
def tile(
    *,
    chunks: int | None = None,
    size: int | None = None,
    dim: int = 0,
    in_dims: Any = ...,
    out_dims: Any = ...,
    reduce: str | None = None,
    recompute: bool = True,
    late_gradient: bool = False,
) -> Transform:
    """A transform that runs a function on pieces of its tensor arguments, one after the other.

    ``tile(chunks=2)(f)(x)`` is ``cat([f(x[:n]), f(x[n:])])``, for a function that treats each row of `x` by itself:

    >>> import torch, memscale as ms
    >>> def f(x, w):
    ...     return torch.relu(x @ w).sum(-1)
    >>> x, w = torch.ones(8, 4), torch.ones(4, 1000, requires_grad=True)
    >>> torch.equal(ms.tile(chunks=4)(f)(x, w), f(x, w))
    True
    >>> kept = lambda g: sum(r.nbytes for r in ms.saved_residuals(g, x, w) if r.source == "intermediate")
    >>> kept(f), kept(ms.tile(chunks=4)(f))
    (32000, 0)

    Each piece recomputes: forward keeps the region's input only, and backward runs the forward and the backward of one
    piece after the other, so that the residuals of one piece exist at a time. Random numbers (dropout) are drawn piece
    by piece, in order; the recompute of a piece repeats its draws.

    On a linear output projection (the `lm_head` of a language model) the result is a lazy tensor: see
    `docs/loss-head.md`.

    Args:
        chunks: the number of pieces, of sizes as even as possible; with fewer rows than that, each row is a piece.
        size: instead of `chunks`, the number of rows in a piece; the last piece may be shorter.
        dim: the dimension to cut; a negative one counts from the end, for each tensor.
        in_dims: by default every tensor argument, at any depth, that has the size of the first tensor argument along
            `dim` is cut, and all others are passed whole. A dimension, None (whole), or a tuple of these by positional
            argument replaces that rule, as in `torch.vmap`.
        out_dims: by default every tensor output that has the size of the piece along `dim` is concatenated. A
            dimension, None (reduced), or a tuple of these by output replaces that rule.
        reduce: how to combine outputs that are not concatenated: ``"sum"``, or ``"mean"`` weighted by the sizes of the
            pieces. None refuses such outputs.
        recompute: False keeps the residuals of every piece, so that only the temporaries of forward become smaller.
        late_gradient: True computes the gradient of a tied loss head's weight only when backward has the gradient of
            the embedding, for dtypes wider than 16 bits as well (16-bit ones always do so). It saves a gradient of the
            weight's size in between, and pays one more product of the logits' size. Other regions are unaffected.

    Raises:
        ConfigError: an argument is out of range, or not exactly one of `chunks` and `size` is given.
        TransformError: in a call, if nothing can be cut, if an output is neither concatenated nor reduced, or if the
            region does something that pieces would change (BatchNorm statistics or a softmax over the rows) or repeat
            (filling a cache that is an argument), or if the halves of the first piece give other numbers.

    Cost: saves all but one piece of the region's residuals and temporaries; pays the region's forward again, in smaller
    kernels, and in the first call the forward of one more piece.

    Source: Liu and Abbeel, "Blockwise Parallel Transformer" (2023), section 3; Hsu et al., "Liger Kernel" (2024).
    """
    internals.needs("tile")
    if (chunks is None) == (size is None):
        raise ConfigError(f"tile() takes exactly one of chunks and size, got chunks={chunks!r} and size={size!r}")
    for name, value in (("chunks", chunks), ("size", size)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"tile({name}=...) must be an int of at least 1, got {value!r}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ConfigError(f"tile(dim=...) must be an int, got {dim!r}")
    if reduce not in (None, "sum", "mean"):
        raise ConfigError(f"tile(reduce=...) must be None, 'sum' or 'mean', got {reduce!r}")
    for name, flag in (("recompute", recompute), ("late_gradient", late_gradient)):
        if not isinstance(flag, bool):
            raise ConfigError(f"tile({name}=...) must be True or False, got {flag!r}")
    dims = _dims("in_dims", in_dims), _dims("out_dims", out_dims)
    return Tile(chunks, size, dim, *dims, reduce, recompute, late_gradient)


def _dims(name: str, value: Any, *, inside: bool = False) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_dims(name, item, inside=True) for item in value)
    if value is None or (value is ... and not inside) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"tile({name}=...) must be an int, None or a tuple of these, got {value!r}")


class Tiled(Transformed):
    """A tiled function."""

    how: Tile
    not_around_sharded = "its parameters would be gathered and freed with every piece"

    def __init__(self, fn: Callable[..., Any], how: Tile) -> None:
        super().__init__(fn, how)
        self.body = Checkpointed(fn, Checkpoint(nothing_saveable if how.recompute else everything_saveable))
        self._projects: dict[tuple[bool, ...], bool] = {}  # by train/eval flags, because dropout makes it no projection
        self._watched: dict[tuple[bool, ...], int] = {}  # by train/eval flags: 1 if a watched piece had one row, else 2

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The `try` makes Dynamo run the region in Python as a whole where it cannot trace; see `Checkpointed`.
        try:
            if torch.compiler.is_compiling():
                return self.run(args, kwargs)
        finally:
            pass
        # Compiled piece by piece, the region would escape the watches.
        return without_dynamo(Tiled.run)(self, args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        """Runs the region, compiled or not."""
        compiling = torch.compiler.is_compiling()
        if not compiling and not functorch_state.active() and functorch_state.forward_ad():
            return self.fn(*args, **kwargs)  # `_Put` has no forward-mode derivative
        if self._is_projection(args, kwargs):
            self._refuse_freed_weight()
            return defer(self.fn, args[0], self.how)
        cut = Cut(self.how, args, kwargs)
        if len(cut.ranges) <= 1:
            return self.body(*args, **kwargs)
        if independence.is_wanted():
            parts = [self.fn, *([] if is_of_modules(self.fn) else Captures(self.fn).modules)]
            joined = Joined(self.how, cut.total, in_place=False)
            return independence.prove(self.body, parts, Captures(self.fn, follows=True), cut, joined, repr(self.how))
        refuse_cut_steps(self.how, self.fn, cut)
        # The chained buffers write in place, which neither torch.func nor a compiler's trace can follow.
        in_place = not (compiling or functorch_state.active())
        sources = {index: Source(cut.leaves[index], cut.dims[index], in_place=in_place) for index in cut.dims}
        joined = Joined(self.how, cut.total, in_place=in_place)
        whole = [t for i, t in enumerate(cut.leaves) if i not in cut.dims and isinstance(t, torch.Tensor)]
        run = self.body if compiling else self._guarded(whole, cut)
        ahead = packed_pieces_of(cut) if in_place and self.how.recompute else None
        for number, (start, length) in enumerate(cut.ranges):
            leaves = list(cut.leaves)
            for index, source in sources.items():
                leaves[index] = source.take(start, length)
            piece_args, piece_kwargs = pytrees.unflatten(cut.spec, leaves)
            watch = start == 0
            if compiling:
                with floats_as_constants():
                    result = run(*piece_args, **piece_kwargs)
                if watch:
                    traced.watch(self.how, [leaves[index] for index in cut.dims], pytrees.tensors(result))
            else:
                with (
                    index_explained(repr(self.how), length, cut.total),
                    nullcontext() if ahead is None else ahead.piece(number, leaves),
                    refuse_changed_arguments(piece_args, piece_kwargs, repr(self.how)) if watch else nullcontext(),
                ):
                    result = run(*piece_args, **piece_kwargs)
            joined.add(result, start, length)
        return joined.result()

    def _guarded(self, whole: list[torch.Tensor], cut: Cut) -> Callable[..., Any]:
        """Returns the body for one call: each piece sees the Python state of the first, so that counters count once."""
        captures = Captures(self.fn, follows=True)
        flags = captures.flags
        first, halves = True, None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal first, halves
            captures.restore()
            if first:
                first = False
                with hidden_changes.refused(
                    [tensor for _, _, tensor in captures.tensors],
                    lambda index: captures.describe(*captures.tensors[index][:2]),
                    self.how,
                    "every piece would do again; use checkpoint() for this region, or make the change outside of it",
                    watch=False,  # `RowwiseWatch` looks for changes in place
                ):
                    result = piece(*args, **kwargs)
            else:
                result = piece(*args, **kwargs)
            if halves is not None:
                halves.compare(result)
                halves = None
            return result

        def piece(*args: Any, **kwargs: Any) -> Any:
            nonlocal halves
            seen = self._watched.get(flags, 0)
            if seen == 2:
                return self.body(*args, **kwargs)
            leaves = pytrees.flatten((args, kwargs))[0]
            rows = {leaves[index]: dim for index, dim in cut.dims.items()}
            count = min(2, *(tensor.shape[dim] for tensor, dim in rows.items()))
            if count <= seen:
                return self.body(*args, **kwargs)
            if count == 2 and may_compare():
                halves = Halves(self.fn, self.how, cut, captures, leaves)
            with RowwiseWatch(captures, whole, rows, repr(self.how)) as watch:
                result = self.body(*args, **kwargs)
            if self.how.reduce is None:
                watch.refuse_over_rows(result)
            refuse_stored_tensors(captures, repr(self.how))
            self._watched[flags] = count
            return result

        return run

    def _refuse_freed_weight(self) -> None:
        """Raises `TransformError` if FSDP2 frees the weight after the forward: lazy logits need it in the loss."""
        below = [module for root in modules_in(self.fn) for module in root.modules()]
        if any(group.post_forward_mesh_info is not None for each in below for group in fsdp_groups_of(each)):
            raise TransformError(
                f"{self.how!r} around a projection that fully_shard() took by itself, and whose weight is freed after "
                "its forward, before a loss asks for it; leave it to the root's fully_shard(), or say "
                "fully_shard(head, reshard_after_forward=False)"
            )

    def _is_projection(self, args: Any, kwargs: Any) -> bool:
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or not self.how.by_rule:
            return False
        hidden = args[0]
        if torch.compiler.is_compiling() or isinstance(hidden, LazyLogits):
            return False
        if functorch_state.active() or functorch_state.inside_region():  # a function of `torch.func` needs values
            return False
        if hidden.dim() < 2 or not hidden.is_floating_point():
            return False
        if hasattr(hidden, "device_mesh"):
            raise TransformError(
                f"{self.how!r} around a projection whose weight is split over processes (its input is a DTensor): what "
                "gathers its result would see none; leave this region out of the plan"
            )
        flags = Captures(self.fn).flags
        if flags not in self._projects:
            self._projects[flags] = is_projection(self.fn, hidden)
        return self._projects[flags]


factory("tile", tile)
