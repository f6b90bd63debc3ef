"""`tile`: run a region on pieces of its input, so that its large intermediates never exist whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import nn

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
    put_back,
    without_dynamo,
)
from memscale.transforms.checkpoint import Checkpoint, Checkpointed
from memscale.transforms.tile import independence
from memscale.transforms.tile.ahead import shown_ahead
from memscale.transforms.tile.cutting import Cut, Joined, refuse_time
from memscale.transforms.tile.head.deferred import Deferred, defer
from memscale.transforms.tile.head.linear import is_projection
from memscale.transforms.tile.pieces import Source
from memscale.transforms.tile.rowwise import (
    RowwiseWatch,
    names,
    refuse_changed_arguments,
    refuse_compiled,
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
        region = Tiled(fn, self)
        if not torch.compiler.is_compiling():
            region.look_around()
        return region

    def ranges(self, total: int) -> list[tuple[int, int]]:
        """The (start, length) of each piece of `total` rows."""
        if self.size is not None:
            return [(start, min(self.size, total - start)) for start in range(0, total, self.size)]
        assert self.chunks is not None
        # Not `min`, which stays in the lengths of all layers to come where a compiler keeps `total` open.
        pieces = self.chunks if total >= self.chunks else total
        bounds = [index * total // pieces for index in range(pieces + 1)] if pieces else []
        return [(start, stop - start) for start, stop in pairwise(bounds)]

    def rows(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` on pieces of its arguments' first dimension."""
        return Tiled(fn, Tile(self.chunks, self.size))

    @property
    def by_rule(self) -> bool:
        """Whether inputs and outputs are cut and joined by the default rule alone."""
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

    ``tile(chunks=2)(f)(x)`` is ``cat([f(x[:n]), f(x[n:])])``, for a function that treats the rows of `x` alone:

    >>> import torch, memscale as ms
    >>> def f(x, w):
    ...     return torch.relu(x @ w).sum(-1)
    >>> x, w = torch.ones(8, 4), torch.ones(4, 1000, requires_grad=True)
    >>> torch.equal(ms.tile(chunks=4)(f)(x, w), f(x, w))
    True
    >>> kept = lambda g: sum(r.nbytes for r in ms.saved_residuals(g, x, w) if r.source == "intermediate")
    >>> kept(f), kept(ms.tile(chunks=4)(f))
    (32000, 0)

    A piece recomputes: forward keeps the region's input only, and backward takes one piece at a time through forward
    and backward, so that no two pieces' residuals are alive together. Random numbers (dropout) are drawn piece by
    piece, in order; the recompute of a piece repeats its draws.

    On a linear output projection (the `lm_head` of a language model) the result is *deferred*: see `docs/loss-head.md`.

    Args:
        chunks: into how many pieces, as even as possible; more pieces than rows means one row a piece.
        size: or the rows of a piece, the last one shorter.
        dim: the dimension that is cut. Negative counts from the end, of each tensor.
        in_dims: by default every tensor argument, at any depth, whose size along `dim` is that of the first tensor
            argument is cut and the others are passed whole. A dimension, `None` (whole), or a tuple of these by
            positional argument overrides that, in the spirit of `torch.vmap`.
        out_dims: by default every tensor output as long along `dim` as the piece is concatenated. A dimension,
            `None` (reduced), or a tuple of these by output overrides that.
        reduce: what becomes of outputs that are not concatenated: ``"sum"``, or ``"mean"`` weighted by the sizes of
            the pieces. `None` refuses them.
        recompute: `False` keeps every piece's residuals, and bounds the temporaries of forward only.
        late_gradient: `True` makes the gradient of a tied loss head's weight when backward has that of the embedding,
            also where numbers have more than 16 bits: it is not there in between, for one product more of the logits'
            size. On anything else it changes nothing.

    Raises:
        ConfigError: arguments out of range, or not exactly one of `chunks` and `size`.
        TransformError: at the call, when nothing can be cut, when an output is neither concatenated nor reduced, or
            when the region does what pieces would change (BatchNorm statistics over the rows) or repeat (filling a
            cache that it is given).

    Cost: saves all but one piece of the region's residuals and temporaries; pays its forward again, in smaller
    kernels.

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
    """A tiled function.

    Attributes:
        captured: the modules that `fn` reaches, where it is neither a module nor made of modules.
        normalizes: whether code of the user's that `fn` runs names `batch_norm`.
        watched: in which modes (whether any module trains) a piece of a whole call has been watched.
    """

    how: Tile
    not_around_sharded = "its parameters would be gathered and freed with every piece"

    def __init__(self, fn: Callable[..., Any], how: Tile) -> None:
        super().__init__(fn, how)
        self.body = Checkpointed(fn, Checkpoint(nothing_saveable if how.recompute else everything_saveable))
        self._projects: dict[tuple[bool, ...], bool] = {}  # by the train/eval flags, for dropout is no projection
        self._watched: set[tuple[bool, ...]] = set()  # the train/eval flags in which a piece has been watched
        self.captured: list[nn.Module] = []
        self.normalizes = False
        self.watched: tuple[bool, ...] = ()

    def look_around(self) -> None:
        """Find out what a compiler's trace of `fn` will not show."""
        if not is_of_modules(self.fn):
            self.captured = Captures(self.fn).modules
        self.normalizes = names([self.fn, *self.captured], "batch_norm")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # In a `try`, so that what Dynamo cannot trace is left to Python as a whole; see `Checkpointed`.
        try:
            if torch.compiler.is_compiling():
                refuse_compiled([self.fn, *self.captured], self.normalizes, self.watched, self.how)
                return self.run(args, kwargs)
        finally:
            pass
        # Its pieces would be compiled one by one, and no watch would see them.
        return without_dynamo(Tiled.run)(self, args, kwargs)

    def run(self, args: Any, kwargs: Any) -> Any:
        """What a call computes, once the question of a compiler is settled."""
        compiling = torch.compiler.is_compiling()
        if not compiling and not functorch_state.active() and functorch_state.forward_ad():
            return self.fn(*args, **kwargs)  # what puts pieces together knows nothing of tangents
        if self._is_projection(args, kwargs):
            self._refuse_freed_weight()
            return defer(self.fn, args[0], self.how)
        cut = Cut(self.how, args, kwargs)
        if len(cut.ranges) <= 1:
            return self.body(*args, **kwargs)
        if independence.is_wanted():
            parts = [self.fn, *self.captured]
            joined = Joined(self.how, cut.total, thrifty=False)
            return independence.prove(self.body, parts, Captures(self.fn, follows=True), cut, joined, repr(self.how))
        refuse_time(self.how, self.fn, cut)
        # The chains of `_pieces` write in place, which neither torch.func nor a compiler's trace can follow.
        thrifty = not (compiling or functorch_state.active())
        sources = {index: Source(cut.leaves[index], cut.dims[index], thrifty=thrifty) for index in cut.dims}
        joined = Joined(self.how, cut.total, thrifty=thrifty)
        whole = [t for i, t in enumerate(cut.leaves) if i not in cut.dims and isinstance(t, torch.Tensor)]
        run = self.body if compiling else self._guarded(whole, cut)
        ahead = shown_ahead(cut) if thrifty and self.how.recompute else None
        for number, (start, length) in enumerate(cut.ranges):
            leaves = list(cut.leaves)
            for index, source in sources.items():
                leaves[index] = source.take(start, length)
            piece_args, piece_kwargs = pytrees.unflatten(cut.spec, leaves)
            watch = start == 0
            if compiling:
                with floats_as_constants():
                    result = run(*piece_args, **piece_kwargs)
            else:
                with (
                    nullcontext() if ahead is None else ahead.piece(number, leaves),
                    refuse_changed_arguments(piece_args, piece_kwargs, repr(self.how)) if watch else nullcontext(),
                ):
                    result = run(*piece_args, **piece_kwargs)
            joined.add(result, start, length)
        return joined.result()

    def _guarded(self, whole: list[torch.Tensor], cut: Cut) -> Callable[..., Any]:
        """The body of one call: every piece sees the Python state that the first one saw, so a counter counts once."""
        captures = Captures(self.fn, follows=True)
        flags = captures.flags()
        first = True

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal first
            put_back(captures)
            if first:
                first = False
                with hidden_changes.refused(
                    [tensor for _, _, tensor in captures.tensors],
                    lambda index: captures.describe(*captures.tensors[index][:2]),
                    self.how,
                    "every piece would do again; use checkpoint() for this region, or make the change outside of it",
                    watch=False,  # for changes in place there is a watch of our own
                ):
                    return piece(*args, **kwargs)
            return piece(*args, **kwargs)

        def piece(*args: Any, **kwargs: Any) -> Any:
            if flags in self._watched:
                return self.body(*args, **kwargs)
            leaves = pytrees.flatten((args, kwargs))[0]
            rows = {leaves[index]: dim for index, dim in cut.dims.items()}
            with RowwiseWatch(captures, whole, rows, repr(self.how)):
                result = self.body(*args, **kwargs)
            refuse_stored_tensors(captures, repr(self.how))
            self._watched.add(flags)
            if any(flags) not in self.watched:
                self.watched = (*self.watched, any(flags))
            return result

        return run

    def _refuse_freed_weight(self) -> None:
        """Logits that are made when the loss asks for them need the weight then."""
        below = [module for root in modules_in(self.fn) for module in root.modules()]
        if any(group.post_forward_mesh_info is not None for each in below for group in fsdp_groups_of(each)):
            raise TransformError(
                f"{self.how!r} around a projection that fully_shard() took by itself, and whose weight is freed after "
                "its forward, before a loss asks for it; leave it to the root's fully_shard(), or say "
                "fully_shard(head, reshard_after_forward=False)"
            )

    def reassembled(self, remap: Callable[[Any], Any]) -> Tiled:
        region = super().reassembled(remap)
        region.captured = [remap(module) for module in self.captured]
        region.normalizes, region.watched = self.normalizes, self.watched
        return region

    def _is_projection(self, args: Any, kwargs: Any) -> bool:
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or not self.how.by_rule:
            return False
        hidden = args[0]
        if torch.compiler.is_compiling() or functorch_state.active() or isinstance(hidden, Deferred):
            return False
        if hidden.dim() < 2 or not hidden.is_floating_point():
            return False
        if hasattr(hidden, "device_mesh"):
            raise TransformError(
                f"{self.how!r} around a projection whose weight is split over processes (its input is a DTensor): what "
                "gathers its result would see none; leave this region out of the plan"
            )
        flags = Captures(self.fn).flags()
        if flags not in self._projects:
            self._projects[flags] = is_projection(self.fn, hidden)
        return self._projects[flags]


factory("tile", tile)
