"""The offload runtime: where moved bytes live, and when they move."""

from memscale.runtime._runtime import Runtime, default_runtime
from memscale.runtime._stats import Stats, Timeline

__all__ = ["Runtime", "Stats", "Timeline", "default_runtime"]
