"""The memory traffic of one operator: the bytes that its kernel reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memscale.core import OpOverload
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import Touch


@dataclass(frozen=True)
class _Accesses:
    """The accesses of an operator, as far as its schema determines them before a call."""

    positional: tuple[tuple[int, Touch], ...]
    named: Mapping[str, Touch]
    makes: bool  # whether the operator writes new tensors, its results


_NO_ACCESS = _Accesses((), {}, False)


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
    schema, rule, name = op._schema, rule_of(op), op.overloadpacket.__name__
    results = [value for value in schema.returns if "Tensor" in str(value.type)]
    changes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    makes = any(value.alias_info is None for value in results)
    is_view = bool(results) and not makes and not changes
    returns_facts = not results and not changes and rule.values != "reads"
    if is_view or returns_facts or rule.empty or torch.Tag.inplace_view in op.tags:
        return _NO_ACCESS
    positional, named = [], {}
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type):
            continue
        touch = rule.touches.get(argument.name) or _touch(name, argument)
        named[argument.name] = touch
        if not argument.kwarg_only:
            positional.append((position, touch))
    return _Accesses(tuple(positional), named, makes)


def _touch(name: str, argument: Any) -> Touch:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return Touch.WRITE if argument.is_out else Touch.UPDATE
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
