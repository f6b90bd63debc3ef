"""How long a copy takes between a device and the tiers below it, and the host to hand an operator to the device."""

from __future__ import annotations

from typing import Literal

from memscale.hardware.device import Hardware

# Of the link's rate on the data sheet. Copies of pinned memory reach 57 of 63 GB/s on an H100 (NVIDIA/nvbandwidth#6),
# 25 of 31.5 on an A100 (NVIDIA/nvbandwidth#42) and 12.2 to 12.9 of 15.75 on a P100 (mpicbg-scicomp/gearshifft#82).
_LINK_SHARE = 0.85

# From the end of one copy to the start of the next that waits behind it, and a request of the disk.
_COPY_SECONDS = 5e-6
_DISK_SECONDS = 100e-6

# What is assumed where the hardware does not say: the driver copies pageable memory through a buffer of its own, by the
# CPU; an NVMe disk of a server.
PAGEABLE_BYTES_PER_SECOND = 8e9
DISK_READ_BYTES_PER_SECOND = 3e9
DISK_WRITE_BYTES_PER_SECOND = 2e9

# What the host takes for an operator of eager PyTorch, from Python to the launch of its kernel.
_ISSUE_SECONDS = 8e-6

# Of one thread of a server's CPU that streams through memory; an optimizer's loop over single tensors uses few.
_HOST_BYTES_PER_SECOND = 20e9
_HOST_OPERATOR_SECONDS = 5e-6

Direction = Literal["out", "in"]
DIRECTIONS: tuple[Direction, Direction] = ("out", "in")


def issue_seconds(hardware: Hardware) -> float:
    """How long the host takes to hand one operator to `hardware`, which on a CPU is part of the operator's time."""
    return 0.0 if hardware.device_type == "cpu" else _ISSUE_SECONDS


def host_seconds(nbytes: int) -> float:
    """How long the CPU beside an accelerator takes for an operator that reads and writes `nbytes`."""
    return _HOST_OPERATOR_SECONDS + nbytes / _HOST_BYTES_PER_SECOND


def knows_copies(hardware: Hardware) -> bool:
    """Whether `hardware` says how fast it copies to the tiers below it; the disk's speed is assumed if need be."""
    return hardware.device_type == "cpu" or None not in (
        hardware.host_to_device_bytes_per_second,
        hardware.device_to_host_bytes_per_second,
    )


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
            rates.append(PAGEABLE_BYTES_PER_SECOND)
    if tier == "disk":
        rates.append(DISK_WRITE_BYTES_PER_SECOND if direction == "out" else DISK_READ_BYTES_PER_SECOND)
    return nbytes / min(rates) + (_DISK_SECONDS if tier == "disk" else _COPY_SECONDS)
