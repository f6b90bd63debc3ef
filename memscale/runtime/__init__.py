"""The offload runtime: stores tensors on tiers below a device, and copies them there and back."""

from memscale.runtime.backends.host import HostBackend
from memscale.runtime.engine.entry import Handle
from memscale.runtime.offload_config import AsyncOffloadConfig
from memscale.runtime.parameters.gradients import is_alone
from memscale.runtime.parameters.host_parameter import (
    HostParameter,
    Residency,
    Saved,
    host_parameter_of,
    host_parameter_on_device,
)
from memscale.runtime.parameters.host_parameters import HostParameters
from memscale.runtime.runtime import Runtime, default_runtime, runtime_for, runtimes_replaced
from memscale.runtime.saved_tensor_hooks import Hooks, hooks_here, is_plain, is_traced
from memscale.runtime.stats import CopyTimeline, DeviceStats, Stats
