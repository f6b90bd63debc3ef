"""Policies that save some values: a run records results of operators, and a recompute returns them again.

Both classes watch the operators of a region. `Recorder` asks the policy about each call and saves the chosen results.
`Replayer` returns a saved result for the same call: the same operator on tensors of the same shapes, after the same
number of such calls as in the run. If the numbers differ, the recompute raises `Misaligned` at the next saved tensor.
"""

from __future__ import annotations

import enum
import weakref
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from memscale.core import internals
from memscale.policies import Move, Policy, Recompute, Site, Verdict, batch_dims
from memscale.regions import (
    OperatorWatch,
    is_stand_in,
    is_unrecorded,
    memory_of,
    running_statistics,
    unrecorded,
    unrecorded_depth,
)
from memscale.runtime import Runtime
from memscale.transforms.checkpoint.saved_results import (
    NO_EFFECTS,
    CallSpec,
    OperatorEffects,
    Results,
    SavedResult,
    call_spec,
    has_effects,
    seal_all,
)
from memscale.transforms.labels import listeners

# The results of these operators share the memory of their input but have their own version counters.
_UNSAFE_VIEWS = frozenset(("aten::_unsafe_view", "aten::unsafe_split.Tensor", "aten::unsafe_split_with_sizes"))
_CAST = "aten::_to_copy"


def is_view(op: internals.OpOverload) -> bool:
    """Whether the result of `op` shares memory with an input; true for `_unsafe_view`, which ends every batched `@`."""
    return op.is_view or op.name() == "aten::_unsafe_view"


class Misaligned(BaseException):
    """A recompute makes other calls than the run. A `BaseException`, since the region may catch an `Exception`."""


class _Kind(enum.Enum):
    """How a recorder treats the calls of an operator."""

    PASSES = enum.auto()  # a view, or an operator that the policy always recomputes
    SHARES = enum.auto()  # an unsafe view
    CASTS = enum.auto()  # `_to_copy`
    CHANGES = enum.auto()  # writes to an argument
    MAKES = enum.auto()  # makes a new tensor


def _kind(op: Any) -> _Kind:
    # A run and its recompute differ in views: autograd detaches the tensors that it saves, and a hook on a leaf, such
    # as an input of a recompute, makes a view.
    if op.name() in _UNSAFE_VIEWS:
        return _Kind.SHARES
    if not isinstance(op, internals.OpOverload) or op.is_view:
        return _Kind.PASSES
    if op.name() == _CAST:
        return _Kind.CASTS
    return _Kind.CHANGES if op._schema.is_mutable else _Kind.MAKES


class _OperatorEntry(NamedTuple):
    """An operator, with its kind and the verdict of a policy that does not see labels.

    `has_effects` says whether the operator may draw random numbers or update running statistics.
    """

    op: Any  # kept alive, so that no other operator gets its id
    kind: _Kind
    verdict: Verdict | None
    has_effects: bool


@cache
def _entries_of(policy: Policy) -> dict[int, _OperatorEntry]:
    """Returns the cache of `policy`, by the id of the operator: the hash of an operator runs Python code."""
    return {}


def _add_entry(policy: Policy, op: Any) -> _OperatorEntry:
    kind = _kind(op)
    verdict: Verdict | None = None
    if kind in (_Kind.CASTS, _Kind.MAKES) and not policy.sees_labels:
        verdict = policy.verdict(Site(op, None, batch_dims(op)))
        if isinstance(verdict, Recompute):
            kind = _Kind.PASSES
    found = _entries_of(policy)[id(op)] = _OperatorEntry(op, kind, verdict, kind is _Kind.MAKES and has_effects(op))
    return found


class _Output(NamedTuple):
    """The layout of an operator's first output; `rest` are the other outputs, such as the log-sum-exp of attention.

    A record is valid while the storage `lives`. Afterwards the output can get no label, and another tensor may have the
    same memory.
    """

    call: int
    op: internals.OpOverload
    size: torch.Size
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    rest: tuple[Any, ...] | None  # `None` where the operator has one output
    left: OperatorEffects
    lives: weakref.ref[torch.UntypedStorage]


class _Watch(OperatorWatch):
    """Watches the operators of a region, except memscale's own operators and casts that autocast may have cached."""

    keeps_compiled = True

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._depth = unrecorded_depth()
        self._inputs = {id(tensor) for tensor in inputs}

    def _is_of_cached_cast(self, source: torch.Tensor) -> bool:
        # Autocast casts a leaf once and then answers from a cache, which has another state in a recompute. An input of
        # a recompute is a leaf even if the input of the run is not.
        return id(source) in self._inputs or (source.is_leaf and source.requires_grad) or is_stand_in(source)


class Recorder(_Watch):
    """Saves the results that `policy` chooses while a region runs."""

    def __init__(self, policy: Policy, runtime: Runtime | None, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__(inputs)
        self._policy = policy
        self._entries = _entries_of(policy)
        self._runtime = runtime
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        self._calls: list[CallSpec] = []
        self._marks: list[int] = []  # for each tensor that autograd saved, the number of calls before it
        self._results: dict[int, SavedResult] = {}  # by the number of the call
        self._by_memory: dict[int, list[SavedResult]] = {}
        self._made: dict[int, _Output] = {}  # by memory
        self._replayed = Results([], [], [])

    def __enter__(self) -> Recorder:
        listeners.stack.append(self._on_label)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        listeners.stack.remove(self._on_label)

    def on_call(self, op: Any, args: Any, kwargs: Any) -> Any:
        _, kind, verdict, affects = self._entries.get(id(op)) or _add_entry(self._policy, op)
        if kind is _Kind.PASSES or is_unrecorded(self._depth):
            return op(*args, **kwargs)
        if kind is _Kind.SHARES:
            return self._see_views(op(*args, **kwargs))
        if kind is _Kind.CHANGES:
            self._protect(op, args, kwargs)
            return op(*args, **kwargs)
        if kind is _Kind.CASTS and self._is_of_cached_cast(args[0]):
            return op(*args, **kwargs)
        if (spec := call_spec(op, args, kwargs)) is None:
            return op(*args, **kwargs)
        call = len(self._calls)
        self._calls.append(spec)
        result = op(*args, **kwargs)
        left = OperatorEffects.by(op, args, kwargs, result) if affects else NO_EFFECTS
        if verdict is None:
            self._note(call, op, result, left)
            verdict = self._policy.verdict(Site(op, None, batch_dims(op)))
        self._save(verdict, call, op, result, left)
        return result

    def mark(self) -> None:
        """Records that autograd saves a tensor now."""
        self._marks.append(len(self._calls))

    def _save(self, verdict: Verdict, call: int, op: internals.OpOverload, result: Any, left: OperatorEffects) -> None:
        if isinstance(verdict, Recompute) or call in self._results:
            return
        tier = verdict.tier if isinstance(verdict, Move) else None
        saved = SavedResult(op, call, tier, result, left, self._alias)
        if saved.outputs:  # the result may be a number of Python
            self._results[call] = saved
            for output in saved.outputs:
                self._by_memory.setdefault(memory_of(output), []).append(saved)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor.detach()` with the same version counter; `detach` in a dispatch mode makes a new counter."""
        with torch._C._ForceDispatchKeyGuard(*self._keys):
            return tensor.detach()

    def _see_views(self, views: Any) -> Any:
        for view in [views] if isinstance(views, torch.Tensor) else views:
            for result in self._by_memory.get(memory_of(view), ()):
                result.add_alias(self._alias(view))
        return views

    def _note(self, call: int, op: internals.OpOverload, result: Any, left: OperatorEffects) -> None:
        """Records the layout of an operator's first output, which may get a label later."""
        several = isinstance(result, (tuple, list)) and len(result) > 0
        first, rest = (result[0], tuple(result[1:])) if several else (result, None)
        if isinstance(first, torch.Tensor) and first.layout is torch.strided:  # else no view has a label
            storage = first.untyped_storage()
            lives = weakref.ref(storage, partial(_forget, weakref.ref(self), storage._cdata))
            self._made[storage._cdata] = _Output(
                call, op, first.shape, first.stride(), first.storage_offset(), first.dtype, rest, left, lives
            )

    def _on_label(self, tensor: torch.Tensor, label: str) -> None:
        made = self._made.get(memory_of(tensor))
        if made is None or made.call in self._results or made.dtype != tensor.dtype:
            return
        verdict = self._policy.verdict(Site(made.op, label, batch_dims(made.op)))
        if not isinstance(verdict, Recompute):
            with unrecorded(), torch.no_grad():
                whole = tensor.detach().as_strided(made.size, made.stride, made.offset)
            result = whole if made.rest is None else (whole, *made.rest)
            self._save(verdict, made.call, made.op, result, made.left)

    def _protect(self, op: internals.OpOverload, args: Any, kwargs: Any) -> None:
        """Copies the saved results that `op` is about to change in place."""
        if not self._by_memory and not self._made:
            return
        for argument, value in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                self._protect_value(value)
        for argument in op._schema.arguments:
            if argument.is_write and argument.name in kwargs:
                self._protect_value(kwargs[argument.name])

    def _protect_value(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                memory = memory_of(tensor)
                self._made.pop(memory, None)  # a later label would name the changed value
                for result in self._by_memory.pop(memory, ()):
                    result.copy()

    def conclude(self, moved: Collection[torch.Generator]) -> None:
        """Seals the saved results after the run, through the saved-tensor hooks around the region.

        Args:
            moved: the generators that the region has drawn from. A recompute restores only these at its end. The state
                of any other generator (of attention without dropout) is dropped: a replayed result would set that
                generator back, and the program would draw the numbers of after the forward again after backward.
        """
        # A recompute stops at the last tensor that autograd saved, before all later calls.
        last = self._marks[-1] if self._marks else 0
        # A change that no operator made (by NumPy, in an autograd.Function with `mark_dirty`) shows in versions alone.
        results = [result for call, result in self._results.items() if call < last and not result.is_changed]
        for result in results:
            result.forget_unmoved(moved)
        self._by_memory.clear()
        self._made.clear()
        self._results.clear()
        seal_all(results, self._calls, self._runtime)
        self._replayed = Results(self._calls, results, self._marks)
        self._calls, self._marks = [], []

    def replayer(self, inputs: Iterable[torch.Tensor]) -> Replayer:
        """Returns the replayer of the saved results for a recompute with these inputs."""
        return Replayer(self._replayed, inputs)


def _forget(recorder: weakref.ref[Recorder], storage: int, _: object) -> None:
    """Drops the record of an operator's first output, whose storage was freed."""
    if (alive := recorder()) is not None:
        alive._made.pop(storage, None)


class Replayer(_Watch):
    """Returns saved results in place of running their calls."""

    def __init__(self, results: Results, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__(inputs)
        self._results = results
        self._ops = {id(op) for op in results.ops}
        self._seen: Counter[CallSpec] = Counter()
        self._sum = 0
        # Brought back before `on_call`: the recompute of the region around this one needs autograd, which is off inside
        # a dispatch mode.
        self._brought = {result: result.tensors() for result in results if result.is_by_recompute}

    def on_call(self, op: Any, args: Any, kwargs: Any) -> Any:
        results = self._results
        if id(op) not in self._ops or is_unrecorded(self._depth):
            return op(*args, **kwargs)
        if op.name() == _CAST and self._is_of_cached_cast(args[0]):
            return op(*args, **kwargs)
        spec = call_spec(op, args, kwargs)
        if spec is None or (saved := results.by_call.get(spec)) is None:
            return op(*args, **kwargs)
        number = self._seen[spec]
        self._seen[spec] += 1
        self._sum += results.weights[spec]
        result = saved.get(number)
        if result is None or result.is_changed:
            return op(*args, **kwargs)
        statistics = running_statistics(op, args, kwargs) if result.moves_statistics else []
        return result.again(self._brought.get(result) or result.tensors(), statistics)

    def check(self, index: int) -> None:
        """Checks the calls so far when autograd saves tensor `index` in the recompute.

        Raises:
            Misaligned: the recompute has made other calls than the run before this tensor.
        """
        if self._sum != self._results.expected[index]:
            raise Misaligned
