"""Queries of the host: the RAM available to this process under its cgroup limits, and folders of the user."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memscale.core.errors import RuntimeUnavailable

_MEMBERSHIP, _MOUNT, _MEMINFO = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"), Path("/proc/meminfo")


def available_host_bytes() -> int | None:
    """Returns the bytes of RAM that the process can allocate without swapping or reaching a limit; `None` if unknown.

    Read from ``/proc`` and the cgroups on Linux; elsewhere from psutil, where it is installed.

    >>> nbytes = available_host_bytes()
    >>> nbytes is None or nbytes > 0
    True
    """
    free_bytes = _system_available_bytes(_MEMINFO)
    for limit_bytes, used_bytes in cgroup_limits(_MEMBERSHIP, _MOUNT):
        left_bytes = max(0, limit_bytes - used_bytes)
        free_bytes = left_bytes if free_bytes is None else min(free_bytes, left_bytes)
    return free_bytes


def cgroup_limit_bytes() -> int | None:
    """Returns the smallest memory limit, in bytes, of the cgroups of this process; `None` without a limit."""
    return min((limit_bytes for limit_bytes, _ in cgroup_limits(_MEMBERSHIP, _MOUNT)), default=None)


def cgroup_limits(membership: Path, mount: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit bytes, used bytes) of every memory cgroup, v1 or v2, of this process.

    A limit binds everything below it, so each group up to the root counts. Inside a container the path that
    the kernel reports may not exist under the container's own mount; the root, which is the container, does.
    """
    for line in read_or_empty(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, limit_name, usage_name, cache_name = mount, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, cache_name = mount / "memory", "total_inactive_file"
            limit_name, usage_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            group = root.joinpath(*parts[:depth])
            limit = read_or_empty(group / limit_name).strip()
            # For no limit v2 writes "max"; v1 writes a number near 2**63, which is larger than any real limit.
            if limit.isdigit() and int(limit) > 0:
                usage = read_or_empty(group / usage_name).strip()
                # The usage includes the page cache, which the kernel drops before it refuses memory.
                cached_bytes = _field(group / "memory.stat", cache_name) or 0
                yield int(limit), max(0, (int(usage) if usage.isdigit() else 0) - cached_bytes)


def read_or_empty(path: Path) -> str:
    """Returns the text of a system file, or ``""`` if it does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def folder_on_disk() -> str:
    """Returns the first folder for temporary files that is on a disk.

    Raises:
        RuntimeUnavailable: all of them are in RAM.
    """
    candidates = list(dict.fromkeys([tempfile.gettempdir(), "/var/tmp"]))
    for candidate in candidates:
        if os.path.isdir(candidate) and not is_in_memory(candidate):
            return candidate
    raise RuntimeUnavailable(
        f"the temporary directories {candidates} are in RAM, so offloading to them frees nothing; pass a directory on "
        f"a disk, or set TMPDIR to one"
    )


def is_in_memory(folder: str) -> bool:
    """Whether a folder is on a filesystem in RAM; `False` if the kind of filesystem is unknown."""
    return filesystem_of(folder) in ("tmpfs", "ramfs")


def filesystem_of(folder: str) -> str:
    """Returns the kind of filesystem of a folder, such as ``"ext4"``; ``""`` if unknown."""
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in read_or_empty(Path("/proc/self/mountinfo")).splitlines():
        mount, _, filesystem = line.partition(" - ")
        if mount.split()[2] == number:
            return filesystem.split()[0]
    return ""


def _system_available_bytes(meminfo: Path) -> int | None:
    kibibytes = _field(meminfo, "MemAvailable:")
    if kibibytes is not None:
        return kibibytes * 1024
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def _field(path: Path, name: str) -> int | None:
    for line in read_or_empty(path).splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == name:
            return int(words[1])
    return None


def state_folder() -> Path:
    """Returns ``$MEMSCALE_STATE`` or memscale's folder in the user's state folder, and creates it if needed."""
    usual = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "memscale"
    folder = Path(os.environ.get("MEMSCALE_STATE") or usual)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
