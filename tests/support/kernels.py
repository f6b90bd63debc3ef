"""What a simulated kernel of a card holds, for the tests of those kernels."""

from memscale.simulation.rules.registry import RULES
from memscale.simulation.rules.rule import CardTraits, OpRule, most_held


def rule_named(op):
    """The rule of the overload `op`, as ``str(OpOverload)`` names it."""
    return RULES.get(op) or RULES.get(op.rpartition(".")[0]) or OpRule()


def cuda_program(op, args, outputs, capability, multiprocessors=132):
    """What the kernel of `op` does with the allocator while it runs."""
    return rule_named(op).program(args, outputs, CardTraits(capability, multiprocessors))


def scratch_bytes(op, args, outputs, capability, **options):
    """The most that the kernel of `op` holds beside its inputs and outputs, as the allocator counts it."""
    return most_held(cuda_program(op, args, outputs, capability, **options))
