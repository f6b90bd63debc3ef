"""`AsyncOffloadConfig`: how many bytes and copies the offload engine may have in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from memscale.core import Check, ConfigError, integer, optional, validate
from memscale.runtime.storage.arena import SLAB_BYTES


@dataclass(frozen=True, kw_only=True)
class AsyncOffloadConfig:
    """Sizes of the engine that copies tensors off the device while it computes.

    Args:
        pool_bytes: the most bytes of pinned host memory; at least 1. None is as much as the copies need and the host
            has.
        prefetch_depth: how many tensors may be on their way back at once; 0 makes copies synchronous.
        min_bytes: smaller tensors stay on the device; at least 0, and at most ``pool_bytes`` if that is given.
        streams: copy streams, shared by both directions; 1 to 16. 2 gives one to each direction.

    Raises:
        ConfigError: a field has a wrong type or is out of range; the message names all such fields.

    >>> AsyncOffloadConfig(prefetch_depth=0).streams
    2
    """

    pool_bytes: int | None = None
    prefetch_depth: int = 2
    min_bytes: int = 1024**2
    streams: int = 2

    def __post_init__(self) -> None:
        validate(self, _CHECKS)
        if self.pool_bytes is not None and self.min_bytes > self.pool_bytes:
            raise ConfigError(
                f"AsyncOffloadConfig(min_bytes={self.min_bytes}) must be at most "
                f"pool_bytes={self.pool_bytes}, or nothing could ever move; lower it or raise pool_bytes"
            )

    @classmethod
    def sized(cls, pinned_bytes: int, *, prefetch_depth: int) -> AsyncOffloadConfig:
        """Returns a config for a step that has at most `pinned_bytes` in pinned memory at once.

        >>> AsyncOffloadConfig.sized(5 * 10**9, prefetch_depth=3).pool_bytes / 2**20
        5120.0
        """
        # Whole slabs, and one more for fragmentation.
        return cls(pool_bytes=(-(-pinned_bytes // SLAB_BYTES) + 1) * SLAB_BYTES, prefetch_depth=prefetch_depth)


_CHECKS: Mapping[str, Check] = {
    "pool_bytes": optional(integer(1)),
    "prefetch_depth": integer(0),
    "min_bytes": integer(0),
    "streams": integer(1, 16),
}
