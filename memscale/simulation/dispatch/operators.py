"""What the simulation knows of an operator, whatever it is called with, and one call of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload

from memscale.simulation.kernels.kernels import Kernels
from memscale.simulation.kernels.shapes import Kind, kind_of, written_arguments
from memscale.simulation.ledger import StorageRecord
from memscale.simulation.rules.registry import rule_of
from memscale.simulation.sandbox.draws import drawing_from

aten = torch.ops.aten

# The namespaces of collectives that return new tensors, as DTensors call them.
_FUNCTIONAL = frozenset({"_c10d_functional", "c10d_functional"})


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """An operator on the device that is simulated.

    Attributes:
        op: the operator.
        name: ``"aten::mm"``.
        kind: how it is treated.
        deciding: how many of its first arguments decide what a call does; None is all of them.
        loose: whether the layout of its results does not depend on the values of floats.
        reads: whether it gives a value to Python.
        goes_by_lengths: whether its shapes follow from lengths.
        is_constant: whether the values of its results depend on the shape of its argument only.
        chooses: whether its integer results decide what a model does next.
        draws: whether it moves a random generator.
        leaves: whether the memory of its results is left as it was.
        sends: whether it is a collective between processes, which the device has no work with.
        composed: the key of what composes it of others, each of which is asked about; None if it is one kernel.
        sums: whether PyTorch adds in place with it where no mode is active.
        written: the arguments that it writes to.
        order: that in which its kernel takes its results, where it is not that in which it returns them.
        on_host: which of its results lie on the CPU beside the device.
        view: the method of tensors that is this operator, which takes a quarter of the time of calling it by its name.
        effects: what is known of its calls, by their signature.
    """

    op: OpOverload
    name: str
    kind: Kind
    deciding: int | None
    loose: bool
    reads: bool
    goes_by_lengths: bool
    is_constant: bool
    chooses: bool
    draws: bool
    leaves: bool
    sends: bool
    composed: DispatchKey | None
    sums: bool
    written: tuple[tuple[int, str], ...]
    order: tuple[int, ...]
    on_host: tuple[int, ...]
    view: Callable[..., torch.Tensor] | None
    drawing: Callable[..., Any] | None
    effects: dict[Any, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, op: OpOverload, kernels: Kernels) -> Operator:
        """What is known of `op` on the device of `kernels`."""
        schema, name, rule = op._schema, op._opname, rule_of(op)
        kind = kind_of(op)
        reads_nothing = not any("Tensor" in str(value.type) for value in schema.returns) and rule.values != "reads"
        if reads_nothing and kind is Kind.MAKE and not schema.is_mutable:
            kind = Kind.RUN  # sizes, devices, assertions: about tensors, not about their values
        return cls(
            op=op,
            name=op.name(),
            kind=kind,
            deciding=rule.deciding,
            loose=kind is Kind.IN_PLACE or torch.Tag.pointwise in op.tags,
            reads=rule.values == "reads",
            goes_by_lengths=rule.values == "lengths",
            is_constant=rule.values == "constant",
            chooses=rule.values == "choice" and not schema.is_mutable,
            draws=torch.Tag.nondeterministic_seeded in op.tags,
            leaves=name.removeprefix("new_").startswith("empty"),
            sends=op.namespace in _FUNCTIONAL and any(each.name == "group_name" for each in schema.arguments),
            composed=composition(op) if kernels.device_type in rule.composed_on else None,
            sums=rule.in_place,
            written=written_arguments(op),
            order=kernels.order(op),
            on_host=kernels.on_host(op),
            view=rule.method,
            drawing=drawing_from(op) if torch.Tag.nondeterministic_seeded in op.tags else None,
        )


def composition(op: OpOverload, *before: DispatchKey) -> DispatchKey:
    """The key of the kernel that composes `op` of others; that of the first of `before` that has one, if any has."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    keys = *before, DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeExplicitAutogradNonFunctional
    return next(key for key in keys if has_kernel(op.name(), key.name))


class Call(NamedTuple):
    """One call of an operator: its arguments, the tensors among them, and the records of what these lie in.

    ``known`` is whether what it returns follows from values that are known now, and are few.
    """

    operator: Operator
    args: Any
    kwargs: Any
    tensors: list[torch.Tensor]
    records: list[StorageRecord]
    known: bool
