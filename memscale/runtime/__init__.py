"""The offload runtime: where moved bytes live, and when they move."""

from memscale.runtime.engine.entry import Handle, changed_error, described, kept_tensor, version
from memscale.runtime.parameters.home import Home, Visit, home_of, home_on_device
from memscale.runtime.parameters.movable import is_movable
from memscale.runtime.runtime import Runtime, default_runtime
from memscale.runtime.stats import Stats, Timeline
from memscale.runtime.storage.tiers import check_tier

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
