"""What to plan with: a policy in front of the planner, which then proves that little was lost by it."""

from memscale.policy.artifact import Artifact
from memscale.policy.context import FEATURES, TECHNIQUES, StrategyContext, eligible
from memscale.policy.decision import StrategyDecision, everything, rule, select, widenings

__all__ = [
    "FEATURES",
    "TECHNIQUES",
    "Artifact",
    "StrategyContext",
    "StrategyDecision",
    "eligible",
    "everything",
    "rule",
    "select",
    "widenings",
]
