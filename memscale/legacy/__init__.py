"""The older one-line style: `wrap`, `optimize`, `detach`."""

from memscale.legacy.executor import Executor
from memscale.legacy.verbs import detach, optimize, wrap

__all__ = [
    "Executor",
    "detach",
    "optimize",
    "wrap",
]
