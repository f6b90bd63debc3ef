"""The names of the places where moved bytes can live."""

from __future__ import annotations

from memscale.core.errors import ConfigError

TIERS = ("pinned", "pageable", "disk")
"""Every tier that some device has, nearest first."""


def check_tier(where: str, tier: object) -> None:
    """Raise `ConfigError`, which begins with `where`, unless `tier` is the name of a tier or ``"auto"``."""
    if tier not in ("auto", *TIERS):
        names = ", ".join(map(repr, ("auto", *TIERS)))
        raise ConfigError(f"{where} must be the name of a memory tier, one of {names}, got {tier!r}")
