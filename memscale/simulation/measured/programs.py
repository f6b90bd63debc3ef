"""`PartProgram`: consecutive operators of a step, ready to run for real on tensors of the step's layouts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch

from memscale.simulation.dispatch.tape import Slot, TapedCall
from memscale.simulation.kernels.shapes import results_of
from memscale.simulation.process.draws import with_own_draws

_POOL = 1 << 16  # numbers in the pool that fills tensors

T = TypeVar("T")
R = TypeVar("R")
_Layout = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


class _Use(NamedTuple):
    """An argument that is the tensor number `view` of a program."""

    view: int


class _Call(NamedTuple):
    """A call, the (position, view) of each result that is a new storage, and the views that nothing uses later."""

    run: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, int], ...]
    drops: tuple[int, ...]


class _Given(NamedTuple):
    """A storage from before a program: its first view, numbers, dtype, known contents, and divisor of its numbers."""

    view: int
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
        views: for each tensor the first tensor over its storage, and its layout.
        given: the storages from before the program.
    """

    key: str
    calls: tuple[_Call, ...]
    views: tuple[tuple[int, _Layout], ...]
    given: tuple[_Given, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the storages from before the program."""
        return sum(each.numel * each.dtype.itemsize for each in self.given)

    def inputs(self, pools: dict[torch.dtype, torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns new tensors to run on, by view; `pools` holds the numbers that fill them."""
        have: list[torch.Tensor | None] = [None] * len(self.views)
        for each in self.given:
            shape, stride, offset, _ = self.views[each.view][1]
            have[each.view] = _filled(each, pools).as_strided(shape, stride, offset)
        return have

    def run(self, inputs: Sequence[torch.Tensor | None], before: Callable[[], T], after: Callable[[T], R]) -> list[R]:
        """Runs the operators on `inputs`. Returns ``after(before())`` of each, called around the operator."""
        have, views, found = list(inputs), self.views, []

        def tensor(view: int) -> torch.Tensor:
            known = have[view]
            if known is None:
                first, (shape, stride, offset, dtype) = views[view]
                base = have[first]
                assert base is not None, "a storage is given, or made before it is read"
                if base.dtype is dtype:
                    known = base.as_strided(shape, stride, offset)
                else:
                    empty = torch.empty(0, dtype=dtype, device="cpu")
                    known = empty.set_(base.untyped_storage(), offset, shape, stride)
                have[view] = known
            return known

        def argument(value: Any) -> Any:
            if value.__class__ is _Use:
                return tensor(value.view)
            return [argument(each) for each in value] if value.__class__ is list else value

        for run, args, kwargs, results, drops in self.calls:
            begun = before()
            result = run(*map(argument, args), **{name: argument(value) for name, value in kwargs.items()})
            if results:
                made = results_of(result)
                for position, view in results:
                    have[view] = made[position]
                del made
            del result
            for view in drops:
                have[view] = None
            found.append(after(begun))
        return found


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
    return _Compiler(values, parameters).compiled(calls)


class _Compiler:
    def __init__(self, values: Mapping[int, torch.Tensor], parameters: Mapping[int, tuple[int, ...]]) -> None:
        self._values, self._parameters = values, parameters
        self._views: dict[tuple[int, _Layout], int] = {}
        self._first: dict[int, int] = {}  # storage -> its first view
        self._names: dict[int, int] = {}  # storage -> its number in the key
        self._nbytes: dict[int, int] = {}
        self._made: set[int] = set()

    def compiled(self, calls: Sequence[tuple[TapedCall, Collection[int]]]) -> PartProgram:
        digest = hashlib.sha256()
        found = []
        for call, deaths in calls:
            args, kwargs = self._argument(call.args), self._argument(call.kwargs)
            results = []
            for position, slot in enumerate(call.results):
                if slot.storage not in self._first:
                    self._made.add(slot.storage)
                    results.append((position, self._view(slot)))
            dead = self._made.intersection(deaths)
            drops = tuple(view for (storage, _), view in self._views.items() if storage in dead)
            found.append(_Call(with_own_draws(call.op), args, kwargs, tuple(results), drops))
            parts = (self._part(part) for part in (call.args, call.kwargs, call.results))
            digest.update(repr((call.op.name(), *parts, sorted(self._names[each] for each in dead))).encode())
        return PartProgram(
            digest.hexdigest(),
            tuple(found),
            tuple((self._first[storage], layout) for storage, layout in self._views),
            tuple(map(self._given, self._first.keys() - self._made)),
        )

    def _view(self, slot: Slot) -> int:
        view = self._views.setdefault((slot.storage, slot[1:]), len(self._views))
        self._first.setdefault(slot.storage, view)
        self._names.setdefault(slot.storage, len(self._names))
        last = -1 if 0 in slot.shape else sum((n - 1) * step for n, step in zip(slot.shape, slot.stride, strict=True))
        nbytes = (slot.offset + last + 1) * slot.dtype.itemsize
        self._nbytes[slot.storage] = max(nbytes, self._nbytes.get(slot.storage, 0))
        return view

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Slot):
            return _Use(self._view(value))
        if isinstance(value, (list, tuple)):
            return [self._argument(each) for each in value]
        if isinstance(value, dict):
            return {name: self._argument(each) for name, each in value.items()}
        return torch.Generator("cpu") if isinstance(value, torch.Generator) else value

    def _given(self, storage: int) -> _Given:
        view = self._first[storage]
        dtype = next(layout[3] for (each, layout), at in self._views.items() if each == storage and at == view)
        shape = self._parameters.get(storage, ())
        count = -(-self._nbytes[storage] // dtype.itemsize)
        return _Given(view, count, dtype, self._values.get(storage), max(1, prod(shape[1:])))

    def _part(self, value: Any) -> Any:
        """Returns a part of the key: floats, such as the factor of an optimizer's step, change from step to step."""
        if isinstance(value, Slot):
            return self._names[value.storage], *value[1:]
        if isinstance(value, (list, tuple)):
            return [self._part(each) for each in value]
        if isinstance(value, dict):
            return [(name, self._part(each)) for name, each in value.items()]
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
    _, numel, dtype, values, divisor = given
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
