"""Policies that keep some values: outputs of chosen operators are recorded, and replayed instead of recomputed.

Both sides watch the operators of a region in the order they run. `Recorder` asks the policy about each and keeps
what it says; `Replayer` sees the same sequence during the recompute and answers from what was kept.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from memscale.core import CorrectnessError, internals
from memscale.policies import Move, Policy, Recompute, Save, Site, Verdict, batch_dims
from memscale.regions import OperatorWatch, counted_states, is_stand_in, is_unrecorded, unrecorded
from memscale.runtime import Hooks, Runtime, hooks_here
from memscale.transforms.checkpoint.kept_tensors import Kept
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
        self._inputs = {id(tensor) for tensor in inputs}

    def on_call(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Views hold no memory of their own, and a run and its recompute differ in them: autograd detaches what it
        # saves, and hooks on a tensor view it when it is a leaf, as a recompute's inputs are.
        kind = _kind(func)
        if kind is _Kind.VIEWS or is_unrecorded() or (kind is _Kind.CASTS and self._is_of_cached_cast(args[0])):
            return func(*args, **kwargs)
        index = self.count
        self.count += 1
        return self.on_operator(index, kind, func, args, kwargs)

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
        self._runtime = runtime
        self._tiers: dict[int, str] = {}  # of the operators whose outputs move
        self._outputs: dict[int, list[torch.Tensor]] = {}
        self._forms: dict[int, list[tuple[Any] | None] | None] = {}
        self._made: dict[int, _Output] = {}
        self._kept: dict[int, Kept] = {}
        self.ops: dict[int, internals.OpOverload] = {}
        self.needed = 0  # how many operators had run when autograd last saved a tensor
        self.changed_later: set[int] = set()
        self.random_after: dict[int, list[tuple[torch.Generator, torch.Tensor]]] = {}
        self._counted: list[torch.Tensor] = []

    def __enter__(self) -> Recorder:
        listeners.stack.append(self._on_label)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        listeners.stack.remove(self._on_label)

    def on_operator(self, index: int, kind: _Kind, op: internals.OpOverload, args: Any, kwargs: Any) -> Any:
        if kind is _Kind.CHANGES:
            self._protect(op, args, kwargs)
            return op(*args, **kwargs)
        result = op(*args, **kwargs)
        if self._verdicts is None:
            self._note(index, op, result)
        verdict = None if self._verdicts is None else self._verdicts.get(op)
        if verdict is None:
            verdict = self._policy.verdict(Site(op, None, batch_dims(op)))
            if self._verdicts is not None:
                self._verdicts[op] = verdict
        if not isinstance(verdict, Recompute):
            self._follow(verdict, index, op, result)
        return result

    def _note(self, index: int, op: internals.OpOverload, result: Any) -> None:
        """Remember where an operator put its first output, which may be given a label later."""
        several = isinstance(result, (tuple, list)) and len(result) > 0
        first, rest = (result[0], tuple(result[1:])) if several else (result, None)
        if isinstance(first, torch.Tensor):
            storage = first.untyped_storage()
            lives = weakref.ref(storage, partial(_forget, weakref.ref(self), storage._cdata))
            self._made[storage._cdata] = _Output(
                index, op, first.shape, first.stride(), first.storage_offset(), first.dtype, rest, lives
            )

    def _follow(self, verdict: Verdict, index: int, op: internals.OpOverload, result: Any) -> None:
        match verdict:
            case Save():
                self._keep(index, op, result)
            case Move(tier):
                self._tiers[index] = tier
                self._keep(index, op, result)
            case Recompute():
                pass

    def _keep(self, index: int, op: internals.OpOverload, result: Any) -> None:
        single = isinstance(result, torch.Tensor)
        outputs = [result] if single else list(result)
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        if not tensors:
            return
        self.ops[index] = op
        # Where the tensors go among the outputs: some kernels return sizes and seeds beside them.
        self._forms[index] = None if single else [None if isinstance(o, torch.Tensor) else (o,) for o in outputs]
        self._outputs[index] = [output.detach() for output in tensors]
        if torch.Tag.nondeterministic_seeded in op.tags:
            # Replaying draws no numbers, so the generators must jump to where drawing them left off.
            generators = [torch.default_generator]
            if tensors[0].is_cuda:
                generators.append(torch.cuda.default_generators[tensors[0].device.index])
            states = [generator.get_state() for generator in generators]
            self.random_after[index] = list(zip(generators, states, strict=True))
            self._counted += counted_states(states)

    def _on_label(self, tensor: torch.Tensor, label: str) -> None:
        made = self._made.get(tensor.untyped_storage()._cdata)
        if made is None or made.position in self._outputs or made.dtype != tensor.dtype:
            return
        verdict = self._policy.verdict(Site(made.op, label, batch_dims(made.op)))
        if not isinstance(verdict, Recompute):
            with unrecorded(), torch.no_grad():
                whole = tensor.detach().as_strided(made.size, made.stride, made.offset)
            self._follow(verdict, made.position, made.op, whole if made.rest is None else (whole, *made.rest))

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
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()._cdata
            self._made.pop(storage, None)  # a later label would name the changed value
            for index, outputs in self._outputs.items():
                for position, output in enumerate(outputs):
                    if output.untyped_storage()._cdata == storage and index not in self.changed_later:
                        outputs[position] = output.clone()
                        self.changed_later.add(index)

    def conclude(self) -> None:
        """After the run: hand what is kept to the hooks around the region."""
        # A recompute stops at the last tensor that autograd saved, so what came after it is never asked for.
        for index in [index for index in self._outputs if index >= self.needed]:
            del self._outputs[index], self.ops[index]
        moving = {tier: hooks_here(self._runtime, tier, 0) for tier in set(self._tiers.values())}
        for index in list(self._outputs):
            # No name here for the outputs: they move only if nobody but `Kept` holds them.
            self._kept[index] = _sealed(self._outputs.pop(index), moving.get(self._tiers.get(index, "")))
        self._made.clear()
        for hooks in moving.values():
            if hooks is not None:
                hooks.leave()

    def recomputed(self) -> dict[int, list[torch.Tensor]]:
        """By operator, the tensors that a recompute of the region around this one brings back, all at once."""
        return {index: self.outputs(index) for index, kept in self._kept.items() if kept.by_recompute}

    def outputs(self, index: int) -> list[torch.Tensor]:
        """The kept tensors of operator `index`."""
        kept = self._kept[index]
        return [kept.tensor(place, f"the saved output of {self.ops[index]}") for place in range(len(kept))]

    def replay(self, index: int, outputs: list[torch.Tensor]) -> Any:
        """The recorded result of operator `index`, of which `outputs` are the tensors."""
        # Never the kept tensor itself: autograd will make it part of the recompute's graph, or change it in place.
        copy = torch.Tensor.clone if index in self.changed_later else torch.Tensor.detach
        remaining = iter([copy(output) for output in outputs])
        form = self._forms[index]
        if form is None:
            return next(remaining)
        return tuple(next(remaining) if constant is None else constant[0] for constant in form)


def _sealed(outputs: list[torch.Tensor], hooks: Hooks | None) -> Kept:
    versions = [tensor._version for tensor in outputs]
    kept = Kept(outputs, hooks and (hooks.pack, hooks.unpack))
    kept.seal(versions)
    return kept


def _forget(recorder: weakref.ref[Recorder], storage: int, _: object) -> None:
    """Memory that an operator's first output was in is gone."""
    if (alive := recorder()) is not None:
        alive._made.pop(storage, None)


class Replayer(_Numbering):
    """Answers from `recorder` for the operators that were kept, and runs the others."""

    def __init__(self, recorder: Recorder, inputs: Iterable[torch.Tensor]) -> None:
        super().__init__(inputs)
        self._recorder = recorder
        # Not when they are asked for: the other region's recompute needs autograd, which is off inside a dispatch mode.
        self._recomputed = recorder.recomputed()

    def on_operator(self, index: int, kind: _Kind, op: internals.OpOverload, args: Any, kwargs: Any) -> Any:
        recorder = self._recorder
        kept = recorder.ops.get(index)
        if kept is None:
            return op(*args, **kwargs)
        if kept is not op:
            raise CorrectnessError(
                f"the recompute differs from the run: operator {index} was {kept} and is now {op}. A checkpointed "
                "region must do the same at every run with the same inputs"
            )
        for generator, state in recorder.random_after.get(index, ()):
            generator.set_state(state)
        return recorder.replay(index, self._recomputed.get(index) or recorder.outputs(index))
