"""The offload runtime: stores tensors on tiers below a device, and copies them there and back."""

from memscale.runtime.backends.host import HostBackend
from memscale.runtime.config import AsyncOffloadConfig
from memscale.runtime.engine.entry import Handle
from memscale.runtime.parameters.gradients import is_alone
from memscale.runtime.parameters.home import Home, Saved, Visit, home_of, home_on_device
from memscale.runtime.parameters.homes import Homes
from memscale.runtime.runtime import Runtime, default_runtime, runtime_for, runtimes_replaced
from memscale.runtime.saved_tensors import Hooks, hooks_here, is_plain
from memscale.runtime.stats import CopyTimeline, DeviceStats, Stats

__all__ = [
    "AsyncOffloadConfig",
    "CopyTimeline",
    "DeviceStats",
    "Handle",
    "Home",
    "Homes",
    "Hooks",
    "HostBackend",
    "Runtime",
    "Saved",
    "Stats",
    "Visit",
    "default_runtime",
    "home_of",
    "home_on_device",
    "hooks_here",
    "is_alone",
    "is_plain",
    "runtime_for",
    "runtimes_replaced",
]
