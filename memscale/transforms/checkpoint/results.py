"""What a policy keeps of a region's run: outputs of operators, by the numbers of these, to be replayed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from memscale.core import CorrectnessError, internals, version
from memscale.policies import Move, Recompute, Save, Verdict
from memscale.regions import counted_states, memory_of
from memscale.runtime import Hooks, Runtime, hooks_here
from memscale.transforms.checkpoint.kept_tensors import Kept

# They are given memory without its version, so that what is changed in them is not seen in what they are views of.
UNSAFE_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)


class Results:
    """Outputs that a recorder numbers and keeps while a region runs; `conclude` hands them to the hooks around it.

    Attributes:
        ops: the operators whose outputs are kept, by number.
        changed_later: those of which an output was changed in place, after a copy was taken.
        random_after: where random generators that the region moved were after an operator that draws.
    """

    def __init__(self, runtime: Runtime | None) -> None:
        self._runtime = runtime
        self._tiers: dict[int, str] = {}  # of the operators whose outputs move
        self._outputs: dict[int, list[torch.Tensor]] = {}
        self._aliases: dict[int, list[tuple[torch.Tensor, int]]] = {}  # of outputs, each with its version
        self._forms: dict[int, list[tuple[Any] | None] | None] = {}
        self._kept: dict[int, Kept] = {}
        self.ops: dict[int, internals.OpOverload] = {}
        self.changed_later: set[int] = set()
        self.random_after: dict[int, list[tuple[torch.Generator, torch.Tensor]]] = {}
        self._running: dict[int, list[torch.Tensor]] = {}  # statistics as they were after an operator that moves them
        self._counted: list[torch.Tensor] = []
        self._keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()

    def __contains__(self, index: int) -> bool:
        return index in self._outputs

    def follow(self, verdict: Verdict, index: int, op: internals.OpOverload, result: Any) -> None:
        """Do what a policy said of the `result` of operator `index`."""
        match verdict:
            case Save():
                self.keep(index, op, result)
            case Move(tier):
                self._tiers[index] = tier
                self.keep(index, op, result)
            case Recompute():
                pass

    def keep(self, index: int, op: internals.OpOverload, result: Any) -> None:
        """Keep the `result` of operator `index`."""
        # Of one output, which is a number of Python where a tensor is asked for its only one.
        single = not isinstance(result, (tuple, list))
        outputs = [result] if single else list(result)
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        if not tensors:
            return
        self.ops[index] = op
        # Where the tensors go among the outputs: some kernels return sizes and seeds beside them.
        self._forms[index] = None if single else [None if isinstance(o, torch.Tensor) else (o,) for o in outputs]
        self._outputs[index] = [self._alias(output) for output in tensors]
        self._aliases[index] = [(output, version(output)) for output in self._outputs[index]]
        if torch.Tag.nondeterministic_seeded in op.tags:
            # Replaying draws no numbers, so the generators must jump to where drawing them left off.
            generators = [torch.default_generator]
            if tensors[0].is_cuda:
                generators.append(torch.cuda.default_generators[tensors[0].device.index])
            states = [generator.get_state() for generator in generators]
            self.random_after[index] = list(zip(generators, states, strict=True))
            self._counted += counted_states(states)

    def keep_running(self, index: int, statistics: list[torch.Tensor]) -> None:
        """Keep what operator `index` has made of running statistics, for one that is kept is not run again, and a later
        one may read them."""
        if statistics:
            self._running[index] = [each.clone() for each in statistics]

    def move_running(self, index: int, statistics: list[torch.Tensor]) -> None:
        """Do to running statistics what operator `index` would do, which counts no versions."""
        for each, then in zip(statistics, self._running.get(index, ()), strict=False):
            each.data.copy_(then)

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` without its graph, of the same version: an alias made inside a dispatch mode has one of its own."""
        with torch._C._ForceDispatchKeyGuard(*self._keys):
            return tensor.detach()

    def see(self, result: Any) -> None:
        """Told of tensors that may lie in the memory of kept ones, and have versions of their own."""
        for tensor in [result] if isinstance(result, torch.Tensor) else result:
            storage = memory_of(tensor)
            for index, outputs in self._outputs.items():
                if index in self._aliases and any(memory_of(output) == storage for output in outputs):
                    self._aliases[index].append((self._alias(tensor), version(tensor)))

    def protect(self, storage: int) -> None:
        """Copy kept values in a storage that is about to be changed in place."""
        for index, outputs in self._outputs.items():
            for position, output in enumerate(outputs):
                if memory_of(output) == storage and index not in self.changed_later:
                    outputs[position] = output.clone()
                    self.changed_later.add(index)
                    self._aliases.pop(index, None)

    def drop_changed(self) -> bool:
        """Let go of outputs that were changed in place unseen, and say whether there were some.

        A recompute makes them again.
        """
        changed = [index for index in self._outputs if self._is_changed(index)]
        self._drop(changed)
        return bool(changed)

    def _drop(self, indices: list[int]) -> None:
        for index in indices:
            del self._outputs[index], self.ops[index]
            self._aliases.pop(index, None)

    def _is_changed(self, index: int) -> bool:
        return any(version(alias) != then for alias, then in self._aliases.get(index, ()))

    def conclude(self, needed: int, moved: Collection[torch.Generator]) -> None:
        """After the run: hand what is kept to the hooks around the region.

        Args:
            needed: how many operators had run when autograd last saved a tensor.
            moved: the generators that the region has drawn from. A recompute takes them back, and at its end to where
                it found them; others, those of attention without dropout, would stay where a replay had set them, and
                what was drawn after the forward would be drawn again after backward.
        """
        for index, states in self.random_after.items():
            self.random_after[index] = [(generator, state) for generator, state in states if generator in moved]
        del self._counted[sum(map(len, self.random_after.values())) :]
        # A recompute stops at the last tensor that autograd saved, so what came after it is never asked for.
        self._drop([index for index in self._outputs if index >= needed])
        self._running = {index: each for index, each in self._running.items() if index in self._outputs}
        moving = {tier: hooks_here(self._runtime, tier, 0) for tier in set(self._tiers.values())}
        for index in list(self._outputs):
            # No name here for the outputs: they move only if nobody but `Kept` holds them.
            self._kept[index] = kept = _sealed(self._outputs.pop(index), moving.get(self._tiers.get(index, "")))
            if kept.through_hooks:  # which let go of the memory, unless something else holds it
                self._aliases.pop(index, None)
            else:
                self._aliases[index] = [(alias, version(alias)) for alias, _ in self._aliases.get(index, ())]
        for hooks in moving.values():
            if hooks is not None:
                hooks.leave()

    def recomputed(self) -> dict[int, list[torch.Tensor]]:
        """By operator, the tensors that a recompute of the region around this one brings back, all at once."""
        return {index: kept.tensors() for index, kept in self._kept.items() if kept.by_recompute}

    def replay(self, index: int, op: internals.OpOverload, recomputed: dict[int, list[torch.Tensor]]) -> Any:
        """The recorded result of operator `index`, which is `op` in the recompute; `None` if it is to be computed.

        Raises:
            CorrectnessError: it was another operator in the run.
        """
        kept = self._kept.get(index)
        if kept is None or self._is_changed(index):  # since the region has run, by whoever it was returned to
            return None
        if self.ops[index] is not op:
            raise CorrectnessError(
                f"the recompute differs from the run: operator {index} was {self.ops[index]} and is now {op}. A "
                "checkpointed region must do the same at every run with the same inputs"
            )
        for generator, state in self.random_after.get(index, ()):
            generator.set_state(state)
        # Never the kept tensor itself: autograd will make it part of the recompute's graph, or change it in place.
        copy = torch.Tensor.clone if index in self.changed_later else torch.Tensor.detach
        remaining = iter([copy(output) for output in recomputed.get(index) or kept.tensors()])
        form = self._forms[index]
        if form is None:
            return next(remaining)
        return tuple(next(remaining) if constant is None else constant[0] for constant in form)


def _sealed(outputs: list[torch.Tensor], hooks: Hooks | None) -> Kept:
    versions = [tensor._version for tensor in outputs]
    kept = Kept(outputs, hooks and (hooks.pack, hooks.unpack))
    kept.seal(versions)
    return kept
