"""Rates of compute and of copies for planning, with nominal rates for a device whose rates are unknown."""

from __future__ import annotations

import dataclasses

from torch import nn

from memscale.config import Config
from memscale.hardware import DIRECTIONS, Hardware, copy_seconds, has_rate, knows_copies, nominal
from memscale.planning.solving.solver import LinkRates

# Bytes of the copy whose seconds give the rate of a link; so many that the start of a copy does not show. By choice.
_PROBE_BYTES = 1 << 30

# Nominal FLOP/s by dtype and bytes/s, for an accelerator without known rates. Assumed: a choice between candidates
# needs only ratios of times, and seconds that rest on nominal rates are relative.
_NOMINAL_FLOPS = {"float32": 1e12, "bfloat16": 2e12, "float16": 2e12, "float64": 5e11}
_NOMINAL_BANDWIDTH = 1e11


def link_rates(hardware: Hardware, config: Config) -> LinkRates | None:
    """Returns the rates of the link to the next tier; None where the rates are unknown or the tier is not allowed."""
    if not knows_copies(hardware):
        return None
    tier = "pinned"
    if hardware.device_type == "cpu":
        # The next tier of a host is the disk, which a plan uses only if the config sets `enable_offloading`.
        if "enable_offloading" not in config.given:
            return None
        tier = "disk"
    out, back = (_PROBE_BYTES / copy_seconds(_PROBE_BYTES, tier, way, hardware) for way in DIRECTIONS)
    cap = config.max_cpu_offload_gb
    return LinkRates(out, back, None if cap is None else int(cap * 10**9))


def dtypes_of(model: nn.Module) -> frozenset[str]:
    """Returns the names of the dtypes of the model's floating point parameters, such as ``"bfloat16"``."""
    return frozenset(str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point())


def timed(hardware: Hardware, used: frozenset[str]) -> Hardware:
    """Returns the hardware with a rate for each dtype in `used` and a memory bandwidth.

    Missing rates are nominal where the hardware has no rate at all. Otherwise a dtype without a rate gets the rate of
    float32, in which a card without units for that dtype computes.
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
