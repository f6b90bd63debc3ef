"""The one-line interface: `wrap`, `optimize`, `detach` and `report` change a model in place."""

from memscale.legacy.executor import Executor
from memscale.legacy.verbs import detach, optimize, report, wrap, wrapped
