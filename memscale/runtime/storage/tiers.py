"""`TierUse` and the order of tiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memscale.core import TIERS


def at_or_below(tiers: Sequence[str], tier: str) -> list[str]:
    """Returns those of `tiers` that are `tier` or lower; `tier` need not be among them."""
    first = 0 if tier == "auto" else TIERS.index(tier)
    return [name for name in tiers if TIERS.index(name) >= first]


@dataclasses.dataclass(frozen=True)
class TierUse:
    """The bytes that a tier holds now, and the most that it held.

    >>> TierUse(high_water_bytes=70, reserved_bytes=100, free_bytes=60, largest_free_bytes=45).fragmentation
    0.25

    Attributes:
        high_water_bytes: the most bytes held at once.
        reserved_bytes: bytes taken from the system.
        free_bytes: reserved bytes that are free now.
        largest_free_bytes: the size of the largest free piece.
    """

    high_water_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int = 0
    largest_free_bytes: int = 0

    @property
    def fragmentation(self) -> float:
        """The share of the free bytes outside the largest free piece; 0 if no byte is free."""
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0
