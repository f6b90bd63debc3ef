"""Results of operators that a policy saves in a region's run, to stand in for these operators in a recompute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from memscale.core import internals, pytrees, version
from memscale.regions import hooks_around, recomputes, running_statistics, unrecorded
from memscale.runtime import Hooks, Runtime, hooks_here
from memscale.transforms.checkpoint.saved import SavedTensors

#: An operator and what it is given: of tensors the shape, the dtype and `requires_grad`.
CallSpec = tuple[Any, ...]


def call_spec(op: internals.OpOverload, args: Any, kwargs: Any) -> CallSpec | None:
    """What tells a call of `op` from other calls; `None` for one on tensors that need no gradient.

    Such calls are not saved: they make tables that code keeps for the next time, so that a run and its recompute differ
    in them, and a table must never be made of another call's result.
    """
    spec: list[Any] = [op, torch.is_grad_enabled()]
    needs_gradient = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor):
                needs_gradient |= each.requires_grad
                spec += _size(each), each.dtype, each.requires_grad
            elif type(each) in _NUMBERS:
                spec.append(each)
    return tuple(spec) if needs_gradient else None


_NUMBERS = (bool, int, float, complex, str)


def _size(tensor: torch.Tensor) -> Any:
    if tensor.is_nested and tensor.layout is torch.strided:  # each of its parts has a shape of its own
        return tensor.dim()
    return tensor.shape


class Left(NamedTuple):
    """What a call of an operator left beside its result.

    Attributes:
        statistics: the running statistics that it moved, as they were then.
        random: the generators that it drew from, with their states then.
    """

    statistics: list[torch.Tensor]
    random: list[tuple[torch.Generator, torch.Tensor]]

    @classmethod
    def by(cls, op: internals.OpOverload, args: Any, kwargs: Any, result: Any) -> Left:
        """What the call of `op` that has just been made left."""
        statistics = [each.clone() for each in running_statistics(op, args, kwargs)]
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return cls(statistics, [])
        generators = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
        if not generators:
            indices = {tensor.device.index for tensor in pytrees.tensors(result) if tensor.is_cuda}
            generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in indices)]
        return cls(statistics, [(each, each.get_state()) for each in generators])


NOTHING_LEFT = Left([], [])


def may_leave(op: internals.OpOverload) -> bool:
    """Whether a call of `op` may leave something beside its result."""
    names = [argument.name for argument in op._schema.arguments]
    return "running_mean" in names or torch.Tag.nondeterministic_seeded in op.tags


class Result:
    """What one call of an operator gave.

    Attributes:
        op: the operator.
        call: the number of the call among the recorded ones.
        tier: where the outputs wait for backward; `None` means on their device.
        outputs: the tensors in it, until they are sealed.
    """

    __slots__ = ("_aliases", "_constants", "_is_copied", "_left", "_saved", "call", "op", "outputs", "tier")

    def __init__(
        self,
        op: internals.OpOverload,
        call: int,
        tier: str | None,
        result: Any,
        left: Left,
        alias: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.op = op
        self.call = call
        self.tier = tier
        # Some kernels return sizes and seeds beside tensors. A single output is None here.
        is_single = not isinstance(result, (tuple, list))
        self._constants = None if is_single else [None if isinstance(o, torch.Tensor) else (o,) for o in result]
        tensors = [each for each in ([result] if is_single else result) if isinstance(each, torch.Tensor)]
        self.outputs: list[torch.Tensor] = [alias(output) for output in tensors]
        self._aliases = [(output, version(output)) for output in self.outputs]
        self._is_copied = False
        self._left = left
        self._saved: SavedTensors | None = None

    def add_alias(self, alias: torch.Tensor) -> None:
        """Watch the version of `alias`, which lies in the memory of an output and counts versions of its own."""
        if not self._is_copied:
            self._aliases.append((alias, version(alias)))

    def copy(self) -> None:
        """Keep a copy, since an operator is about to change an output in place."""
        if not self._is_copied:
            self._is_copied = True
            self.outputs = [output.clone() for output in self.outputs]
            self._aliases = []

    def forget_unmoved(self, moved: Collection[torch.Generator]) -> int:
        """Forget the states of generators other than `moved`. Returns how many are left."""
        random = [(generator, state) for generator, state in self._left.random if generator in moved]
        self._left = self._left._replace(random=random)
        return len(random)

    def seal(self, hooks: Hooks | None) -> None:
        """After the run: hold the outputs as saved tensors, by `hooks` or by those around the region."""
        versions = [tensor._version for tensor in self.outputs]
        outputs, self.outputs = self.outputs, []
        self._saved = SavedTensors(outputs, (hooks.pack, hooks.unpack) if hooks is not None else hooks_around())
        self._saved.seal(versions)
        if self._saved.through_hooks:  # which let go of the memory, unless something else holds it
            self._aliases = []
        self._aliases = [(alias, version(alias)) for alias, _ in self._aliases]

    @property
    def is_by_recompute(self) -> bool:
        """Whether a recompute of the region around this one brings the outputs back."""
        return self._saved is not None and self._saved.by_recompute

    def tensors(self) -> list[torch.Tensor]:
        """The outputs, brought back."""
        assert self._saved is not None
        return self._saved.tensors()

    @property
    def is_changed(self) -> bool:
        """Whether somebody changed an output in place since the run, to whom it was returned."""
        return any(version(alias) != then for alias, then in self._aliases)

    @property
    def moves_statistics(self) -> bool:
        """Whether the operator moved running statistics."""
        return bool(self._left.statistics)

    def again(self, outputs: list[torch.Tensor], statistics: list[torch.Tensor]) -> Any:
        """The result once more, with these outputs; running statistics and random generators are as they were then."""
        for generator, state in self._left.random:
            generator.set_state(state)
        for each, then in zip(statistics, self._left.statistics, strict=False):
            each.data.copy_(then)  # an operator that moves them counts no versions
        # Autograd makes what it is given part of the recompute's graph, and a region may change it in place.
        copy = torch.Tensor.clone if self._is_copied else torch.Tensor.detach
        remaining = iter([copy(output) for output in outputs])
        if self._constants is None:
            return next(remaining)
        return tuple(next(remaining) if constant is None else constant[0] for constant in self._constants)


class Results:
    """The saved results of one run of a region, by the calls that they stand in for.

    Calls are told apart by what they are and by how many such calls came before: a call that only the run makes, or
    only the recompute (to fill a cache, say), does not shift calls of another kind. `expected` tells whether it shifted
    those of its own kind.

    Attributes:
        by_call: for each kind of call with saved results, these, by how many such calls came before.
        weights: a number for each of these kinds; a sum of them says how many calls there were of each.
        expected: for each tensor that autograd saved, that sum of the calls before it.
    """

    def __init__(self, calls: list[CallSpec], results: Collection[Result], marks: list[int]) -> None:
        """Index the results.

        Args:
            calls: the recorded calls of the run, in order.
            results: what was saved of them.
            marks: for each tensor that autograd saved, how many recorded calls came before.
        """
        by_number = {result.call: result for result in results}
        self.by_call: dict[CallSpec, dict[int, Result]] = {calls[number]: {} for number in by_number}
        self.weights = {spec: 1 << (32 * at) for at, spec in enumerate(self.by_call)}
        seen: Counter[CallSpec] = Counter()
        sums = [0]
        for number, spec in enumerate(calls):
            if spec in self.by_call:
                if number in by_number:
                    self.by_call[spec][seen[spec]] = by_number[number]
                seen[spec] += 1
            sums.append(sums[-1] + self.weights.get(spec, 0))
        self.expected = [sums[mark] for mark in marks]
        self.ops = frozenset(result.op for result in results)

    def __iter__(self) -> Iterator[Result]:
        for results in self.by_call.values():
            yield from results.values()


def seal_all(results: list[Result], calls: list[CallSpec], runtime: Runtime | None) -> None:
    """Hold the outputs of all `results` as saved tensors."""
    around = hooks_around()
    if results and around is not None and recomputes(around[1]):
        # A recompute around this region matches saved tensors by position. It compares their shapes, so one of a shape
        # that stands for the calls lets it notice that others are saved.
        with unrecorded():
            around[0](torch.empty(0, hash(tuple(calls[result.call] for result in results)) & 0x7FFFFFFF))
    tiers = {result.tier for result in results if result.tier is not None}
    moving = {tier: hooks_here(runtime, tier, 0) for tier in tiers}
    for result in results:
        result.seal(None if result.tier is None else moving[result.tier])
    for hooks in moving.values():
        if hooks is not None:
            hooks.leave()
