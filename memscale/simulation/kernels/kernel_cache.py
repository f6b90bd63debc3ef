"""What kernels were measured to take, remembered on disk: another run on this machine need not measure again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

from memscale.simulation.kernels.shapes import signature

VARIABLE = "MEMSCALE_CACHE"


def cache_folder() -> Path | None:
    """Where measurements are kept: ``$MEMSCALE_CACHE``, or the user's cache folder; None if the variable is empty."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memscale"


@dataclass(frozen=True)
class Sounding:
    """What one call of a kernel allocated (positive) and freed (negative), in order, and the bytes that it returned.

    >>> few, more = Sounding((30, 10, -30), 10), Sounding((50, 20, -50), 20)
    >>> few.scratch_bytes, few.extended(more, 2.0)
    (30, Sounding(changes=(90, 40, -90), returned_bytes=40))
    """

    changes: tuple[int, ...]
    returned_bytes: int

    @property
    def scratch_bytes(self) -> int:
        """The most that lived at once, less what was returned."""
        return max(0, max(accumulate(self.changes), default=0) - self.returned_bytes)

    def extended(self, more: Sounding, steps: float) -> Sounding:
        """The sounding that is as much further on from `more`, `steps` times, as `more` is from this one."""
        if len(self.changes) != len(more.changes):  # another algorithm: only the sums can be compared
            returned = _further(self.returned_bytes, more.returned_bytes, steps)
            scratch = max(0, _further(self.scratch_bytes, more.scratch_bytes, steps))
            return Sounding((returned + scratch, -scratch), returned)
        changes = [_further(here, there, steps) for here, there in zip(self.changes, more.changes, strict=True)]
        return Sounding(tuple(changes), _further(self.returned_bytes, more.returned_bytes, steps))


def _further(here: int, there: int, steps: float) -> int:
    return there + round((there - here) * steps)


class KernelCache:
    """Soundings by call signature, for this processor, this PyTorch and this number of threads.

    A file that cannot be read or written is as good as none: the measurement is repeated.
    """

    def __init__(self) -> None:
        about = (
            torch.__version__,
            platform.machine(),
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
        )
        name = f"soundings-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"
        folder = cache_folder()
        self._file = None if folder is None else folder / name
        self._known: dict[str, Sounding] | None = None

    def get(self, op: OpOverload, args: Any, kwargs: Any, measure: Callable[[], Sounding]) -> Sounding:
        """The sounding of a call with these arguments; `measure` finds them the first time."""
        try:
            key = repr(signature(op, args, kwargs, loose=True))
        except TypeError:
            return measure()
        known = self._read()
        if key not in known:
            known[key] = measure()
            self._write(known)
        return known[key]

    def _read(self) -> dict[str, Sounding]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError, TypeError):
                if self._file is not None:
                    found = json.loads(self._file.read_text(encoding="utf-8"))
                    self._known = {key: Sounding(tuple(changes), total) for key, (changes, total) in found.items()}
        return self._known

    def _write(self, known: dict[str, Sounding]) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Written beside and renamed, so that two processes never read half a file.
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, encoding="utf-8") as part:
                json.dump({key: (one.changes, one.returned_bytes) for key, one in known.items()}, part)
            os.replace(part.name, self._file)
