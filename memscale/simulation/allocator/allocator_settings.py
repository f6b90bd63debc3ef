"""The settings of PyTorch's CUDA allocator, read from its environment variable.

Source: ``c10/core/AllocatorConfig.h`` and ``.cpp`` and ``c10/cuda/CUDAAllocatorConfig.h`` of PyTorch 2.13.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from memscale.core import ConfigError

_MIB = 1 << 20

MIN_BLOCK_BYTES = 512  # kMinBlockSize
MIN_LARGE_BYTES = 10 * _MIB  # kMinLargeAlloc: a request of at least this size gets a segment of its own size
_LARGE_SEGMENT_BYTES = 20 * _MIB  # the default of large_segment_size_
_INTERVALS = 16  # kRoundUpPowerOfTwoIntervals: powers of two from 1 MiB to 64 GiB

# Options of the variable without effect on the size of device memory (pinned memory, locks, graphs, messages).
_IGNORED = (
    "backend",
    "garbage_collection_threshold",  # of a process with a limit on its share of the device; may free more
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "throw_on_cudamalloc_oom",
)


@dataclass(frozen=True)
class AllocatorSettings:
    """The settings of ``PYTORCH_CUDA_ALLOC_CONF`` that decide how device memory is split into blocks.

    Args:
        expandable_segments: grow one mapped range a pool instead of calling ``cudaMalloc`` for each segment.
        max_split_size_bytes: blocks of this size or more are never split; None means no limit.
        max_non_split_rounding_bytes: the most bytes by which an unsplittable cached block may exceed a request.
        roundup_power2_divisions: steps between two powers of two to which sizes are rounded up, one number
            for each power from 1 MiB to 64 GiB; empty or 0 rounds to 512 bytes.
        memory_fraction: the fraction of the device's memory that the process may take.
        large_segment_bytes: the size of the segment that requests between 1 and 10 MiB share.

    Raises:
        ConfigError: a value is out of PyTorch's range.

    >>> AllocatorSettings.from_env("expandable_segments:True,max_split_size_mb:128").max_split_size_bytes
    134217728
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = _LARGE_SEGMENT_BYTES
    roundup_power2_divisions: tuple[int, ...] = ()
    memory_fraction: float = 1.0
    large_segment_bytes: int = _LARGE_SEGMENT_BYTES

    def __post_init__(self) -> None:
        divisions = self.roundup_power2_divisions
        rules: tuple[tuple[str, bool, str], ...] = (
            ("large_segment_bytes", self.large_segment_bytes > MIN_LARGE_BYTES, "be over 10 MiB"),
            (
                "max_split_size_bytes",
                self.max_split_size_bytes is None or self.max_split_size_bytes >= _LARGE_SEGMENT_BYTES,
                "be None or at least 20 MiB",
            ),
            (
                "max_non_split_rounding_bytes",
                self.max_non_split_rounding_bytes >= _LARGE_SEGMENT_BYTES,
                "be at least 20 MiB",
            ),
            (
                "roundup_power2_divisions",
                len(divisions) in (0, _INTERVALS) and all(n >= 0 and n & (n - 1) == 0 for n in divisions),
                f"be empty or {_INTERVALS} numbers, each 0 or a power of two",
            ),
            ("memory_fraction", 0 <= self.memory_fraction <= 1, "be in [0, 1]"),
        )
        lines = [
            f"AllocatorSettings({name}={getattr(self, name)!r}) must {rule}" for name, holds, rule in rules if not holds
        ]
        if lines:
            raise ConfigError("\n".join(lines))

    @classmethod
    def from_env(cls, text: str) -> AllocatorSettings:
        """Reads the text of ``PYTORCH_CUDA_ALLOC_CONF`` or ``PYTORCH_ALLOC_CONF``, as PyTorch 2.13 reads it.

        Raises:
            ConfigError: an option is unknown, a value is malformed or out of range, or the text selects
                the ``cudaMallocAsync`` backend, whose rules are inside the driver and unknown.
        """
        found: dict[str, Any] = {}
        for item in re.split(r",(?![^\[]*\])", "".join(text.split())):
            if not item:
                continue
            key, _, value = item.partition(":")
            if key == "backend" and value != "native":
                raise ConfigError(f"allocator option {item!r}: only backend:native can be replayed; leave it out")
            if key in _IGNORED:
                continue
            if key not in _READERS:
                near = difflib.get_close_matches(key, [*_READERS, *_IGNORED], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known are {sorted(_READERS)}"
                raise ConfigError(f"unknown allocator option {item!r}{hint}")
            field, read, rule = _READERS[key]
            try:
                found[field] = read(value)
            except (KeyError, ValueError):
                raise ConfigError(f"allocator option {item!r}: {key} takes {rule}") from None
        return cls(**found)

    def rounded_bytes(self, nbytes: int) -> int:
        """Returns the bytes to which the allocator rounds up a request of ``nbytes`` (at least 1)."""
        if nbytes < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        if self.roundup_power2_divisions:
            interval = min(max(nbytes.bit_length() - 21, 0), _INTERVALS - 1)
            divisions = self.roundup_power2_divisions[interval]
            if divisions > 1 and nbytes > MIN_BLOCK_BYTES * divisions:
                step = (1 << (nbytes.bit_length() - 1)) // divisions
                return -(-nbytes // step) * step
        return (nbytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES


def _divisions(value: str) -> tuple[int, ...]:
    """Reads ``4`` (all intervals), or interval sizes in MiB with a step count each: ``[256:1,512:2,>:4]``."""
    if not value.startswith("["):
        if int(value) < 1:
            raise ValueError(value)
        return (int(value),) * _INTERVALS
    divisions = [0] * _INTERVALS
    last = 0
    first_pair = True
    for pair in value[1:-1].split(",") if value != "[]" else []:
        size, _, count = pair.partition(":")
        if size == ">":
            # PyTorch fills the intervals after the last one named, or after that of 1 MiB where none was named.
            divisions[last + 1 :] = [int(count)] * (_INTERVALS - last - 1)
            continue
        if int(size) < 1 or int(size) & (int(size) - 1):
            raise ValueError(size)
        last = min(int(size).bit_length() - 1, _INTERVALS - 1)
        if first_pair:
            divisions[:last] = [int(count)] * last
            first_pair = False
        divisions[last] = int(count)
    return tuple(divisions)


def _mib(value: str) -> int:
    return int(value) * _MIB


_READERS: dict[str, tuple[str, Any, str]] = {
    "expandable_segments": ("expandable_segments", {"True": True, "False": False}.__getitem__, "True or False"),
    "large_segment_size_mb": ("large_segment_bytes", _mib, "a whole number of MiB"),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mib, "a whole number of MiB"),
    "max_split_size_mb": ("max_split_size_bytes", _mib, "a whole number of MiB"),
    "per_process_memory_fraction": ("memory_fraction", float, "a number from 0 to 1"),
    "roundup_power2_divisions": (
        "roundup_power2_divisions",
        _divisions,
        "a power of two, or a list such as [256:1,512:2,>:4] whose sizes in MiB are powers of two",
    ),
}
