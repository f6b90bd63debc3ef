"""A cache on disk between runs: JSON files that only this user can write, bounded in size, and safe to delete."""

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
_MOST_BYTES = 64 << 20  # for all entries of one kind
_PART = ".part-"  # the prefix of files that are being written
_ABANDONED_SECONDS = 3600  # age at which such a file is taken for one of a killed process


def cache_folder() -> Path | None:
    """Returns the cache folder: ``$MEMSCALE_CACHE``, else the user's; `None` if the variable is set and empty."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the XDG specification ignores relative paths
        return Path(shared) / "memscale"
    try:
        return Path.home() / ".cache" / "memscale"
    except RuntimeError:  # a process without a home
        return None


class DiskCache:
    """Stores JSON values by name, one file each. Failed reads count as misses, and failed writes are ignored.

    A file that is truncated, changed, of another version, or writable by another user counts as a miss. A write goes to
    a temporary file that is then renamed, so that no process reads a partial file. Only the owner may read the files.
    Beyond `most_bytes` the least recently used entries are deleted.

    Args:
        kind: the name of the folder for these entries.
        most_bytes: the limit for all entries of this kind, in bytes.
    """

    def __init__(self, kind: str, *, most_bytes: int = _MOST_BYTES) -> None:
        within = cache_folder()
        self.folder = None if within is None else within / kind
        self.most_bytes = most_bytes

    def read(self, name: str) -> Any:
        """Returns the value of this name, or `None`."""
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
            os.utime(path)  # marks the entry as used
        return value

    def write(self, name: str, value: Any) -> None:
        """Stores a value, replacing any value of this name."""
        if self.folder is None:
            return
        body = json.dumps(value)
        text = _DOCUMENT.write({"name": name, "sha256": _checksum(body), "body": body})
        if len(text) > self.most_bytes:
            return
        with contextlib.suppress(OSError):
            self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.mkdir(mode=0o700, exist_ok=True)
            descriptor, part = tempfile.mkstemp(dir=self.folder, prefix=_PART)  # readable by its owner only
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
            with contextlib.suppress(OSError):  # another process may have deleted it
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
    """Whether only this user could have written the file."""
    if not stat.S_ISREG(about.st_mode):
        return False
    mine = getattr(os, "getuid", lambda: about.st_uid)()  # Windows has no user ids
    return about.st_uid == mine and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
