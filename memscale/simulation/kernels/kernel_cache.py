"""A disk cache of kernel measurements, so that a later run on this machine need not repeat them."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch._ops import OpOverload

from memscale.core import DiskCache
from memscale.hardware import cpu_name
from memscale.simulation.kernels.shapes import signature

T = TypeVar("T")


def this_machine() -> str:
    """Returns a hash of all that kernels depend on besides their arguments: processor, PyTorch, threads, switches."""
    about = (
        torch.__version__,
        platform.machine(),
        cpu_name(),
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
    )
    return hashlib.sha256(repr(about).encode()).hexdigest()[:16]


class KernelCache(Generic[T]):
    """Measurements of kernels by call signature, for this processor, this PyTorch and this number of threads.

    Args:
        kind: the name of the measured quantity; each kind has a file of its own.
        read: makes a measurement from JSON data.
        write: returns the JSON data of a measurement.
    """

    def __init__(self, kind: str, read: Callable[[Any], T], write: Callable[[T], Any]) -> None:
        self._name = f"{kind}-{this_machine()}"
        self._disk = DiskCache("kernels")
        self._from_json, self._as_json = read, write
        self._known: dict[str, T] | None = None
        self._changed = False

    def get(self, op: OpOverload, args: Any, kwargs: Any, measure: Callable[[], T]) -> T:
        """Returns the measurement of a call with these arguments; `measure` makes it at the first call."""
        called = signature(args, kwargs, [], loose=True)
        try:
            hash(called)  # the repr of an unhashable argument may contain its address, so it is no key
        except TypeError:
            return measure()
        known, key = self._read(), repr((op, *called))
        if key not in known:
            known[key] = measure()
            self._changed = True
        return known[key]

    def save(self) -> None:
        """Writes the measurements to disk if any were made since the last write."""
        if self._changed:
            self._changed = False
            self._disk.write(self._name, {key: self._as_json(one) for key, one in self._read().items()})

    def _read(self) -> dict[str, T]:
        if self._known is None:
            try:
                self._known = {key: self._from_json(each) for key, each in (self._disk.read(self._name) or {}).items()}
            except (AttributeError, ValueError, TypeError):  # the file is from another version of memscale
                self._known = {}
        return self._known
