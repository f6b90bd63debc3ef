"""What an operator returns, without running it: shapes, strides, dtypes and which outputs are its arguments."""

from __future__ import annotations

import enum
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memscale.simulation.dispatch.hollow import HollowStorages
from memscale.simulation.kernels.cuda_fused import RESULTS_OF_FUSED, normalises_by_cudnn
from memscale.simulation.kernels.cuda_rnns import RESULTS_OF_RNNS


class Kind(enum.Enum):
    """How the simulation treats an operator."""

    RUN = enum.auto()  # it touches no data: a view, a change of a tensor's own shape
    IN_PLACE = enum.auto()  # it returns its first argument, whose shape stays
    MAKE = enum.auto()  # it returns new tensors


def kind_of(op: OpOverload) -> Kind:
    """How to treat `op`, by its schema and tags.

    >>> kind_of(torch.ops.aten.t.default).name, kind_of(torch.ops.aten.add_.Tensor).name
    ('RUN', 'IN_PLACE')
    >>> kind_of(torch.ops.aten.mm.default).name
    'MAKE'
    """
    if torch.Tag.inplace_view in op.tags and op not in _RESIZES:
        return Kind.RUN
    returns = op._schema.returns
    aliases = [value.alias_info for value in returns]
    if returns and all(alias is not None and not alias.is_write for alias in aliases):
        return Kind.RUN
    if op._schema.is_mutable and all(alias is not None and alias.is_write for alias in aliases):
        return Kind.IN_PLACE
    return Kind.MAKE


_RESIZES = {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default}


@dataclass(frozen=True)
class NewTensor:
    """A tensor that an operator makes, over the new storage at index `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Argument:
    """A result that is the operator's tensor argument at `index`, or shares its storage if `run` says so."""

    index: int


@dataclass(frozen=True)
class ResultLayout:
    """What an operator returns: a tree of `NewTensor`, `Argument`, lists, tuples and plain values."""

    outputs: Any
    storage_bytes: tuple[int, ...]
    #: True if a result shares an argument's storage although the schema does not say so: run it, it is a view.
    is_view: bool = False

    def build(self, hollow: HollowStorages, arguments: Sequence[torch.Tensor]) -> Any:
        """The results, as hollow tensors."""
        return _build(self.outputs, hollow, [hollow.storage(nbytes) for nbytes in self.storage_bytes], arguments)


# A function of the module and not a closure: one that calls itself is a cycle, which would keep the tensors that it
# holds alive until the next garbage collection.
def _build(
    output: Any, hollow: HollowStorages, storages: list[torch.UntypedStorage], arguments: Sequence[torch.Tensor]
) -> Any:
    match output:
        case NewTensor():
            storage = storages[output.storage]
            return hollow.tensor(storage, output.dtype, output.shape, output.stride, output.offset)
        case Argument():
            return arguments[output.index]
        case list() | tuple():
            return type(output)([_build(part, hollow, storages, arguments) for part in output])
    return output


def result_layout(result: Any, arguments: Sequence[torch.Tensor]) -> ResultLayout:
    """The layout of `result`, which an operator returned for `arguments`."""
    storages: dict[int, tuple[int, int]] = {}
    outputs = _describe(result, arguments, storages)
    given = {tensor.untyped_storage()._cdata for tensor in arguments}
    return ResultLayout(
        outputs, tuple(nbytes for _, nbytes in storages.values()), is_view=not given.isdisjoint(storages)
    )


def _describe(output: Any, arguments: Sequence[torch.Tensor], storages: dict[int, tuple[int, int]]) -> Any:
    if isinstance(output, (list, tuple)):
        return type(output)([_describe(part, arguments, storages) for part in output])
    if not isinstance(output, torch.Tensor):
        return output
    for index, argument in enumerate(arguments):
        if output is argument:
            return Argument(index)
    if output.layout != torch.strided:
        raise NotImplementedError(f"results of layout {output.layout} cannot be simulated, as of sparse gradients")
    storage = output.untyped_storage()
    at, _ = storages.setdefault(storage._cdata, (len(storages), storage.nbytes()))
    return NewTensor(at, output.dtype, tuple(output.shape), output.stride(), int(output.storage_offset()))


# Real kernels allocate a result with an element for each row, shrink its shape to a scalar and keep its storage
# (aten/src/ATen/native/BinaryOps.cpp); the fake ones make a scalar.
_REDUCED_LATE = {
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.soft_margin_loss.default,
}

# Real kernels return these whole and in order, or in channels_last where the argument at this index is in that format;
# the fake ones keep the strides of an argument (found by running PyTorch's own samples of each operator, permuted).
# A gradient in the other order costs a copy in each kernel that it goes through.
_ORDERED_AS: dict[OpOverload, int | None] = {
    torch.ops.aten.native_layer_norm_backward.default: None,
    torch.ops.aten._log_softmax_backward_data.default: None,
    torch.ops.aten.mse_loss_backward.default: None,
    torch.ops.aten.smooth_l1_loss_backward.default: None,
    torch.ops.aten.huber_loss_backward.default: None,
    torch.ops.aten.log_sigmoid_forward.default: None,
    torch.ops.aten.native_group_norm.default: 0,
    torch.ops.aten.native_batch_norm.default: 0,
    torch.ops.aten._native_batch_norm_legit.default: 0,
    torch.ops.aten.native_batch_norm_backward.default: 1,
    torch.ops.aten.channel_shuffle.default: 0,
    torch.ops.aten.max_unpool2d.default: 0,
    torch.ops.aten.replication_pad2d_backward.default: 1,
}


def _with_whole_storage(layout: ResultLayout, args: Sequence[Any]) -> ResultLayout:
    elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return replace(layout, storage_bytes=(elements * layout.outputs.dtype.itemsize,))


def _in_order(layout: ResultLayout, memory_format: torch.memory_format) -> ResultLayout:
    def ordered(output: Any) -> Any:
        if isinstance(output, (list, tuple)):
            return type(output)(map(ordered, output))
        if not isinstance(output, NewTensor):
            return output
        whole = memory_format if len(output.shape) in (4, 5) else torch.contiguous_format
        return replace(output, stride=torch.empty(output.shape, device="meta", memory_format=whole).stride())

    return replace(layout, outputs=ordered(layout.outputs))


# The fake kernels take bfloat16 only, the real ones more; the real ones, on zeros, would take minutes for a mixture.
_SAYS_BFLOAT16 = {torch.ops.aten._grouped_mm.default} if hasattr(torch.ops.aten, "_grouped_mm") else set()


def _of_dtype(layout: ResultLayout, dtype: torch.dtype) -> ResultLayout:
    """`layout`, one tensor's, with another dtype."""
    (nbytes,) = layout.storage_bytes
    scaled = nbytes // layout.outputs.dtype.itemsize * dtype.itemsize
    return replace(layout, outputs=replace(layout.outputs, dtype=dtype), storage_bytes=(scaled,))


def _as_real(op: OpOverload, layout: ResultLayout, args: Sequence[Any], *, on_cuda: bool) -> ResultLayout:
    """`layout`, where the fake kernel is known to differ from the real one."""
    if op in _REDUCED_LATE:
        return _with_whole_storage(layout, args)
    if op is torch.ops.aten.col2im.default:
        # Made as large as its argument, and then shrunk (``col2im_cuda``, ``col2im_cpu``).
        columns = args[0].numel() * args[0].itemsize
        return replace(layout, storage_bytes=(max(columns, *layout.storage_bytes, 0),))
    accumulates = on_cuda and op in _ACCUMULATED and args[0].dtype in (torch.float16, torch.bfloat16)
    if accumulates:
        layout = _with_statistics(layout, torch.float32)
    if on_cuda and op in _NORMALISES_BATCHES and not (args[1] is not None and normalises_by_cudnn(*args[:2])):
        # `batch_norm_cuda` makes room for statistics in evaluation, too.
        layout = _with_statistics(layout, layout.outputs[1].dtype, (args[0].shape[1],))
    if op in _ORDERED_AS and not (on_cuda and op in _KEEPS_LAYOUT_ON_CUDA):
        decides = _ORDERED_AS[op]
        return _in_order(layout, torch.contiguous_format if decides is None else suggest_memory_format(args[decides]))
    if op is torch.ops.aten.native_layer_norm.default and args[2] is not None and not accumulates:
        # Statistics are in the dtype of the weight, which under autocast is not that of the input.
        return _with_statistics(layout, args[2].dtype)
    return layout


_NORMALISES_BATCHES = {
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
}
# Its own kernel on a card makes its result as the batch lies, and cuDNN gets none that lies otherwise.
_KEEPS_LAYOUT_ON_CUDA = {*_NORMALISES_BATCHES, torch.ops.aten.native_batch_norm_backward.default}
# On CUDA their statistics are in the dtype that they accumulate in.
_ACCUMULATED = {torch.ops.aten.native_layer_norm.default, *_NORMALISES_BATCHES}


def _with_statistics(layout: ResultLayout, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> ResultLayout:
    result, *statistics = layout.outputs
    wide = [replace(tensor, dtype=dtype) for tensor in statistics]
    if shape is not None:
        wide = [replace(tensor, shape=torch.Size(shape), stride=(1,)) for tensor in wide]
    nbytes = [tensor.dtype.itemsize * math.prod(tensor.shape) for tensor in wide]
    return ResultLayout((result, *wide), (layout.storage_bytes[result.storage], *nbytes))


# For operators that a CPU does not have PyTorch has no fake kernel, or one of another device's.
_ON_CUDA = {**RESULTS_OF_RNNS, **RESULTS_OF_FUSED}


class FakeKernels:
    """Runs operators on fake tensors, one call at a time, to learn their layouts.

    Args:
        on_cuda: whether the layouts are those of a card's kernels.
        in_order: tells of a call whether its results lie in order whatever its arguments do.
    """

    def __init__(
        self, *, on_cuda: bool = False, in_order: Callable[[OpOverload, Any], bool] = lambda op, args: False
    ) -> None:
        self._on_cuda = on_cuda
        self._is_in_order = in_order
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Its cache, which is the process's, forgets that two results are one tensor (the biases' gradients of an LSTM).
        self._mode.cache_enabled = False
        self._log = logging.getLogger(fake_tensor.__name__)

    def layout(self, op: OpOverload, args: Any, kwargs: Any, arguments: Sequence[torch.Tensor]) -> ResultLayout:
        """What `op` returns for arguments with the layouts of these.

        Raises:
            Exception: whatever the operator's fake kernel raises, as when the shape depends on values.
        """
        was_disabled, self._log.disabled = self._log.disabled, True  # it prints a traceback of what is handled here
        try:
            with self._mode, torch.no_grad():
                narrow = op in _SAYS_BFLOAT16
                fakes = {id(tensor): _like(tensor, narrow=narrow) for tensor in arguments}
                run: Any = _ON_CUDA.get(op, op) if self._on_cuda else op
                result = run(*exchanged(args, fakes), **exchanged(kwargs, fakes))
                layout = result_layout(result, [fakes[id(tensor)] for tensor in arguments])
                if self._is_in_order(op, args):
                    return _in_order(layout, torch.contiguous_format)
                return _as_real(
                    op, layout if not narrow else _of_dtype(layout, arguments[0].dtype), args, on_cuda=self._on_cuda
                )
        finally:
            self._log.disabled = was_disabled


def _like(tensor: torch.Tensor, *, narrow: bool) -> torch.Tensor:
    dtype = torch.bfloat16 if narrow and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def exchanged(tree: Any, by_id: dict[int, Any]) -> Any:
    """`tree`, an operator's arguments, with the values whose id is in `by_id` exchanged."""
    if isinstance(tree, torch.Tensor):
        return by_id.get(id(tree), tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([exchanged(item, by_id) for item in tree])
    if isinstance(tree, dict):
        return {key: exchanged(value, by_id) for key, value in tree.items()}
    return tree


def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """The position and the name of each argument that `op` writes to, by its schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_by(written: Sequence[tuple[int, str]], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among the arguments of a call that it writes to, as `written_arguments` names them."""
    return list(_tensors(args[at] if at < len(args) else kwargs.get(name) for at, name in written))


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, one entry for each time one appears."""
    return [*_tensors(args), *(_tensors(kwargs.values()) if kwargs else ())]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# The names of the two kinds of indices of a compressed layout.
_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is made of indices and values: COO, CSR, CSC, BSR or BSC."""
    return tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED


def strided_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`tensors`, with the strided indices and values of sparse ones in their place."""
    found: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.layout is torch.sparse_coo:
            found += [tensor._indices(), tensor._values()]
        elif tensor.layout in _COMPRESSED:
            found += [*(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout]), tensor.values()]
        else:
            found.append(tensor)
    return found


def results_of(result: Any) -> list[torch.Tensor]:
    """The tensors in what an operator returned."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(_tensors((result,)))


def signature(args: Any, kwargs: Any, tensors: list[torch.Tensor], *, loose: bool) -> tuple[Any, ...]:
    """A key under which equal calls of one operator have equal layouts, if it can be hashed.

    >>> found = []
    >>> signature((torch.ones(2, 3), [1, 2], 0.5), {}, found, loose=True)
    ((torch.Size([2, 3]), (3, 1), torch.float32), (1, 2), <class 'float'>)
    >>> len(found)
    1

    Args:
        args, kwargs: of the call.
        tensors: receives those among them, as `tensors_in` finds them.
        loose: leaves out the values of floats.
    """
    if not kwargs:
        return _parts(args, tensors, loose)
    return (*_parts(args, tensors, loose), *kwargs, _parts(kwargs.values(), tensors, loose))


def _parts(values: Any, tensors: list[torch.Tensor], loose: bool) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        kind = value.__class__
        if kind is torch.Tensor or kind is torch.nn.Parameter or isinstance(value, torch.Tensor):
            tensors.append(value)
            layout: tuple[Any, ...] = (value.shape, value.stride(), value.dtype)
            parts.append(layout if _IS_CPU(value) else (*layout, _DEVICE(value)))
        elif kind is int or value is None:
            parts.append(value)
        elif isinstance(value, (list, tuple)):
            kinds = set(map(type, value))
            if kinds <= _INTS:
                parts.append(tuple(value))
            elif kinds <= _PLAIN and all(map(_IS_CPU, value)):  # an optimizer's: some hundred each
                tensors += value
                parts.append((tuple(map(_SHAPE, value)), tuple(map(_STRIDE, value)), tuple(map(_DTYPE, value))))
            else:
                parts.append(_parts(value, tensors, loose))
        elif kind is float and loose:
            parts.append(float)
        else:
            parts.append((kind, value))  # 1, 1.0 and True are equal, and promote differently
    return tuple(parts)


_INTS, _PLAIN = {int}, {torch.Tensor, torch.nn.Parameter}
# The attributes of a tensor may be patched, to tell a step that it is on the device that is simulated.
_DEVICE = torch._C.TensorBase.device.__get__
_IS_CPU = torch._C.TensorBase.is_cpu.__get__  # type: ignore[attr-defined]
_SHAPE, _DTYPE, _STRIDE = attrgetter("shape"), attrgetter("dtype"), torch.Tensor.stride
