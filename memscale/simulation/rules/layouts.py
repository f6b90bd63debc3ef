"""The layouts of operators' results, and the differences between real kernels and PyTorch's fake ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._prims_common import suggest_memory_format

from memscale.simulation.process.fake_storages import FakeStorages


@dataclass(frozen=True)
class NewTensor:
    """A tensor that an operator makes, over the new storage at index `storage`."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class SharedArgument:
    """A result that is the operator's tensor argument at `index`, or shares its storage if `run` says so."""

    index: int


@dataclass(frozen=True)
class ResultLayout:
    """The layout of an operator's result: a tree of `NewTensor`, `SharedArgument`, lists, tuples and plain values."""

    outputs: Any
    storage_bytes: tuple[int, ...]
    #: True if a result shares an argument's storage although the schema does not say so: run it, it is a view.
    is_view: bool = False

    def build(self, fakes: FakeStorages, arguments: Sequence[torch.Tensor]) -> Any:
        """Returns the results as fake tensors."""
        return _build(self.outputs, fakes, [fakes.storage(nbytes) for nbytes in self.storage_bytes], arguments)


# A module-level function: a closure that calls itself is a reference cycle, which would keep its tensors alive until
# the next garbage collection.
def _build(
    output: Any, fakes: FakeStorages, storages: list[torch.UntypedStorage], arguments: Sequence[torch.Tensor]
) -> Any:
    match output:
        case NewTensor():
            storage = storages[output.storage]
            return fakes.tensor(storage, output.dtype, output.shape, output.stride, output.offset)
        case SharedArgument():
            return arguments[output.index]
        case list() | tuple():
            return type(output)([_build(part, fakes, storages, arguments) for part in output])
    return output


def result_layout(result: Any, arguments: Sequence[torch.Tensor]) -> ResultLayout:
    """Returns the layout of `result`, which an operator returned for `arguments`."""
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
            return SharedArgument(index)
    if output.layout != torch.strided:
        raise NotImplementedError(f"results of layout {output.layout} cannot be simulated, as of sparse gradients")
    storage = output.untyped_storage()
    at, _ = storages.setdefault(storage._cdata, (len(storages), storage.nbytes()))
    return NewTensor(at, output.dtype, tuple(output.shape), output.stride(), int(output.storage_offset()))


def whole_storage(layout: ResultLayout, args: Sequence[Any], card: object) -> ResultLayout:
    """Returns the layout of a loss: a scalar over a storage with an element for each number of the arguments.

    The kernels shrink the result after the reduction (aten/src/ATen/native/BinaryOps.cpp).
    """
    elements = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()
    return replace(layout, storage_bytes=(elements * layout.outputs.dtype.itemsize,))


def ordered_as(argument: int | None = None) -> Callable[[ResultLayout, Sequence[Any], object], ResultLayout]:
    """Returns the layout with contiguous results, or in channels_last where `argument` is; fake kernels keep strides.

    Found by running PyTorch's own samples of each operator, permuted. Wrong strides of a gradient would cost a copy in
    each kernel that it passes.
    """

    def correct(layout: ResultLayout, args: Sequence[Any], card: object) -> ResultLayout:
        decides = torch.contiguous_format if argument is None else suggest_memory_format(args[argument])
        return in_order(layout, decides)

    return correct


def in_order(layout: ResultLayout, memory_format: torch.memory_format) -> ResultLayout:
    """Returns `layout` with contiguous results in `memory_format`."""

    def ordered(output: Any) -> Any:
        if isinstance(output, (list, tuple)):
            return type(output)(map(ordered, output))
        if not isinstance(output, NewTensor):
            return output
        whole = memory_format if len(output.shape) in (4, 5) else torch.contiguous_format
        return replace(output, stride=torch.empty(output.shape, device="meta", memory_format=whole).stride())

    return replace(layout, outputs=ordered(layout.outputs))


def of_dtype(layout: ResultLayout, dtype: torch.dtype) -> ResultLayout:
    """Returns the layout of a single tensor with another dtype."""
    (nbytes,) = layout.storage_bytes
    scaled = nbytes // layout.outputs.dtype.itemsize * dtype.itemsize
    return replace(layout, outputs=replace(layout.outputs, dtype=dtype), storage_bytes=(scaled,))


def with_statistics(layout: ResultLayout, dtype: torch.dtype, shape: tuple[int, ...] | None = None) -> ResultLayout:
    """Returns the layout of a norm, with its statistics (the results after the first) in `dtype` and `shape`."""
    result, *statistics = layout.outputs
    wide = [replace(tensor, dtype=dtype) for tensor in statistics]
    if shape is not None:
        wide = [replace(tensor, shape=torch.Size(shape), stride=(1,)) for tensor in wide]
    nbytes = [tensor.dtype.itemsize * math.prod(tensor.shape) for tensor in wide]
    return ResultLayout((result, *wide), (layout.storage_bytes[result.storage], *nbytes))
