"""The device a step runs on, measured once and passed around as data."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memscale._errors import ConfigError, RuntimeUnavailable
from memscale._host_memory import available_host_bytes, cgroup_limit_bytes, read_or_empty

_GIB = 1024**3


@dataclass(frozen=True)
class Hardware:
    """A device and its memory; detect the one at hand or write down any other.

    Args:
        name: the maker's name of the device.
        device_type: ``"cuda"`` or ``"cpu"``.
        memory_bytes: memory that a process may use at most; at least 1.
        free_bytes: memory that was free when asked, None when unknown. Two descriptions of one device are
            equal whatever was free.

    Raises:
        ConfigError: a field is of the wrong type, or a size is out of range.

    >>> print(Hardware(name="A100", device_type="cuda", memory_bytes=80 * 1024**3))
    A100 (cuda, 80.00 GiB)
    """

    name: str
    device_type: str
    memory_bytes: int
    free_bytes: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        lines = [
            f"Hardware({key}={value!r}) must be a non-empty str; pass what the device is called"
            for key, value in (("name", self.name), ("device_type", self.device_type))
            if not isinstance(value, str) or not value
        ]
        lines += [
            f"Hardware({key}={value!r}) must be an int of at least {low}; pass a size in bytes"
            for key, value, low in (
                ("memory_bytes", self.memory_bytes, 1),
                ("free_bytes", self.free_bytes, 0),
            )
            if not (key == "free_bytes" and value is None)
            and (isinstance(value, bool) or not isinstance(value, int) or value < low)
        ]
        if lines:
            raise ConfigError("\n".join(lines))

    @classmethod
    def detect(cls, device: torch.device | str | None = None) -> Hardware:
        """Describe ``device``; None is the current CUDA device where there is one, else the CPU.

        The CPU's memory is the RAM of the machine or the process's cgroup limit, whichever is smaller.

        Raises:
            ConfigError: ``device`` does not name a device.
            RuntimeUnavailable: the device is not there, or its kind cannot be measured.

        >>> Hardware.detect("cpu").memory_bytes > 0
        True
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            where = torch.device(device)
        except (RuntimeError, TypeError):
            raise ConfigError(
                f"Hardware.detect(device={device!r}) must name a device; pass 'cuda', 'cuda:1' or 'cpu'"
            ) from None
        if where.type == "cuda":
            return cls._of_cuda(where)
        if where.type == "cpu":
            return cls._of_cpu()
        raise RuntimeUnavailable(
            f"memscale cannot measure the memory of {str(where)!r} devices; describe it yourself with "
            f"Hardware(name=..., device_type={where.type!r}, memory_bytes=...)"
        )

    @classmethod
    def _of_cuda(cls, device: torch.device) -> Hardware:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0 or (device.index is not None and device.index >= count):
            raise RuntimeUnavailable(
                f"device {str(device)!r} is not there, this process sees {count} CUDA devices; use one of "
                f"these or 'cpu'"
            )
        properties = torch.cuda.get_device_properties(device)
        free_bytes, memory_bytes = torch.cuda.mem_get_info(device)
        return cls(properties.name, "cuda", memory_bytes, free_bytes)

    @classmethod
    def _of_cpu(cls) -> Hardware:
        try:
            memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):  # no sysconf on Windows
            raise RuntimeUnavailable(
                "this system does not say how much RAM it has; describe it yourself with "
                "Hardware(name=..., device_type='cpu', memory_bytes=...)"
            ) from None
        limit_bytes = cgroup_limit_bytes()
        if limit_bytes is not None:
            memory_bytes = min(memory_bytes, limit_bytes)
        return cls(_cpu_name(Path("/proc/cpuinfo")), "cpu", memory_bytes, available_host_bytes())

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f", {self.free_bytes / _GIB:.2f} GiB free"
        return f"{self.name} ({self.device_type}, {self.memory_bytes / _GIB:.2f} GiB{free})"


def _cpu_name(cpuinfo: Path) -> str:
    for line in read_or_empty(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"
