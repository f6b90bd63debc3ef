"""The result layout of an operator, without running its kernel: shapes, strides, dtypes, and outputs that alias."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memscale.core import OpOverload
from memscale.simulation.rules.layouts import ResultLayout, of_dtype, result_layout
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import CardTraits


class Kind(enum.Enum):
    """The simulation's treatment of an operator: run it, return its first argument, or make new fake tensors."""

    RUN = enum.auto()  # the operator touches no data: a view, or a change of a tensor's own shape
    IN_PLACE = enum.auto()  # the operator returns its first argument, whose shape stays
    MAKE = enum.auto()  # the operator returns new tensors


def kind_of(op: OpOverload) -> Kind:
    """Returns the treatment of `op`, by its schema and tags.

    >>> kind_of(torch.ops.aten.t.default).name, kind_of(torch.ops.aten.add_.Tensor).name
    ('RUN', 'IN_PLACE')
    >>> kind_of(torch.ops.aten.mm.default).name
    'MAKE'
    """
    if torch.Tag.inplace_view in op.tags and not rule_of(op).resizes:
        return Kind.RUN
    returns = op._schema.returns
    aliases = [value.alias_info for value in returns]
    if returns and all(alias is not None and not alias.is_write for alias in aliases):
        return Kind.RUN
    if op._schema.is_mutable and all(alias is not None and alias.is_write for alias in aliases):
        return Kind.IN_PLACE
    return Kind.MAKE


class FakeKernels:
    """A runner of operators on fake tensors, which finds the layouts of their results.

    Args:
        card: the traits of the card whose kernels' layouts are wanted; None means a CPU.
    """

    def __init__(self, card: CardTraits | None = None) -> None:
        self._card = card
        self._device = "cpu" if card is None else "cuda"
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        # FakeTensorMode's cache returns two tensors where an operator returns one tensor twice (the gradients of an
        # LSTM's biases), and the cache is shared by the process.
        self._mode.cache_enabled = False
        self._log = logging.getLogger(fake_tensor.__name__)

    def layout(self, op: OpOverload, args: Any, kwargs: Any, arguments: Sequence[torch.Tensor]) -> ResultLayout:
        """Returns the layout of the results of `op` for arguments with the layouts of `args` and `kwargs`.

        Raises:
            Exception: the error of the operator's fake kernel, such as for a shape that depends on values.
        """
        was_disabled, self._log.disabled = (
            self._log.disabled,
            True,
        )  # the log would get tracebacks of errors that callers catch
        try:
            with self._mode, torch.no_grad():
                rule = rule_of(op)
                fakes = {id(tensor): _like(tensor, rule.faked_in) for tensor in arguments}
                run: Any = rule.results if rule.results and self._device in rule.results_on else op
                result = run(*exchanged(args, fakes), **exchanged(kwargs, fakes))
                layout = result_layout(result, [fakes[id(tensor)] for tensor in arguments])
                if rule.faked_in is not None:
                    return of_dtype(layout, arguments[0].dtype)
                return layout if rule.layout is None else rule.layout(layout, args, self._card)
        finally:
            self._log.disabled = was_disabled


def _like(tensor: torch.Tensor, faked_in: torch.dtype | None) -> torch.Tensor:
    dtype = faked_in if faked_in is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=tensor.device)


def exchanged(tree: Any, by_id: dict[int, Any]) -> Any:
    """Returns `tree`, an operator's arguments, with each tensor whose id is in `by_id` exchanged."""
    if isinstance(tree, torch.Tensor):
        return by_id.get(id(tree), tree)
    if isinstance(tree, (list, tuple)):
        return type(tree)([exchanged(item, by_id) for item in tree])
    if isinstance(tree, dict):
        return {key: exchanged(value, by_id) for key, value in tree.items()}
    return tree


def written_arguments(op: OpOverload) -> tuple[tuple[int, str], ...]:
    """Returns the position and the name of each argument that `op` writes to, by its schema."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written_by(written: Sequence[tuple[int, str]], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors that a call writes to, at the positions and names of `written_arguments`."""
    return list(_tensors(args[at] if at < len(args) else kwargs.get(name) for at, name in written))


def tensors_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors among an operator's arguments; a tensor that appears twice has two entries."""
    return [*_tensors(args), *(_tensors(kwargs.values()) if kwargs else ())]


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


# The methods that return the two index tensors of a compressed sparse layout.
_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a sparse layout of indices and values: COO, CSR, CSC, BSR or BSC."""
    return tensor.layout is torch.sparse_coo or tensor.layout in _COMPRESSED


def strided_parts(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns `tensors`, with each sparse tensor replaced by its strided indices and values."""
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
    """Returns the tensors in the `result` of an operator."""
    if result is None:
        return []
    return [result] if isinstance(result, torch.Tensor) else list(_tensors((result,)))


def signature(args: Any, kwargs: Any, tensors: list[torch.Tensor], *, loose: bool) -> tuple[Any, ...]:
    """Returns a key of a call: calls of one operator with equal keys have results of equal layouts.

    The key is hashable if all arguments other than tensors are.

    >>> found = []
    >>> signature((torch.ones(2, 3), [1, 2], 0.5), {}, found, loose=True)
    ((torch.Size([2, 3]), (3, 1), torch.float32), (1, 2), <class 'float'>)
    >>> len(found)
    1

    Args:
        args, kwargs: the arguments of the call.
        tensors: receives the tensors among the arguments, as `tensors_in` returns them.
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
            elif kinds <= _PLAIN and all(map(_IS_CPU, value)):  # fast path for an optimizer's lists of hundreds
                tensors += value
                parts.append((tuple(map(_SHAPE, value)), tuple(map(_STRIDE, value)), tuple(map(_DTYPE, value))))
            else:
                parts.append(_parts(value, tensors, loose))
        elif kind is float and loose:
            parts.append(float)
        else:
            parts.append((kind, value))  # with the class: 1, 1.0 and True are equal, and promote differently
    return tuple(parts)


_INTS, _PLAIN = {int}, {torch.Tensor, torch.nn.Parameter}
# The true device: device spoofing patches `Tensor.device` and `Tensor.is_cpu` after these getters are read.
_DEVICE = torch.Tensor.device.__get__
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_SHAPE, _DTYPE, _STRIDE = attrgetter("shape"), attrgetter("dtype"), torch.Tensor.stride
