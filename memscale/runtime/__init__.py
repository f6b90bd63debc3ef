"""The offload runtime: where moved bytes live, and when they move."""

from memscale.runtime.engine.entry import Handle
from memscale.runtime.parameters.home import Home, Visit, home_of, home_on_device
from memscale.runtime.parameters.movable import is_movable
from memscale.runtime.runtime import Runtime, default_runtime
from memscale.runtime.saved_tensors import Hooks, hooks_here, is_plain
from memscale.runtime.stats import Stats, Timeline

__all__ = [
    "Handle",
    "Home",
    "Hooks",
    "Runtime",
    "Stats",
    "Timeline",
    "Visit",
    "default_runtime",
    "home_of",
    "home_on_device",
    "hooks_here",
    "is_movable",
    "is_plain",
]
