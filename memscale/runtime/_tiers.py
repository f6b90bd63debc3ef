"""The names of the places where moved bytes can live."""

from __future__ import annotations

from collections.abc import Sequence

from memscale._errors import ConfigError

TIERS = ("pinned", "pageable", "disk")
"""Every tier that some device has, nearest first."""


def check_tier(where: str, tier: object) -> None:
    """Raise `ConfigError`, which begins with `where`, unless `tier` is the name of a tier or ``"auto"``."""
    if tier not in ("auto", *TIERS):
        names = ", ".join(map(repr, ("auto", *TIERS)))
        raise ConfigError(f"{where} must be the name of a memory tier, one of {names}, got {tier!r}")


def at_or_below(tiers: Sequence[str], tier: str) -> list[str]:
    """Those of `tiers` that come at or after `tier`, which need not be one of them."""
    first = 0 if tier == "auto" else TIERS.index(tier)
    return [name for name in tiers if TIERS.index(name) >= first]
