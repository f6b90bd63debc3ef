"""What kernels were measured to take, remembered on disk: another run on this machine need not measure again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch._ops import OpOverload

from memscale.hardware import cpu_name
from memscale.simulation.kernels.shapes import signature

VARIABLE = "MEMSCALE_CACHE"

T = TypeVar("T")


def cache_folder() -> Path | None:
    """Where measurements are kept: ``$MEMSCALE_CACHE``, or the user's cache folder; None if the variable is empty."""
    chosen = os.environ.get(VARIABLE)
    if chosen is not None:
        return Path(chosen) if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "memscale"


class KernelCache(Generic[T]):
    """What was measured of kernels by call signature, for this processor, this PyTorch and this number of threads.

    A file that cannot be read or written is as good as none: the measurement is repeated.

    Args:
        kind: what was measured; each kind has a file of its own.
        read, write: a measurement from JSON, and as JSON.
    """

    def __init__(self, kind: str, read: Callable[[Any], T], write: Callable[[T], Any]) -> None:
        about = (
            torch.__version__,
            platform.machine(),
            cpu_name(),
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
            torch.backends.mkldnn.enabled,
            torch.get_float32_matmul_precision(),
        )
        name = f"{kind}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"
        folder = cache_folder()
        self._file = None if folder is None else folder / name
        self._from_json, self._as_json = read, write
        self._known: dict[str, T] | None = None
        self._changed = False

    def get(self, op: OpOverload, args: Any, kwargs: Any, measure: Callable[[], T]) -> T:
        """The measurement of a call with these arguments; `measure` makes it the first time."""
        try:
            key = repr(signature(op, args, kwargs, loose=True))
        except TypeError:
            return measure()
        known = self._read()
        if key not in known:
            known[key] = measure()
            self._changed = True
        return known[key]

    def save(self) -> None:
        """Write down what was measured since the last time."""
        if self._file is None or not self._changed:
            return
        self._changed = False
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Written beside and renamed, so that two processes never read half a file.
            with tempfile.NamedTemporaryFile("w", dir=self._file.parent, delete=False, encoding="utf-8") as part:
                json.dump({key: self._as_json(one) for key, one in self._read().items()}, part)
            os.replace(part.name, self._file)

    def _read(self) -> dict[str, T]:
        if self._known is None:
            self._known = {}
            with contextlib.suppress(OSError, ValueError, TypeError):
                if self._file is not None:
                    found = json.loads(self._file.read_text(encoding="utf-8"))
                    self._known = {key: self._from_json(value) for key, value in found.items()}
        return self._known
