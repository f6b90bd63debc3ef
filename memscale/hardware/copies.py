"""Estimates the seconds of copies between a device and the other tiers, and of operators on an accelerator's host."""

from __future__ import annotations

from typing import Literal

from memscale.hardware.device import Hardware

# Share of the data sheet's link rate. Copies of pinned memory reach 57 of 63 GB/s on an H100 (NVIDIA/nvbandwidth#6),
# 25 of 31.5 on an A100 (NVIDIA/nvbandwidth#42) and 12.2 to 12.9 of 15.75 on a P100 (mpicbg-scicomp/gearshifft#82).
_LINK_SHARE = 0.85

# Seconds between two queued copies, and seconds of one disk request: orders of magnitude of a kernel launch and of an
# NVMe disk. `benchmarks/bench_offload.py` measures both.
_COPY_SECONDS = 5e-6
_DISK_SECONDS = 100e-6

# An order of magnitude: the driver copies pageable memory through a buffer of its own, with one CPU thread.
_PAGEABLE_BYTES_PER_SECOND = 8e9

# Defaults, reported in a note, for hardware that was not measured by `Hardware.measure()`: a server's NVMe disk and
# RAM.
_DISK_READ_BYTES_PER_SECOND = 3e9
_DISK_WRITE_BYTES_PER_SECOND = 2e9
_HOST_BYTES_PER_SECOND = 50e9

# Overhead of a PyTorch operator on the host CPU: an order of magnitude, between `_CPU_LAUNCH_SECONDS` of the roofline
# and the 13 µs assumed for an unmeasured CPU.
_HOST_OPERATOR_SECONDS = 5e-6

# A page of 4 KiB in 1.5 µs, as `Hardware.measure()` finds on a CPU.
_NEW_MEMORY_BYTES_PER_SECOND = 2.7e9

Direction = Literal["out", "in"]
DIRECTIONS: tuple[Direction, Direction] = ("out", "in")


def host_seconds(nbytes: int, hardware: Hardware) -> float:
    """Returns the seconds that an accelerator's host CPU takes for an operator that reads and writes `nbytes`."""
    return _HOST_OPERATOR_SECONDS + nbytes / (hardware.host_bandwidth_bytes_per_second or _HOST_BYTES_PER_SECOND)


def new_memory_seconds(nbytes: int, hardware: Hardware) -> float:
    """Returns the seconds that the system takes to provide `nbytes` of new memory, page by page, and to release it."""
    return nbytes / (hardware.new_memory_bytes_per_second or _NEW_MEMORY_BYTES_PER_SECOND)


def knows_copies(hardware: Hardware) -> bool:
    """Whether `hardware` has the speeds of its link to the host. The disk's speeds have defaults."""
    return hardware.device_type == "cpu" or None not in (
        hardware.host_to_device_bytes_per_second,
        hardware.device_to_host_bytes_per_second,
    )


def assumed_speeds(hardware: Hardware, *, disk: bool, host: bool) -> str:
    """Returns a note of the default speeds that are used for `hardware`; empty if it has its own."""
    found = []
    if disk and not hardware.disk_read_bytes_per_second:
        found.append(f"how fast its disk reads: {_DISK_READ_BYTES_PER_SECOND / 1e9:g} GB/s was assumed")
    if disk and not hardware.disk_write_bytes_per_second:
        found.append(f"how fast its disk writes: {_DISK_WRITE_BYTES_PER_SECOND / 1e9:g} GB/s was assumed")
    if host and not hardware.host_bandwidth_bytes_per_second:
        found.append(f"how fast its host computes: {_HOST_BYTES_PER_SECOND / 1e9:g} GB/s of traffic was assumed")
    return ", nor ".join(found)


def copy_seconds(nbytes: int, tier: str, direction: Direction, hardware: Hardware) -> float:
    """Returns the seconds of a copy of `nbytes` from `hardware` to `tier` ("out"), or back ("in"), on an idle link.

    >>> card = Hardware.named("h100")
    >>> f"{copy_seconds(2**30, 'pinned', 'out', card) * 1e3:.1f} ms"
    '20.1 ms'
    """
    rates = []
    if hardware.device_type != "cpu":
        out, back = hardware.device_to_host_bytes_per_second, hardware.host_to_device_bytes_per_second
        link = out if direction == "out" else back
        assert link is not None, "callers check `knows_copies` first"
        rates.append(link * (1.0 if hardware.measured else _LINK_SHARE))
        if tier == "pageable":
            rates.append(_PAGEABLE_BYTES_PER_SECOND)
    if tier == "disk":
        write = hardware.disk_write_bytes_per_second or _DISK_WRITE_BYTES_PER_SECOND
        read = hardware.disk_read_bytes_per_second or _DISK_READ_BYTES_PER_SECOND
        rates.append(write if direction == "out" else read)
    return nbytes / min(rates) + (_DISK_SECONDS if tier == "disk" else _COPY_SECONDS)
