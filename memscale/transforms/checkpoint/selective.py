"""Policies that keep some values: outputs of chosen operators are recorded, and replayed instead of recomputed.

Both sides watch the operators of a region in the order they run. `Recorder` asks the policy about each and keeps
what it says; `Replayer` sees the same sequence during the recompute and answers from what was kept.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from memscale.core import internals
from memscale.policies import Policy, Recompute, Site, Verdict, batch_dims
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
from memscale.transforms.checkpoint.results import UNSAFE_VIEWS, Results
from memscale.transforms.labels import listeners


def is_view(op: internals.OpOverload) -> bool:
    """Whether `op` makes no memory of its own. `_unsafe_view`, at the end of every batched `@`, only denies it."""
    return op.is_view or op is torch.ops.aten._unsafe_view.default


class _Kind(enum.Enum):
    """What an operator does to memory."""

    VIEWS = enum.auto()
    CASTS = enum.auto()
    CHANGES = enum.auto()
    MAKES = enum.auto()


@cache  # a region asks at each operator, and asking PyTorch takes as long as a dispatch mode does
def _kind(op: internals.OpOverload) -> _Kind:
    if is_view(op):
        return _Kind.VIEWS
    if op is torch.ops.aten._to_copy.default:
        return _Kind.CASTS
    return _Kind.CHANGES if op._schema.is_mutable else _Kind.MAKES


@cache
def _said(policy: Policy) -> dict[internals.OpOverload, Verdict]:
    """What a policy that does not see labels has said of operators."""
    return {}


class _Output(NamedTuple):
    """Where in memory an operator put its first output; `rest` are the others (the log-sum-exp of attention, say).

    It is known for as long as that memory `lives`: then nobody can label it any more, and another tensor may be there.
    """

    position: int
    op: internals.OpOverload
    size: torch.Size
    stride: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    rest: tuple[Any, ...] | None  # `None` where the operator has one output
    lives: weakref.ref[torch.UntypedStorage]


class _Numbering(OperatorWatch):
    """Numbers the operators that a region runs."""

    def __init__(self, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.count = 0
        self._depth = unrecorded_depth()
        self._inputs = {id(tensor) for tensor in inputs}

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Views hold no memory of their own, and a run and its recompute differ in them: autograd detaches what it
        # saves, and hooks on a tensor view it when it is a leaf, as a recompute's inputs are.
        kind = _kind(func)
        is_view = kind is _Kind.VIEWS and func not in UNSAFE_VIEWS
        if is_view or is_unrecorded(self._depth) or (kind is _Kind.CASTS and self._is_of_cached_cast(args[0])):
            return func(*args, **kwargs)
        if func in UNSAFE_VIEWS:
            result = func(*args, **kwargs)
            self.on_unsafe_view(result)
            return result
        index = self.count
        self.count += 1
        return self.on_operator(index, kind, func, args, kwargs)

    def on_unsafe_view(self, result: Any) -> None:
        """Called with what such an operator gave."""

    def on_operator(self, index: int, kind: _Kind, op: internals.OpOverload, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def _is_of_cached_cast(self, source: torch.Tensor) -> bool:
        # Autocast casts a leaf once, then answers from a cache that a recompute finds in another state (and a
        # recompute's inputs are leaves, which those of the run need not be). Such a cast has nothing to save.
        return id(source) in self._inputs or (source.is_leaf and source.requires_grad) or is_stand_in(source)


class Recorder(_Numbering):
    """Keeps what `policy` saves while a region runs; `conclude` hands it to the hooks around the region."""

    def __init__(self, policy: Policy, runtime: Runtime | None, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__(inputs)
        self._policy = policy
        self._verdicts = None if policy.sees_labels else _said(policy)
        self.results = Results(runtime)
        self._made: dict[int, _Output] = {}
        self.needed = 0  # how many operators had run when autograd last saved a tensor

    def __enter__(self) -> Recorder:
        listeners.stack.append(self._on_label)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        listeners.stack.remove(self._on_label)

    def on_unsafe_view(self, result: Any) -> None:
        self.results.see(result)

    def on_operator(self, index: int, kind: _Kind, op: internals.OpOverload, args: Any, kwargs: Any) -> Any:
        if kind is _Kind.CHANGES:
            self._protect(op, args, kwargs)
            return op(*args, **kwargs)
        result = op(*args, **kwargs)
        if self._verdicts is None:
            self._note(index, op, result)
        self.results.keep_running(index, running_statistics(op, args, kwargs))
        verdict = None if self._verdicts is None else self._verdicts.get(op)
        if verdict is None:
            verdict = self._policy.verdict(Site(op, None, batch_dims(op)))
            if self._verdicts is not None:
                self._verdicts[op] = verdict
        if not isinstance(verdict, Recompute):
            self.results.follow(verdict, index, op, result)
        return result

    def _note(self, index: int, op: internals.OpOverload, result: Any) -> None:
        """Remember where an operator put its first output, which may be given a label later."""
        several = isinstance(result, (tuple, list)) and len(result) > 0
        first, rest = (result[0], tuple(result[1:])) if several else (result, None)
        if isinstance(first, torch.Tensor) and first.layout is torch.strided:  # no view of others can be labelled
            storage = first.untyped_storage()
            lives = weakref.ref(storage, partial(_forget, weakref.ref(self), storage._cdata))
            self._made[storage._cdata] = _Output(
                index, op, first.shape, first.stride(), first.storage_offset(), first.dtype, rest, lives
            )

    def _on_label(self, tensor: torch.Tensor, label: str) -> None:
        made = self._made.get(memory_of(tensor))
        if made is None or made.position in self.results or made.dtype != tensor.dtype:
            return
        verdict = self._policy.verdict(Site(made.op, label, batch_dims(made.op)))
        if not isinstance(verdict, Recompute):
            with unrecorded(), torch.no_grad():
                whole = tensor.detach().as_strided(made.size, made.stride, made.offset)
            self.results.follow(verdict, made.position, made.op, whole if made.rest is None else (whole, *made.rest))

    def _protect(self, op: internals.OpOverload, args: Any, kwargs: Any) -> None:
        """Copy kept values that `op` is about to change in place."""
        for argument, value in zip(op._schema.arguments, args, strict=False):
            if argument.is_write:
                self._protect_value(value)
        for argument in op._schema.arguments:
            if argument.is_write and argument.name in kwargs:
                self._protect_value(kwargs[argument.name])

    def _protect_value(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(tensor, torch.Tensor):
                storage = memory_of(tensor)
                self._made.pop(storage, None)  # a later label would name the changed value
                self.results.protect(storage)

    def conclude(self, moved: Collection[torch.Generator]) -> bool:
        """After the run. Whether the region left alone what is kept, so that nobody need look at what changes it."""
        left_alone = not self.results.changed_later
        self.results.conclude(self.needed, moved)
        self._made.clear()
        return left_alone

    def replayer(self, inputs: Iterable[torch.Tensor]) -> Replayer:
        """What answers in a recompute with these inputs."""
        return Replayer(self.results, inputs)


def _forget(recorder: weakref.ref[Recorder], storage: int, _: object) -> None:
    """Memory that an operator's first output was in is gone."""
    if (alive := recorder()) is not None:
        alive._made.pop(storage, None)


class Replayer(_Numbering):
    """Answers from `results` for the operators that were kept, and runs the others."""

    def __init__(self, results: Results, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__(inputs)
        self._results = results
        # Not when they are asked for: the other region's recompute needs autograd, which is off inside a dispatch mode.
        self._recomputed = results.recomputed()

    def on_operator(self, index: int, kind: _Kind, op: internals.OpOverload, args: Any, kwargs: Any) -> Any:
        answer = self._results.replay(index, op, self._recomputed)
        if answer is None:
            return op(*args, **kwargs)
        self._results.move_running(index, running_statistics(op, args, kwargs))
        return answer
