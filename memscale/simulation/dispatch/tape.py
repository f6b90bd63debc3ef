"""`Tape`: the operators of one simulated step with the layouts of their tensors, so that they can run for real.

`PartProgram` holds consecutive operators of a tape, ready to run on tensors of the step's layouts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from memscale.core import OpOverload
from memscale.simulation.kernels.shapes import exchanged, results_of, tensors_in
from memscale.simulation.process.draws import with_own_draws

# Operators of these namespaces communicate with other processes, or with a profiler.
_NOT_TAPED = ("c10d", "_c10d_functional", "c10d_functional", "profiler")


class Slot(NamedTuple):
    """A tensor of a taped call: the number of its storage in the trace, and its layout in this storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class TapedCall(NamedTuple):
    """A call of an operator, with a `Slot` in place of each tensor among its arguments and results."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Slot, ...]


@dataclass
class Tape:
    """The calls of a step.

    Args:
        number: returns the number of the storage under a tensor.

    Attributes:
        calls: index of an operator in the trace -> its call; without operators on sparse tensors or without data.
        values: number of a storage -> its contents, where these are known integers.
    """

    number: Callable[[torch.Tensor], int]
    calls: dict[int, TapedCall] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    _begun: tuple[OpOverload, tuple[Any, ...], dict[str, Any]] | None = None

    def begins(self, op: OpOverload, args: Any, kwargs: Any, known: Sequence[bool]) -> None:
        """Notes the call that is about to run, and for each tensor among its arguments whether the values are known."""
        self._begun = None
        tensors = tensors_in(args, kwargs)
        if op.namespace in _NOT_TAPED or any(tensor.layout is not torch.strided for tensor in tensors):
            return
        for tensor, is_known in zip(tensors, known, strict=True):
            if is_known and not tensor.is_floating_point() and not tensor.is_complex():
                self._keep(tensor)
        slots = {id(tensor): self._slot(tensor) for tensor in tensors}
        self._begun = op, exchanged(tuple(args), slots), exchanged(kwargs, slots)

    def ends(self, op: OpOverload, at: int, result: Any) -> None:
        """Notes the results of `op`, number `at` of the trace; without effect if another operator began last."""
        if self._begun is not None and self._begun[0] is op:
            self.calls[at] = TapedCall(*self._begun, tuple(map(self._slot, results_of(result))))
        self._begun = None

    def _slot(self, tensor: torch.Tensor) -> Slot:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return Slot(self.number(tensor), shape, stride, int(tensor.storage_offset()), tensor.dtype)

    def _keep(self, tensor: torch.Tensor) -> None:
        number = self.number(tensor)
        if number not in self.values:
            with _disable_current_modes():
                whole = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(tensor.untyped_storage())
                self.values[number] = whole.clone()


_POOL = 1 << 16  # numbers in the pool that fills tensors

T = TypeVar("T")
R = TypeVar("R")
#: Tensors by the number of their storage, one over each storage, and by `Slot`.
_Tensors = dict[Any, torch.Tensor]


class _Call(NamedTuple):
    """A call, the (position, slot) of each result that is a new storage, and the keys that nothing uses later."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, Slot], ...]
    drops: tuple[int | Slot, ...]


class _Given(NamedTuple):
    """A storage from before a program: its numbers, their dtype, known contents, and divisor of its numbers."""

    numel: int
    dtype: torch.dtype
    values: torch.Tensor | None
    divisor: int


@dataclass(frozen=True, eq=False)
class PartProgram:
    """Consecutive operators, ready to run.

    Attributes:
        key: equal for programs of the same operators on the same layouts.
        calls: the operators.
        given: the storages from before the program, by number.
    """

    key: str
    calls: tuple[_Call, ...]
    given: Mapping[int, _Given]

    @property
    def nbytes(self) -> int:
        """The bytes of the storages from before the program."""
        return sum(each.numel * each.dtype.itemsize for each in self.given.values())

    def inputs(self, pools: dict[torch.dtype, torch.Tensor]) -> _Tensors:
        """Returns new tensors to run on; `pools` holds the numbers that fill them."""
        return {storage: _filled(each, pools) for storage, each in self.given.items()}

    def run(self, inputs: _Tensors, before: Callable[[], T], after: Callable[[T], R]) -> list[R]:
        """Runs the operators on `inputs`. Returns ``after(before())`` of each, called around the operator."""
        have, found = inputs.copy(), []

        def argument(value: Any) -> Any:
            if value.__class__ is Slot:
                known = have.get(value)
                if known is None:
                    known = have[value] = _view(have[value.storage], value)
                return known
            if isinstance(value, torch.Generator):
                return torch.Generator("cpu")
            return [argument(each) for each in value] if isinstance(value, (list, tuple)) else value

        for run, args, kwargs, results, drops in self.calls:
            begun = before()
            result = run(*map(argument, args), **{name: argument(value) for name, value in kwargs.items()})
            if results:
                made = results_of(result)
                for position, slot in results:
                    have[slot.storage] = have[slot] = made[position]
                del made
            del result
            for key in drops:
                have.pop(key, None)
            found.append(after(begun))
        return found


def _view(base: torch.Tensor, slot: Slot) -> torch.Tensor:
    if base.dtype is slot.dtype:
        return base.as_strided(slot.shape, slot.stride, slot.offset)
    empty = torch.empty(0, dtype=slot.dtype, device="cpu")
    return empty.set_(base.untyped_storage(), slot.offset, slot.shape, slot.stride)


def program_of(
    calls: Sequence[tuple[TapedCall, Collection[int]]],
    values: Mapping[int, torch.Tensor],
    parameters: Mapping[int, tuple[int, ...]],
) -> PartProgram:
    """Returns the program of taped calls.

    Args:
        calls: each call, with the numbers of the storages that die after it.
        values: number of a storage -> known contents.
        parameters: number of a storage -> the shape of the parameter in it.
    """
    slots: dict[int, dict[Slot, None]] = {}  # by storage, in the order of first use
    names: dict[int, int] = {}  # storage -> its number in the key
    made: set[int] = set()
    digest = hashlib.sha256()
    found = []
    for call, deaths in calls:
        given = list(slots_in((call.args, call.kwargs)))
        before = {*slots, *(slot.storage for slot in given)}
        new = [(position, slot) for position, slot in enumerate(call.results) if slot.storage not in before]
        made |= {slot.storage for _, slot in new}
        for slot in (*given, *(slot for _, slot in new)):
            slots.setdefault(slot.storage, {})[slot] = None
            names.setdefault(slot.storage, len(names))
        dead = sorted(made.intersection(deaths), key=names.__getitem__)
        drops: list[int | Slot] = []
        for storage in dead:
            drops += [storage, *slots[storage]]
        found.append(_Call(with_own_draws(call.op), call.args, call.kwargs, tuple(new), tuple(drops)))
        parts = _part((call.args, call.kwargs, call.results), names)
        digest.update(repr((call.op.name(), parts, [names[each] for each in dead])).encode())
    inputs = {
        storage: _given(list(views), values.get(storage), parameters.get(storage, ()))
        for storage, views in slots.items()
        if storage not in made
    }
    return PartProgram(digest.hexdigest(), tuple(found), inputs)


def _given(views: list[Slot], values: torch.Tensor | None, shape: tuple[int, ...]) -> _Given:
    dtype = views[0].dtype
    nbytes = max(_end(slot) * slot.dtype.itemsize for slot in views)
    return _Given(-(-nbytes // dtype.itemsize), dtype, values, max(1, prod(shape[1:])))


def _end(slot: Slot) -> int:
    """Returns the number of elements of the storage up to the last element of the tensor."""
    if 0 in slot.shape:
        return slot.offset
    return slot.offset + 1 + sum((size - 1) * step for size, step in zip(slot.shape, slot.stride, strict=True))


def _part(value: Any, names: Mapping[int, int]) -> Any:
    """Returns a part of the key: floats, such as the factor of an optimizer's step, change from step to step."""
    if isinstance(value, Slot):
        return names[value.storage], *value[1:]
    if isinstance(value, (list, tuple)):
        return [_part(each, names) for each in value]
    if isinstance(value, dict):
        return [(name, _part(each, names)) for name, each in value.items()]
    return type(value) if isinstance(value, (float, torch.Generator)) else value


def slots_in(value: Any) -> Iterator[Slot]:
    """Yields the slots among the arguments of a taped call."""
    if isinstance(value, Slot):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from slots_in(each)
    elif isinstance(value, dict):
        yield from slots_in(list(value.values()))


def _filled(given: _Given, pools: dict[torch.dtype, torch.Tensor]) -> torch.Tensor:
    """Returns the contents of a storage: known integers, zeros for unknown ones, or positive numbers.

    Negative numbers would take a slow path in roots and logarithms. The rows of a matrix of weights add up to about
    one, so that numbers neither overflow nor vanish from layer to layer.
    """
    numel, dtype, values, divisor = given
    flat = torch.empty(numel, dtype=dtype, device="cpu")
    if not dtype.is_floating_point:
        flat.zero_()
        if values is not None and values.dtype is dtype:
            flat[: values.numel()].copy_(values[:numel])
        return flat
    if dtype not in pools:
        generator = torch.Generator("cpu").manual_seed(0)
        pools[dtype] = (torch.rand(_POOL, generator=generator, device="cpu", dtype=torch.float32) + 0.1).to(dtype)
    pool, rows = pools[dtype] / divisor, numel // _POOL
    flat[: rows * _POOL].view(rows, _POOL).copy_(pool)
    flat[rows * _POOL :].copy_(pool[: numel - rows * _POOL])
    return flat
