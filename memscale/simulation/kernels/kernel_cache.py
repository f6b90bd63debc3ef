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


class KernelCache(Generic[T]):
    """Measurements of kernels by call signature, for this processor, this PyTorch and this number of threads.

    Args:
        kind: the name of the measured quantity; each kind has a file of its own.
        read: makes a measurement from JSON data.
        write: returns the JSON data of a measurement.
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
        self._name = f"{kind}-{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}"
        self._disk = DiskCache("kernels")
        self._from_json, self._as_json = read, write
        self._known: dict[str, T] | None = None
        self._changed = False
        self._own: set[str] = set()  # keys measured by this object, rather than read from disk

    def get(
        self,
        op: OpOverload,
        args: Any,
        kwargs: Any,
        measure: Callable[[], T],
        again: Callable[[str, T], T] | None = None,
    ) -> T:
        """Returns the measurement of a call with these arguments; `measure` makes it at the first call.

        For each later call with a measurement made by this object, ``again(key, measurement)`` returns the new one.
        """
        called = signature(args, kwargs, [], loose=True)
        try:
            hash(called)  # the repr of an unhashable argument may contain its address, so it is no key
        except TypeError:
            return measure()
        return self.named(repr((op, *called)), measure, again)

    def named(self, key: str, measure: Callable[[], T], again: Callable[[str, T], T] | None = None) -> T:
        """Returns the measurement under `key`; `measure` and `again` act as in `get`."""
        known = self._read()
        if key not in known:
            known[key] = measure()
            self._own.add(key)
            self._changed = True
        elif again is not None and key in self._own:
            known[key] = again(key, known[key])
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
