"""What a long comparison has found so far, in a file, so that a run which was cut goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Journal:
    """Findings by name; none are kept without a ``path``, and none of other sources or circumstances are taken.

    Args:
        path: one finding a line, after a line of what they were found with. None: nothing is kept.
        sources: files and folders whose Python and C decides what is found.
        circumstances: what else does: versions, options.

    Example:
        >>> journal = Journal(None, [], "torch 2.13")
        >>> journal.add("one", 1)
        >>> journal.find("one") is None
        True
    """

    def __init__(self, path: Path | None, sources: Iterable[Path], circumstances: str) -> None:
        self.path = path
        self._found: dict[str, Any] = {}
        if path is None:
            return
        began = json.dumps({"sources": _digest(sources), "circumstances": circumstances})
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if lines and lines[0] == f"{began}\n":
            # A run that is ended while it writes leaves half a line, which the next one would go on in.
            whole = [line for line in lines if line.endswith("\n")]
            path.write_text("".join(whole))
            self._found = dict(map(json.loads, whole[1:]))
        else:
            path.write_text(f"{began}\n")

    def find(self, name: str) -> Any | None:
        return self._found.get(name)

    def add(self, name: str, found: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps([name, found]) + "\n")

    def close(self) -> None:
        """The comparison is whole: the next one begins with nothing."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _digest(sources: Iterable[Path]) -> str:
    files = [file for source in sources for file in ([source] if source.is_file() else source.rglob("*"))]
    digest = hashlib.sha256()
    for file in sorted(file for file in files if file.suffix in {".py", ".c"}):
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()
