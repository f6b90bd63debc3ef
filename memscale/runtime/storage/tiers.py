"""The tiers of a device in their order, and what one of them holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memscale.core import TIERS


def at_or_below(tiers: Sequence[str], tier: str) -> list[str]:
    """Those of `tiers` that come at or after `tier`, which need not be one of them."""
    first = 0 if tier == "auto" else TIERS.index(tier)
    return [name for name in tiers if TIERS.index(name) >= first]


@dataclasses.dataclass(frozen=True)
class TierUse:
    """What a tier holds, and held at most.

    >>> TierUse(high_water_bytes=70, reserved_bytes=100, free_bytes=60, largest_free_bytes=45).fragmentation
    0.25

    Attributes:
        high_water_bytes: the most that it held at once.
        reserved_bytes: what it has taken from the system.
        free_bytes: those of them that nothing lies on now.
        largest_free_bytes: the most of these in one piece.
    """

    high_water_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int = 0
    largest_free_bytes: int = 0

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes that is not in one piece; 0 where none is free."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0
