"""Policies: choose the techniques to plan with first; the planner then proves that little was lost."""

from memscale.policy.artifact import Artifact
from memscale.policy.context import FEATURES, TECHNIQUES, StrategyContext, eligible
from memscale.policy.decision import StrategyDecision, everything, rule, select, widenings
