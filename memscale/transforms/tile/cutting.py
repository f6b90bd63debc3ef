"""`Cut` and `Joined`: cut the arguments of one call of a tiled region, and join the outputs of its pieces."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from memscale.core import TransformError, modules_in, pytrees
from memscale.transforms.tile.head.lazy_logits import LazyLogits, materialize
from memscale.transforms.tile.pieces import Sink

# The dtype, sizes (None for the joined dimension) and device that pieces of an output share.
_Kind = tuple[torch.dtype, list[int | None], torch.device]


class Cutting(Protocol):
    """The dimensions along which `tile` cuts arguments and joins outputs; errors show the ``repr``."""

    @property
    def dim(self) -> int:
        """The dimension to cut."""

    @property
    def in_dims(self) -> Any:
        """The dimensions of the arguments to cut; ``...`` applies the rule by sizes."""

    @property
    def out_dims(self) -> Any:
        """The dimensions along which outputs are joined; ``...`` applies the rule by sizes."""

    @property
    def reduce(self) -> str | None:
        """The reduction of outputs that are not joined: ``"sum"``, ``"mean"`` or None."""

    def ranges(self, total: int) -> list[tuple[int, int]]:
        """Returns the start and length of each piece of `total` rows."""


class Cut:
    """The cut of a call's arguments: leaves, dimension, ranges."""

    def __init__(self, how: Cutting, args: Any, kwargs: Any) -> None:
        _refuse_packed(how, (*args, *kwargs.values()))
        leaves, self.spec = pytrees.flatten((args, kwargs))
        self.leaves = [_real(leaf) for leaf in leaves]
        self.dims = self._explicit(how, args, kwargs) if how.in_dims is not ... else self._matching(how, args, kwargs)
        for index in self.dims:
            _refuse_layout(how, self.leaves[index])
        if not self.dims:
            raise TransformError(f"{how!r} found no tensor argument to cut; give one a dimension with in_dims")
        # A list, because hashing a size in a set would make a compiler fix a dynamic size.
        sizes = [self.leaves[index].shape[dim] for index, dim in self.dims.items()]
        self.total = sizes[0]
        if any(size != self.total for size in sizes):
            raise TransformError(
                f"{how!r} would cut tensors of sizes {sorted({*sizes})} along the given in_dims; they must be equal, "
                "so pass those that are not rows with in_dims None"
            )
        self.ranges = how.ranges(self.total)

    def _matching(self, how: Cutting, args: Any, kwargs: Any) -> dict[int, int]:
        dim = how.dim
        tensors = [(index, leaf) for index, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return {}
        first = pytrees.tensors([*args, *kwargs.values()])[0]  # in the order of the call; leaves are sorted by name
        for _, leaf in tensors:
            if leaf.is_nested:
                _refuse_layout(how, leaf)
        if not -first.dim() <= dim < first.dim():
            raise TransformError(
                f"tile(dim={dim}) is out of range for the first tensor argument, of shape {list(first.shape)}"
            )
        total = first.shape[dim]
        return {
            index: dim % leaf.dim()
            for index, leaf in tensors
            if -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == total
        }

    def _explicit(self, how: Cutting, args: Any, kwargs: Any) -> dict[int, int]:
        """Returns the dimension of each leaf by `in_dims`; an int holds for keyword arguments too."""
        wanted: list[Any] = []
        if isinstance(how.in_dims, tuple) and len(how.in_dims) != len(args):
            raise TransformError(
                f"{how!r}: in_dims has {len(how.in_dims)} entries for {len(args)} positional arguments"
            )
        broadcast(how.in_dims, args, wanted)
        broadcast(None if isinstance(how.in_dims, tuple) else how.in_dims, kwargs, wanted)
        dims = {}
        for index, (leaf, dim) in enumerate(zip(self.leaves, wanted, strict=True)):
            if isinstance(leaf, torch.Tensor) and dim is not None:
                dims[index] = _in_range(how, dim, leaf)
        return dims


def _in_range(how: Cutting, dim: int, leaf: torch.Tensor) -> int:
    if not -leaf.dim() <= dim < leaf.dim():
        raise TransformError(f"{how!r}: dimension {dim} is out of range for shape {list(leaf.shape)}")
    return dim % leaf.dim()


def broadcast(dims: Any, tree: Any, into: list[Any]) -> None:
    """Appends to `into` the entry of `dims` for each leaf of `tree`; a tuple of dims follows a tuple or list."""
    if isinstance(dims, tuple):
        if not isinstance(tree, (tuple, list)) or len(tree) != len(dims):
            raise TransformError(f"tile: the dimensions {dims!r} do not match the structure of {type(tree).__name__}")
        for entry, part in zip(dims, tree, strict=True):
            broadcast(entry, part, into)
    else:
        into.extend([dims] * len(pytrees.flatten(tree)[0]))


class Joined:
    """Joins the outputs of the pieces as they arrive."""

    def __init__(self, how: Cutting, total: int, *, in_place: bool) -> None:
        self._how = how
        self._total = total
        self._in_place = in_place
        self._spec: Any = None
        self._leaves: list[Any] = []
        self._kinds: dict[int, _Kind] = {}
        self._sinks: dict[int, Sink] = {}

    def add(self, output: Any, start: int, length: int) -> None:
        _refuse_packed(self._how, (output,))
        leaves, spec = pytrees.flatten(output)
        leaves = [_real(leaf) for leaf in leaves]
        dims = self.dims(output, leaves, length)
        first = self._spec is None
        if first:
            self._spec = spec
            self._leaves = [None] * len(leaves)
            self._sinks = {
                index: Sink(dim, self._total, in_place=self._in_place and leaves[index].shape[dim] == length)
                for index, dim in dims.items()
            }
        elif spec != self._spec or dims.keys() != self._sinks.keys():
            raise TransformError(
                f"{self._how!r}: the pieces return different structures, so they cannot be put together; "
                "the region is not the same function for every row"
            )
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._refuse_another_kind(index, leaf, dims.get(index))
            if index in dims:
                self._sinks[index].put(leaf, start)
            elif isinstance(leaf, torch.Tensor):
                self._reduce(index, leaf, length)
            elif first:
                self._leaves[index] = leaf
            elif not _equal(self._leaves[index], leaf):
                raise TransformError(
                    f"{self._how!r}: an output of type {type(leaf).__name__} differs between pieces, and only tensors "
                    "can be put together"
                )

    def _refuse_another_kind(self, index: int, leaf: torch.Tensor, dim: int | None) -> None:
        # Adding broadcasts, and copying casts: without this check they would accept what `cat` refuses.
        kind = _kind(leaf, dim)
        if self._kinds.setdefault(index, kind) != kind:
            one, another = _spelled(*self._kinds[index]), _spelled(*kind)
            raise TransformError(
                f"{self._how!r}: output {index} of one piece is {one} and that of another {another} (* is "
                "the joined dimension), so the region is not the same function for every row; cut another dimension, "
                "or use checkpoint() for this region"
            )

    def result(self) -> Any:
        for index, sink in self._sinks.items():
            self._leaves[index] = sink.result()
        return pytrees.unflatten(self._spec, self._leaves)

    def dims(self, output: Any, leaves: list[Any], length: int) -> dict[int, int]:
        """Returns, by the index of each joined leaf of a piece's output, the dimension along which it is joined."""
        if self._how.out_dims is not ...:
            wanted: list[Any] = []
            broadcast(self._how.out_dims, output, wanted)
            return {
                i: _in_range(self._how, d, leaves[i])
                for i, d in enumerate(wanted)
                if d is not None and isinstance(leaves[i], torch.Tensor)
            }
        dim = self._how.dim
        return {
            index: dim % leaf.dim()
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and -leaf.dim() <= dim < leaf.dim() and leaf.shape[dim] == length
        }

    def _reduce(self, index: int, leaf: torch.Tensor, length: int) -> None:
        if self._how.reduce is None:
            raise TransformError(
                f"{self._how!r}: output {index} has shape {list(leaf.shape)}, which is not {length} long along "
                f"dim {self._how.dim}, so the pieces' values cannot be concatenated; give reduce='sum' or 'mean' if it "
                "adds up over rows, or out_dims"
            )
        weighted = leaf * (length / self._total) if self._how.reduce == "mean" else leaf
        self._leaves[index] = weighted if self._leaves[index] is None else self._leaves[index] + weighted


def _refuse_packed(how: Cutting, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, PackedSequence):
            raise TransformError(
                f"{how!r} got a PackedSequence, which stores rows step by step, so that a piece has some steps of all "
                "sequences; pad it in front of the region (pad_packed_sequence), or use checkpoint() for this region"
            )
        if isinstance(value, (tuple, list)):
            _refuse_packed(how, value)


def _refuse_layout(how: Cutting, tensor: torch.Tensor) -> None:
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
        raise TransformError(
            f"{how!r} would cut a {kind}, which has no pieces; pass the tensor whole, with in_dims None, or "
            "use checkpoint() for this region"
        )


def _kind(leaf: torch.Tensor, dim: int | None) -> _Kind:
    # Compared as numbers, not as text: dynamic sizes of a compiler compare and do not print.
    shape: list[int | None] = list(leaf.shape)
    if dim is not None:
        shape[dim] = None
    return leaf.dtype, shape, leaf.device


def _spelled(dtype: torch.dtype, shape: list[int | None], device: torch.device) -> str:
    sizes = ", ".join("*" if size is None else str(size) for size in shape)
    return f"{str(dtype).removeprefix('torch.')}[{sizes}] on {device}"


def _real(leaf: Any) -> Any:
    # Cutting and joining use autograd functions, which would get the lazy object and not its logits.
    return materialize(leaf) if isinstance(leaf, LazyLogits) else leaf


def _equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except (RuntimeError, TypeError, ValueError):  # tensors and arrays of several elements, or of other shapes
        return False


def refuse_cut_steps(how: Cutting, fn: Any, cut: Cut) -> None:
    """Raises `TransformError` if `fn` is a recurrent layer or attention of PyTorch's, and `how` cuts its steps.

    Sizes alone do not show the difference: the state of a one-layer RNN has the same first size as a piece of one step.
    """
    module = next(modules_in(fn), None)
    if isinstance(module, _ATTENTION):
        for attention in [each for each in module.modules() if isinstance(each, nn.MultiheadAttention)][:1]:
            _refuse_cut_attention(how, module, attention, cut)
    if not isinstance(module, nn.RNNBase):
        return
    given = [index for index, leaf in enumerate(cut.leaves) if isinstance(leaf, torch.Tensor)]
    if cut.leaves[given[0]].dim() != 3:
        raise TransformError(
            f"{how!r} around {type(module).__name__}: its input has no batch, and steps depend on one another; use "
            "checkpoint() for this region"
        )
    rows, states = 0 if module.batch_first else 1, (1, 1) if isinstance(module, nn.LSTM) else 1
    out: list[Any] = [how.dim] * (3 if states != 1 else 2)
    if how.out_dims is not ...:
        out.clear()
        broadcast(how.out_dims, (0, (0, 0) if states != 1 else 0), out)
    right = [rows, *[1] * (len(given) - 1)], [rows, *[1] * (len(out) - 1)]
    if ([cut.dims.get(index) for index in given], [None if dim is None else dim % 3 for dim in out]) != right:
        raise TransformError(
            f"{how!r} around {type(module).__name__}(batch_first={module.batch_first}) does not cut the batch alone; "
            f"say in_dims={(rows, states)[: 1 + (len(given) > 1)]}, out_dims={(rows, states)}, for states have their "
            "layers in front"
        )


_ATTENTION = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
)


def _refuse_cut_attention(how: Cutting, module: nn.Module, attention: nn.MultiheadAttention, cut: Cut) -> None:
    tensors = [index for index, leaf in enumerate(cut.leaves) if isinstance(leaf, torch.Tensor)]
    # Queries may be cut, so of the arguments of nn.MultiheadAttention itself the keys tell.
    index = tensors[1 if module is attention and len(tensors) > 1 else 0]
    ndim, steps = cut.leaves[index].dim(), 1 if attention.batch_first else 0
    if cut.dims.get(index) == (steps if ndim == 3 else 0):
        remedy = f"cut the batch, tile(dim={1 - steps}, ...)" if ndim == 3 else "use checkpoint() for this region"
        raise TransformError(
            f"{how!r} around {type(module).__name__}(batch_first={attention.batch_first}) cuts the steps of "
            f"a sequence, each of which attends to the others; {remedy}"
        )
