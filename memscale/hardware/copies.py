"""How long a copy takes between a device and the tiers below it, and an operator of the CPU beside one."""

from __future__ import annotations

from typing import Literal

from memscale.hardware.device import Hardware

# Of the link's rate on the data sheet. Copies of pinned memory reach 57 of 63 GB/s on an H100 (NVIDIA/nvbandwidth#6),
# 25 of 31.5 on an A100 (NVIDIA/nvbandwidth#42) and 12.2 to 12.9 of 15.75 on a P100 (mpicbg-scicomp/gearshifft#82).
_LINK_SHARE = 0.85

# Seconds from the end of one copy to the start of the next that waits behind it, and of a request of the disk: orders
# of magnitude of a kernel's launch and of an NVMe disk, which `benchmarks/bench_offload.py` compares with a card's.
_COPY_SECONDS = 5e-6
_DISK_SECONDS = 100e-6

# The driver copies pageable memory through a buffer of its own, with one thread of the CPU: an order of magnitude.
_PAGEABLE_BYTES_PER_SECOND = 8e9

# Assumed, and said in a note, where the hardware does not say (`Hardware.measure()` does): an NVMe disk of a server,
# and its RAM.
_DISK_READ_BYTES_PER_SECOND = 3e9
_DISK_WRITE_BYTES_PER_SECOND = 2e9
_HOST_BYTES_PER_SECOND = 50e9

# An operator of PyTorch on the CPU, beside its traffic: an order of magnitude, between `_CPU_LAUNCH_SECONDS` of the
# roofline and the 13 µs of a CPU that was not measured.
_HOST_OPERATOR_SECONDS = 5e-6

# A page of 4 KiB in a microsecond and a half, as `Hardware.measure()` finds on a CPU.
_NEW_MEMORY_BYTES_PER_SECOND = 2.7e9

Direction = Literal["out", "in"]
DIRECTIONS: tuple[Direction, Direction] = ("out", "in")


def host_seconds(nbytes: int, hardware: Hardware) -> float:
    """How long the CPU beside an accelerator takes for an operator that reads and writes `nbytes`."""
    return _HOST_OPERATOR_SECONDS + nbytes / (hardware.host_bandwidth_bytes_per_second or _HOST_BYTES_PER_SECOND)


def new_memory_seconds(nbytes: int, hardware: Hardware) -> float:
    """How long the system takes to give a process `nbytes` of memory, as they are touched, and to take them back."""
    return nbytes / (hardware.new_memory_bytes_per_second or _NEW_MEMORY_BYTES_PER_SECOND)


def knows_copies(hardware: Hardware) -> bool:
    """Whether `hardware` says how fast it copies to the tiers below it; the disk's speed is assumed if need be."""
    return hardware.device_type == "cpu" or None not in (
        hardware.host_to_device_bytes_per_second,
        hardware.device_to_host_bytes_per_second,
    )


def assumed_speeds(hardware: Hardware, *, disk: bool, host: bool) -> str:
    """What is assumed of the disk and of the CPU beside an accelerator, where they are used and not known."""
    found = []
    if disk and not hardware.disk_read_bytes_per_second:
        found.append(f"how fast its disk reads: {_DISK_READ_BYTES_PER_SECOND / 1e9:g} GB/s was assumed")
    if disk and not hardware.disk_write_bytes_per_second:
        found.append(f"how fast its disk writes: {_DISK_WRITE_BYTES_PER_SECOND / 1e9:g} GB/s was assumed")
    if host and not hardware.host_bandwidth_bytes_per_second:
        found.append(f"how fast its host computes: {_HOST_BYTES_PER_SECOND / 1e9:g} GB/s of traffic was assumed")
    return ", nor ".join(found)


def copy_seconds(nbytes: int, tier: str, direction: Direction, hardware: Hardware) -> float:
    """How long a copy of `nbytes` from `hardware` to `tier` takes ("out"), or back ("in"), with nothing beside it.

    >>> card = Hardware.named("h100")
    >>> f"{copy_seconds(2**30, 'pinned', 'out', card) * 1e3:.1f} ms"
    '20.1 ms'
    """
    rates = []
    if hardware.device_type != "cpu":
        out, back = hardware.device_to_host_bytes_per_second, hardware.host_to_device_bytes_per_second
        link = out if direction == "out" else back
        assert link is not None, "asked of hardware that says so"
        rates.append(link * (1.0 if hardware.measured else _LINK_SHARE))
        if tier == "pageable":
            rates.append(_PAGEABLE_BYTES_PER_SECOND)
    if tier == "disk":
        write = hardware.disk_write_bytes_per_second or _DISK_WRITE_BYTES_PER_SECOND
        read = hardware.disk_read_bytes_per_second or _DISK_READ_BYTES_PER_SECOND
        rates.append(write if direction == "out" else read)
    return nbytes / min(rates) + (_DISK_SECONDS if tier == "disk" else _COPY_SECONDS)
