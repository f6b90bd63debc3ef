"""Where temporary files are on a disk, and not in RAM."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from memscale.core.errors import RuntimeUnavailable
from memscale.core.host_memory import read_or_empty


def folder_on_disk() -> str:
    """The first folder for temporary files that is not in RAM.

    Raises:
        RuntimeUnavailable: there is none.
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
    """Whether a folder is on a filesystem that lives in RAM; False where the system does not say."""
    return filesystem_of(folder) in ("tmpfs", "ramfs")


def filesystem_of(folder: str) -> str:
    """The kind of filesystem that a folder is on, such as ``"ext4"``; ``""`` where the system does not say."""
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
