"""The older one-line style: `wrap`, `optimize`, `detach`."""

from memscale.legacy.executor import Executor
from memscale.legacy.verbs import attached, detach, optimize, report, wrap, wrapped

__all__ = ["Executor", "attached", "detach", "optimize", "report", "wrap", "wrapped"]
