"""What is kept on disk from one run to the next: JSON of this user's own, written whole, bounded, never relied on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

from memscale.core.documents import Document
from memscale.core.errors import ConfigError, MemscaleError

VARIABLE = "MEMSCALE_CACHE"

_DOCUMENT = Document("cache_entry", version=1, writer="DiskCache.write", error=ConfigError)
_MOST_BYTES = 64 << 20  # of one kind of entries
_PART = ".part-"  # how files begin that are being written
_ABANDONED_SECONDS = 3600  # after which such a file is of a process that was killed


def cache_folder() -> Path | None:
    """Where caches are: ``$MEMSCALE_CACHE``, or the user's cache folder; None if the variable is empty."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the specification has others ignored
        return Path(shared) / "memscale"
    try:
        return Path.home() / ".cache" / "memscale"
    except RuntimeError:  # a process without a home
        return None


class DiskCache:
    """JSON values by name, a file each. What cannot be read or written is as good as never kept.

    A file that was cut off or changed, is of another version, or that another user could have written is no entry.
    Files are written beside and renamed, so that no process reads half of one; only their owner may read them. Beyond
    `most_bytes` the ones that were used least lately go.

    Args:
        kind: of the entries, which have a folder of their own.
        most_bytes: that they may take together.
    """

    def __init__(self, kind: str, *, most_bytes: int = _MOST_BYTES) -> None:
        within = cache_folder()
        self.folder = None if within is None else within / kind
        self.most_bytes = most_bytes

    def read(self, name: str) -> Any:
        """The value of this name, None without one."""
        if self.folder is None:
            return None
        path = self.folder / f"{name}.json"
        try:
            if not _is_ours(path.lstat()):
                return None
            entry = _DOCUMENT.read(path.read_text(encoding="utf-8"))
            body = entry["body"]
            if entry["name"] != name or entry["sha256"] != _checksum(body):
                return None
            value = json.loads(body)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, MemscaleError):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return value

    def write(self, name: str, value: Any) -> None:
        """Keep a value, in place of the one of this name."""
        if self.folder is None:
            return
        body = json.dumps(value)
        text = _DOCUMENT.write({"name": name, "sha256": _checksum(body), "body": body})
        if len(text) > self.most_bytes:
            return
        with contextlib.suppress(OSError):
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            descriptor, part = tempfile.mkstemp(dir=self.folder, prefix=_PART)  # for its owner only
            try:
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                os.replace(part, self.folder / f"{name}.json")
            finally:
                Path(part).unlink(missing_ok=True)
            self._make_room(self.folder)

    def _make_room(self, folder: Path) -> None:
        found = []
        for path in folder.iterdir():
            with contextlib.suppress(OSError):  # another process was faster
                about = path.lstat()
                if path.name.startswith(_PART) and time.time() - about.st_mtime > _ABANDONED_SECONDS:
                    path.unlink()
                elif stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime_ns, about.st_size, path))
        taken = sum(nbytes for _, nbytes, _ in found)
        for _, nbytes, path in sorted(found):
            if taken <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            taken -= nbytes


def _checksum(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()


def _is_ours(about: os.stat_result) -> bool:
    """Whether a file is one that nobody but this user could have written."""
    if not stat.S_ISREG(about.st_mode):
        return False
    mine = getattr(os, "getuid", lambda: about.st_uid)()  # Windows has no such numbers
    return about.st_uid == mine and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
