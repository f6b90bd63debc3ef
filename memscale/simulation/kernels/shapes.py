"""What an operator returns, without running it: shapes, strides, dtypes and which outputs are its arguments."""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memscale.simulation.rules.layouts import ResultLayout, of_dtype, result_layout
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import CardTraits


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
    if torch.Tag.inplace_view in op.tags and op not in RESIZES:
        return Kind.RUN
    returns = op._schema.returns
    aliases = [value.alias_info for value in returns]
    if returns and all(alias is not None and not alias.is_write for alias in aliases):
        return Kind.RUN
    if op._schema.is_mutable and all(alias is not None and alias.is_write for alias in aliases):
        return Kind.IN_PLACE
    return Kind.MAKE


#: They change a tensor's storage.
RESIZES = {torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default}


class FakeKernels:
    """Runs operators on fake tensors, one call at a time, to learn their layouts.

    Args:
        card: whose kernels' layouts they are; None is a CPU.
    """

    def __init__(self, card: CardTraits | None = None) -> None:
        self._card = card
        self._device = "cpu" if card is None else "cuda"
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
