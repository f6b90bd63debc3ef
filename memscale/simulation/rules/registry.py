"""The rules of all operators in one table; `tests/simulation/test_rules.py` lists the few tables beside it."""

from __future__ import annotations

from torch._ops import OpOverload

from memscale.simulation.rules import (
    attention,
    convolutions,
    elementwise,
    few_bits,
    images,
    indexing,
    losses,
    norms,
    products,
    recurrences,
    reductions,
)
from memscale.simulation.rules.rule import OpRule

_FAMILIES = (
    attention,
    convolutions,
    elementwise,
    few_bits,
    images,
    indexing,
    losses,
    norms,
    products,
    recurrences,
    reductions,
)
#: By ``str(OpOverload)``, or ``str(OpOverloadPacket)`` where all its overloads have one rule.
RULES: dict[str, OpRule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
_NONE = OpRule()


def rule_of(op: OpOverload) -> OpRule:
    """The rule of `op`; one that says nothing where none is known.

    >>> import torch
    >>> rule_of(torch.ops.aten.native_dropout.default).order, rule_of(torch.ops.aten.add.Scalar).order
    ((1, 0), ())
    """
    return RULES.get(str(op)) or RULES.get(str(op.overloadpacket)) or _NONE
