"""The rules of all operators, the one table with operators for keys."""

from __future__ import annotations

from memscale.core import OpOverload
from memscale.simulation.rules import (
    attention,
    convolutions,
    elementwise,
    few_bits,
    indexing,
    norms,
    products,
    recurrences,
    reductions,
)
from memscale.simulation.rules.rule import OpRule

_FAMILIES = (attention, convolutions, elementwise, few_bits, indexing, norms, products, recurrences, reductions)
#: By ``str(OpOverload)``, or ``str(OpOverloadPacket)`` where all overloads share a rule.
RULES: dict[str, OpRule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
_NONE = OpRule()


def rule_of(op: OpOverload) -> OpRule:
    """Returns the rule of `op`; an empty rule for an operator without facts.

    >>> import torch
    >>> rule_of(torch.ops.aten.native_dropout.default).order, rule_of(torch.ops.aten.add.Scalar).order
    ((1, 0), ())
    """
    return RULES.get(str(op)) or RULES.get(str(op.overloadpacket)) or _NONE
