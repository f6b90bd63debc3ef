"""How fast a device computes and copies, for whoever plans for it: also where it does not say."""

from __future__ import annotations

import dataclasses

from torch import nn

from memscale.config import Config
from memscale.hardware import DIRECTIONS, Hardware, copy_seconds, has_rate, knows_copies, nominal
from memscale.planning.solving.solver import LinkRates

_PROBE_BYTES = 1 << 30  # of a copy that shows the rate of a link

# Stands in where no device says how fast it is and it is no CPU. Costs are then relative to each other, which is what a
# choice needs.
_NOMINAL_FLOPS = {"float32": 1e12, "bfloat16": 2e12, "float16": 2e12, "float64": 5e11}
_NOMINAL_BANDWIDTH = 1e11


def link_rates(hardware: Hardware, config: Config) -> LinkRates | None:
    """The way to the next tier, None where there is none whose speed is known."""
    if not knows_copies(hardware):
        return None
    tier = "pinned"
    if hardware.device_type == "cpu":
        # The next tier of a host is its disk, which is for those who ask for it.
        if "enable_offloading" not in config.given:
            return None
        tier = "disk"
    out, back = (_PROBE_BYTES / copy_seconds(_PROBE_BYTES, tier, way, hardware) for way in DIRECTIONS)
    cap = config.max_cpu_offload_gb
    return LinkRates(out, back, None if cap is None else int(cap * 10**9))


def dtypes_of(model: nn.Module) -> frozenset[str]:
    """Of its parameters that are floating point numbers."""
    return frozenset(str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point())


def timed(hardware: Hardware, used: frozenset[str]) -> Hardware:
    """The hardware with speeds in place of those that are not known and a step in the dtypes `used` needs.

    Nominal ones where none is known; a dtype that a card has no units for is computed in float32.
    """
    known = hardware.flops_per_second
    if hardware.device_type == "cpu" and not known and hardware.bandwidth_bytes_per_second is None:
        return nominal(hardware)
    rates = dict.fromkeys(used, known.get("float32", max(known.values()))) if known else _NOMINAL_FLOPS
    missing = {dtype: rate for dtype, rate in rates.items() if not has_rate(dtype, hardware)}
    if not missing and hardware.bandwidth_bytes_per_second:
        return hardware
    return dataclasses.replace(
        hardware,
        flops_per_second={**known, **missing},
        bandwidth_bytes_per_second=hardware.bandwidth_bytes_per_second or _NOMINAL_BANDWIDTH,
    )
