"""Estimates the seconds of an operator: by its arithmetic or by its memory traffic, whichever takes longer."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from memscale.core import ConfigError
from memscale.hardware.device import Hardware

# Shares of data sheet rates; benchmarks/bench_operators.py measures them by operator. Source: large bfloat16 products
# reach 80% on H100 and H200, 85% on A100 SXM, 78% on B200, 74% on L40S, 80% on A6000, 68% on V100 (float16), 64% on T4
# (float16), 60% on MI300X, and slightly over 100% on RTX 3090, 4090 and 5090, which clock above their sheets
# (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"; zzc0721/torch-performence-test-data). STREAM on an H100
# NVL: 78% copy, 84% triad (BabelStream).
_COMPUTE_SHARE, _BANDWIDTH_SHARE = 0.8, 0.85

# Seconds of a nearly empty kernel on an accelerator. Source: in OpenXLA's table of measured H100 products (its
# matmul_interpolator_data.h) the least is 5.8 µs. With this constant and the efficiencies above, the error of `seconds`
# over 61 of its bfloat16 products from 0.07 to 550 GFLOP is 5% in the median, 16% at the 90th percentile, and 34% for
# narrow products that fill few of the card's processors.
_ACCELERATOR_LAUNCH_SECONDS = 5.5e-6
# Seconds of the dispatch of one operator on a CPU. Source: `Hardware.measure` on an AMD EPYC, as in
# benchmarks/bench_clock.py.
_CPU_LAUNCH_SECONDS = 2e-6

# FLOP/s of float32 products and bytes/s of copies of one thread of a CPU that was not measured; a choice between plans
# depends only on the ratio. Source: `Hardware.measure` on an AMD EPYC with AVX-512 (torch 2.13), rounded, as in
# benchmarks/bench_clock.py.
_CPU_FLOPS_PER_SECOND, _CPU_BYTES_PER_SECOND = 100e9, 24e9
_DTYPES = ("float64", "float32", "bfloat16", "float16", "int8")


# The dtype whose rate applies if a device has no rate for the key: the same circuits compute both.
_AT_THE_RATE_OF = {
    "tfloat32": "float32",  # TF32 is allowed, not required; a device without TF32 computes in float32
    "float8_e5m2": "float8_e4m3fn",
    "float8_e5m2fnuz": "float8_e4m3fnuz",
}


class Work(NamedTuple):
    """The arithmetic and the memory traffic of an operator.

    Args:
        flops: additions and multiplications.
        nbytes: bytes read from and written to the device's memory.
        dtype: the dtype of the arithmetic, as in ``Hardware.flops_per_second``; ``""`` for empty work.
        launches: the number of kernels besides the first.
        extra_bytes: bytes that are moved after the arithmetic.
    """

    flops: int
    nbytes: int
    dtype: str
    launches: int = 0
    extra_bytes: int = 0


def seconds(work: Work, hardware: Hardware) -> float:
    """Returns the seconds that `hardware` takes for `work` alone: the roofline plus the launch of an operator.

    ``max(flops / (compute * peak), nbytes / (bandwidth * peak)) + launch``; empty work takes no time. Kernels reach 80%
    of the arithmetic and 85% of the bandwidth of a data sheet, and a measured speed. (Williams,
    Waterman and Patterson, "Roofline", 2009; the constant term makes small operators slow, as in Hockney's n½.)

    Args:
        work: the arithmetic and the memory traffic.
        hardware: the device.

    Raises:
        ConfigError: the hardware lacks a speed that this work needs; the message names the field.

    >>> card = Hardware.named("h100")
    >>> product = Work(flops=2 * 4096**3, nbytes=3 * 2 * 4096**2, dtype="bfloat16")
    >>> f"{seconds(product, card) * 1e6:.0f} µs"
    '179 µs'
    >>> f"{seconds(Work(0, 2**30, 'bfloat16'), card) * 1e6:.0f} µs"
    '382 µs'
    """
    if not work.flops and not work.nbytes:
        return 0.0
    compute, bandwidth = (1.0, 1.0) if hardware.measured else (_COMPUTE_SHARE, _BANDWIDTH_SHARE)
    longest = 0.0
    if work.flops:
        longest = work.flops / (compute * _peak(work.dtype, hardware))
    if work.nbytes:
        if hardware.bandwidth_bytes_per_second is None:
            raise _unknown(hardware, "bandwidth_bytes_per_second", "a number")
        longest = max(longest, work.nbytes / (bandwidth * hardware.bandwidth_bytes_per_second))
        longest += work.extra_bytes / (bandwidth * hardware.bandwidth_bytes_per_second)
    return longest + (1 + work.launches) * _launch_seconds(hardware)


def nominal(hardware: Hardware) -> Hardware:
    """Returns `hardware`, a CPU without speeds, with one default rate of arithmetic and one of memory.

    The rates grow with the number of PyTorch's threads.

    >>> round(nominal(Hardware("box", "cpu", 2**34)).flops_per_second["float32"] / torch.get_num_threads() / 1e9)
    100
    """
    threads = torch.get_num_threads()
    return dataclasses.replace(
        hardware,
        measured=True,  # the rates are what kernels reach, as if measured, and are not reduced further
        flops_per_second=dict.fromkeys(_DTYPES, _CPU_FLOPS_PER_SECOND * threads),
        bandwidth_bytes_per_second=_CPU_BYTES_PER_SECOND * threads,
    )


def has_rate(dtype: str, hardware: Hardware) -> bool:
    """Whether `hardware` has a rate for arithmetic in `dtype`.

    >>> has_rate("float16", Hardware.named("t4")), has_rate("bfloat16", Hardware.named("t4"))
    (True, False)
    """
    return _rate(dtype, hardware) is not None


def narrow_dtype(hardware: Hardware) -> torch.dtype:
    """Returns the dtype in which `cast` computes on `hardware`: bfloat16, or float16 if only that is fast there.

    >>> narrow_dtype(Hardware.named("t4")), narrow_dtype(Hardware.named("a10"))
    (torch.float16, torch.bfloat16)
    """
    wants_float16 = has_rate("float16", hardware) and not has_rate("bfloat16", hardware)
    return torch.float16 if wants_float16 else torch.bfloat16


def _rate(dtype: str, hardware: Hardware) -> float | None:
    peaks = hardware.flops_per_second
    return peaks.get(dtype) or peaks.get(_AT_THE_RATE_OF.get(dtype, ""))


def _peak(dtype: str, hardware: Hardware) -> float:
    peak = _rate(dtype, hardware)
    if peak is None:
        raise _unknown(hardware, f"flops_per_second[{dtype!r}]", "one")
    return peak


def _launch_seconds(hardware: Hardware) -> float:
    if hardware.launch_seconds is not None:
        return hardware.launch_seconds
    return _CPU_LAUNCH_SECONDS if hardware.device_type == "cpu" else _ACCELERATOR_LAUNCH_SECONDS


def _unknown(hardware: Hardware, field: str, what: str) -> ConfigError:
    return ConfigError(
        f"the time of an operator on {hardware.name!r} needs {field}, which is not known; pass {what} with "
        f"dataclasses.replace(hardware, {field.partition('[')[0]}=...), or use Hardware.measure() on the device, or "
        "Hardware.named('h100') for a card's data sheet"
    )
