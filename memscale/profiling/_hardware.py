"""The device a step runs on, measured once and passed around as data."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memscale._errors import ConfigError, RuntimeUnavailable

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
        free_bytes = _available_bytes(Path("/proc/meminfo"))
        limits = list(_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")))
        for limit_bytes, used_bytes in limits:
            memory_bytes = min(memory_bytes, limit_bytes)
            if free_bytes is not None:
                free_bytes = min(free_bytes, max(0, limit_bytes - used_bytes))
        return cls(_cpu_name(Path("/proc/cpuinfo")), "cpu", memory_bytes, free_bytes)

    def __str__(self) -> str:
        free = "" if self.free_bytes is None else f", {self.free_bytes / _GIB:.2f} GiB free"
        return f"{self.name} ({self.device_type}, {self.memory_bytes / _GIB:.2f} GiB{free})"


def _cgroup_limits(membership: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit bytes, used bytes) of every memory cgroup, v1 or v2, that this process is in.

    A limit binds everything below it, so each group up to the root counts. Inside a container the path that
    the kernel reports may not exist under the container's own mount; the root, which is the container, does.
    """
    for line in _read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, limit_name, usage_name = mount, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_name, usage_name = mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = root.joinpath(*parts[:depth])
            limit = _read(group / limit_name).strip()
            # v2 writes "max" for no limit; v1 writes a number near 2**63, which never is the smaller one.
            if limit.isdigit() and int(limit) > 0:
                usage = _read(group / usage_name).strip()
                yield int(limit), (int(usage) if usage.isdigit() else 0)


def _available_bytes(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cpu_name(cpuinfo: Path) -> str:
    for line in _read(cpuinfo).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "CPU"


def _read(path: Path) -> str:
    """The text of a system file, empty where this system has no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
