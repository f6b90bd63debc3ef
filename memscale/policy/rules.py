"""The rules: which few techniques lose no time, where that can be seen without trying them."""

from __future__ import annotations

from memscale.policy.context import StrategyContext

_ONE = 1024
_CUT = 0.75  # of the largest tensor outside of the blocks, what `tile` frees of it
_FEW = 0.1  # of the activations: what is cheapest to compute again


def rule(context: StrategyContext) -> tuple[str, ...]:
    """The techniques to try first: all that are eligible, unless recomputing and cutting will do.

    They will where what must go is no more than the largest tensor outside of the blocks, mostly logits, which `tile`
    never makes whole, or than the few activations that are next to nothing to compute again. Copies hide that well in
    so few steps that there is no rule for them, and looking for them takes most of a planner's time.
    """
    excess = context.pressure - _ONE
    if excess <= 0:
        return ()
    few = tuple(name for name in context.eligible if name != "offload")
    head = context.outside_over_budget if "tile" in few else 0
    kept = context.excess_over_activations if "checkpoint" in few else _ONE
    return few if few and (excess <= _CUT * head or kept <= _FEW * _ONE) else context.eligible
