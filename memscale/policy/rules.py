"""The rules: which few techniques lose no time, where that can be seen without trying them."""

from __future__ import annotations

from memscale.policy.context import StrategyContext

_ONE = 1024
_CUT = 0.75  # of the largest tensor outside of the blocks, what `tile` frees of it
_FEW = 0.2  # of the activations: what is cheapest to compute again


def rule(context: StrategyContext) -> tuple[str, ...]:
    """The techniques to try first: all that are eligible, unless cutting alone or recomputing alone will do.

    Cutting will where what must go is no more than the largest tensor outside of the blocks, mostly logits, which
    `tile` never makes whole; recomputing where it is no more than the few activations that are next to nothing to
    compute again. Copies hide that well in so few steps that there is no rule for them.
    """
    excess = context.pressure - _ONE
    if excess <= 0:
        return ()
    if "tile" in context.eligible and excess <= _CUT * context.outside_over_budget:
        return ("tile",)
    if "checkpoint" in context.eligible and context.excess_over_activations <= _FEW * _ONE:
        return ("checkpoint",)
    return context.eligible
