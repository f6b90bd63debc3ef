"""Policies that keep a few operators by name, in regions that do not change what they made: without a dispatch mode.

A policy of contractions keeps four to six outputs of a block, which runs sixty operators and views. Here only those
operators are seen. What changes a kept output in place is not, so that the first run of a region is recorded as
`selective` does, and an output that was changed after all is computed again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any

import torch

from memscale.core import internals, pytrees
from memscale.policies import BATCH_DIMS, BY_BATCH_DIMS, Policy, Recompute, Site
from memscale.regions import ChosenWatch, can_choose, functorch_state
from memscale.runtime import Runtime
from memscale.transforms.checkpoint.results import UNSAFE_VIEWS, Results


@cache
def chosen(policy: Policy) -> frozenset[internals.OpOverload]:
    """The operators whose outputs `policy` keeps, if they are all that it needs to see; none otherwise."""
    if type(policy) not in BY_BATCH_DIMS:
        return frozenset()
    verdicts = {op: policy.verdict(Site(op, None, dims)) for op, dims in _contractions()}
    ops = frozenset(op for op, verdict in verdicts.items() if not isinstance(verdict, Recompute))
    return ops if can_choose(ops | UNSAFE_VIEWS) else frozenset()


def _contractions() -> Iterator[tuple[internals.OpOverload, int]]:
    for name, dims in BATCH_DIMS.items():
        packet = getattr(torch.ops.aten, name.removeprefix("aten::"), None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if not op._schema.is_mutable:
                yield op, dims


class ChosenRecorder(ChosenWatch):
    """Keeps the outputs of `ops` while a region runs."""

    def __init__(self, ops: frozenset[internals.OpOverload], runtime: Runtime | None) -> None:
        super().__init__(ops | UNSAFE_VIEWS)
        self._kept_ops = ops
        self.results = Results(runtime)
        self.count = 0
        self.needed = 0  # how many operators had run when autograd last saved a tensor
        self._begun = 0
        self._lost = False

    def before(self, op: internals.OpOverload) -> Any:
        # Not afterwards: another region's recompute within this run ends in an operator that never returns, and the
        # replay must count it before it can know.
        self._begun += op not in UNSAFE_VIEWS
        return None

    def after(self, op: internals.OpOverload, result: Any) -> None:
        if op in UNSAFE_VIEWS:
            self.results.see(result)
            return
        self.count = self._begun
        # What `torch.func` makes of it later has a version of its own. And a subclass that runs operators itself, as a
        # DTensor does, comes before the key that answers: what would be answered to is its call for its part.
        if functorch_state.active() or (type(result) is not torch.Tensor and _is_of_subclasses(result)):
            self._lost = True
        else:
            self.results.keep(self._begun - 1, op, result)

    def conclude(self, moved: Collection[torch.Generator]) -> bool:
        """After the run. Whether it kept what the policy says."""
        lost = self.results.drop_changed() or self._lost
        if lost:
            self.lose()
        self.results.conclude(self.needed, moved)
        return not lost

    def replayer(self, inputs: object) -> ChosenReplayer:
        """What answers in a recompute."""
        return ChosenReplayer(self._kept_ops, self.results)


def _is_of_subclasses(result: Any) -> bool:
    kinds: Iterator[Any] = map(type, pytrees.tensors(result))
    return any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in kinds)


class ChosenReplayer(ChosenWatch):
    """Answers from `results` for the operators that were kept, and runs the others."""

    def __init__(self, ops: Collection[internals.OpOverload], results: Results) -> None:
        super().__init__(ops)
        self._results = results
        self._count = 0
        self._recomputed = results.recomputed()  # which needs autograd

    def before(self, op: internals.OpOverload) -> Any:
        index = self._count
        self._count += 1
        return self._results.replay(index, op, self._recomputed)
