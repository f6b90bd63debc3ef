"""The offload runtime: where moved bytes live, and when they move."""

from memscale.runtime._entry import Handle, changed_error, described, kept_tensor, version
from memscale.runtime._home import Home, Visit, home_of, home_on_device
from memscale.runtime._movable import is_movable
from memscale.runtime._runtime import Runtime, default_runtime
from memscale.runtime._stats import Stats, Timeline
from memscale.runtime._tiers import check_tier

__all__ = [
    "Handle",
    "Home",
    "Runtime",
    "Stats",
    "Timeline",
    "Visit",
    "changed_error",
    "check_tier",
    "default_runtime",
    "described",
    "home_of",
    "home_on_device",
    "is_movable",
    "kept_tensor",
    "version",
]
