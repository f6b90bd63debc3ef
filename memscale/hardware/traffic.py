"""The memory traffic of one operator: the bytes that its kernel reads and writes."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memscale.core import OpOverload


class Touch(enum.Enum):
    """The access of a kernel to one of its tensor arguments."""

    NOTHING = "nothing"
    READ = "read"
    WRITE = "write"
    UPDATE = "update"  # read and written
    LOOK_UP = "look up"  # read at some indices: at most as many bytes as the results or another argument have
    SCATTER = "scatter"  # updated at some indices: at most as many bytes as another argument has


@dataclass(frozen=True)
class _Accesses:
    """The accesses of an operator, as far as its schema determines them before a call."""

    positional: tuple[tuple[int, Touch], ...]
    named: Mapping[str, Touch]
    makes: bool  # whether the operator writes new tensors, its results


_NO_ACCESS = _Accesses((), {}, False)

# Operators that write an argument without reading it, which schemas do not express.
_OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_",
               "cauchy_", "geometric_", "_foreach_copy_", "_foreach_zero_"}  # fmt: skip
# Operators that return new memory without writing to it.
_EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
# The operators that read tensor values although they return no tensor; others of that kind read sizes or devices.
_READS_VALUES = {"_local_scalar_dense", "equal"}
# Arguments that a kernel reads only in part, or not at all, which schemas do not express.
_SPECIAL = {
    **{name: {"weight": Touch.LOOK_UP} for name in ("embedding", "_embedding_bag", "_embedding_bag_forward_only")},
    **{name: {"self": Touch.LOOK_UP} for name in ("index", "index_select", "gather", "take", "nll_loss_forward",
                                                  "nll_loss2d_forward")},
    **{name: {"self": Touch.SCATTER} for name in ("index_put_", "_index_put_impl_", "index_add_", "index_copy_",
                                                  "index_fill_", "scatter_", "scatter_add_", "scatter_reduce_")},
    # Their gradients depend on the targets only, not on the values of the input.
    **{name: {"self": Touch.NOTHING} for name in ("nll_loss_backward", "nll_loss2d_backward")},
    # The gradients are written only if a gradient scaler is passed.
    **{f"_fused_{name}_": {"grads": Touch.READ} for name in ("adam", "adamw", "sgd", "adagrad")},
}  # fmt: skip


def traffic_of(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Any) -> int:
    """Returns the bytes that `op` moves between the device's memory and its cores, counting each argument once.

    Views move nothing, an operator in place reads and writes its argument, and an expanded tensor counts its storage.
    Tensors without a storage (sparse tensors) count nothing.

    >>> a, row = torch.empty(4, 8), torch.empty(8)
    >>> traffic_of(torch.ops.aten.add.Tensor, (a, row.expand(4, 8)), {}, torch.empty(4, 8)) == 4 * (32 + 8 + 32)
    True
    >>> traffic_of(torch.ops.aten.t.default, (a,), {}, a.t())
    0
    """
    accesses = _accesses(op)
    if accesses is _NO_ACCESS:
        return 0
    # By identity, since a tensor that is passed twice is read once.
    touched = list(
        {
            (id(tensor), touch): (tensor, touch)
            for value, touch in _touches(accesses, args, kwargs)
            if touch is not Touch.NOTHING
            for tensor in _tensors(value)
        }.values()
    )
    made = 0
    if accesses.makes:
        storages = {tensor.untyped_storage()._cdata for tensor, _ in touched}
        results = list(_tensors(outputs))
        # Some operators return views that their schemas do not declare: _unsafe_view, unsafe_split.
        fresh = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages]
        if results and not fresh:
            return 0
        made = sum(map(_nbytes, fresh))
    read = written = 0
    some: list[tuple[int, Touch]] = []
    for tensor, touch in touched:
        nbytes = _nbytes(tensor)
        if touch is Touch.LOOK_UP or touch is Touch.SCATTER:
            some.append((nbytes, touch))
            continue
        read += nbytes if touch is not Touch.WRITE else 0
        written += nbytes if touch is not Touch.READ else 0
    at_places = sum(
        min(nbytes, max(made, read)) if touch is Touch.LOOK_UP else 2 * min(nbytes, read) for nbytes, touch in some
    )
    return read + written + made + at_places


@functools.cache
def _accesses(op: OpOverload) -> _Accesses:
    schema, name = op._schema, op.overloadpacket.__name__
    results = [value for value in schema.returns if "Tensor" in str(value.type)]
    changes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    makes = any(value.alias_info is None for value in results)
    is_view = bool(results) and not makes and not changes
    returns_facts = not results and not changes and name not in _READS_VALUES
    if is_view or returns_facts or name in _EMPTY or torch.Tag.inplace_view in op.tags:
        return _NO_ACCESS
    positional, named = [], {}
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        touch = _SPECIAL.get(name, {}).get(argument.name) or _touch(name, argument)
        named[argument.name] = touch
        if not argument.kwarg_only:
            positional.append((position, touch))
    return _Accesses(tuple(positional), named, makes)


def _touch(name: str, argument: Any) -> Touch:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return Touch.WRITE if argument.is_out or name in _OVERWRITES else Touch.UPDATE
    # zeros_like(x) and x.new_zeros() only take a shape from x.
    return Touch.NOTHING if name.endswith("_like") or name.startswith("new_") else Touch.READ


def _touches(accesses: _Accesses, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Touch]]:
    for position, touch in accesses.positional:
        if position < len(args):
            yield args[position], touch
    for name, value in kwargs.items():
        if name in accesses.named:
            yield value, accesses.named[name]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _nbytes(tensor: torch.Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    count = tensor.numel()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride == 0 and size:
            count //= size
    # At most the storage, for windows that overlap.
    return min(count * tensor.element_size(), tensor.untyped_storage().nbytes())
