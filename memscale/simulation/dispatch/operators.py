"""The facts about an operator that hold for all calls (`Operator`), and one call of an operator (`Call`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from memscale.simulation.dispatch.trace_builder import StorageRecord
from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.kernels.shapes import Kind, kind_of, written_arguments
from memscale.simulation.process.draws import drawing_from
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.rules.rule import OpRule

aten = torch.ops.aten

# The namespaces of collectives that return new tensors, as DTensors call them.
_FUNCTIONAL = frozenset({"_c10d_functional", "c10d_functional"})


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """An operator on the simulated device.

    Attributes:
        op: the operator.
        name: ``"aten::mm"``.
        kind: how the operator is simulated.
        rule: the facts beyond its schema.
        loose: whether the layout of its results does not depend on the values of floats.
        chooses: whether its integer results decide the model's next operations.
        draws: whether it advances a random generator.
        leaves: whether the memory of its results stays uninitialised.
        sends: whether it is a collective between processes, without work on the device.
        composed: the dispatch key of the kernel that composes it of other operators; None for a single kernel.
        written: the arguments that the operator writes to.
        order: the order in which its kernel allocates results, if it differs from the order of return.
        on_host: the results that are on the CPU beside the device.
        effects: the effects of its calls, by signature.
    """

    op: OpOverload
    name: str
    kind: Kind
    rule: OpRule
    loose: bool
    chooses: bool
    draws: bool
    leaves: bool
    sends: bool
    composed: DispatchKey | None
    written: tuple[tuple[int, str], ...]
    order: tuple[int, ...]
    on_host: tuple[int, ...]
    drawing: Callable[..., Any] | None
    effects: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, op: OpOverload, kernels: Kernels) -> Operator:
        """Returns the facts about `op` on the device of `kernels`."""
        schema, name, rule = op._schema, op._opname, rule_of(op)
        kind = kind_of(op)
        reads_nothing = not any("Tensor" in str(value.type) for value in schema.returns) and rule.values != "reads"
        if reads_nothing and kind is Kind.MAKE and not schema.is_mutable:
            kind = Kind.RUN  # asks about tensors (sizes, devices, assertions), and reads no values
        return cls(
            op=op,
            name=op.name(),
            kind=kind,
            rule=rule,
            loose=kind is Kind.IN_PLACE or torch.Tag.pointwise in op.tags,
            chooses=rule.values == "choice" and not schema.is_mutable,
            draws=torch.Tag.nondeterministic_seeded in op.tags,
            leaves=name.removeprefix("new_").startswith("empty"),
            sends=op.namespace in _FUNCTIONAL and any(each.name == "group_name" for each in schema.arguments),
            composed=composition(op) if kernels.device_type in rule.composed_on else None,
            written=written_arguments(op),
            order=() if kernels.card is None else rule.order,
            on_host=() if kernels.card is None else rule.on_host,
            drawing=drawing_from(op) if torch.Tag.nondeterministic_seeded in op.tags else None,
        )


def composition(op: OpOverload, *before: DispatchKey) -> DispatchKey:
    """Returns the key of the kernel that composes `op` of others, the first in `before`; None if it has none."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = *before, DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeExplicitAutogradNonFunctional
    return next(key for key in keys if has_kernel(op.name(), key.name))


class Call(NamedTuple):
    """A call of an operator: its arguments, the tensors among them, and the records of these tensors' storages.

    ``known`` says whether the results follow from few values, all of which are known now.
    """

    operator: Operator
    args: Any
    kwargs: Any
    tensors: list[torch.Tensor]
    records: list[StorageRecord]
    known: bool
