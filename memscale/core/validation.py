"""Checks of a user's settings: each returns a normalized value, or one error lists all bad ones."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from memscale.core.errors import ConfigError


class Misfit(Exception):
    """The rule that a value breaks and the remedy; becomes one line of a ConfigError."""


# A check returns the normalized value, so that equal settings are equal data.
Check = Callable[[object], Any]


def boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise Misfit("must be True or False; pass one of the two")


def integer(low: int, high: int | None = None) -> Check:
    rule = f"at least {low}" if high is None else f"between {low} and {high}"

    def check(value: object) -> int:
        # A bool is an int in Python, and Config(warmup_steps=True) is a mistake.
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise Misfit(f"must be an int {rule}; pass a whole number")
        number = int(value)
        if number < low or (high is not None and number > high):
            raise Misfit(f"must be {rule}; choose a value in that range")
        return number

    return check


def check_count(what: str, value: object, least: int = 1) -> None:
    """Raises `ConfigError`, which begins with `what`, unless `value` is an int (no bool) of at least `least`.

    >>> check_count("profile(accumulate=0)", 0)
    Traceback (most recent call last):
    memscale.core.errors.ConfigError: profile(accumulate=0) must be an int of at least 1
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be an int of at least {least}")


def check_switch(what: str, value: object) -> None:
    """Raises `ConfigError`, which begins with `what`, unless `value` is True or False.

    >>> check_switch("plan(exact='no')", "no")
    Traceback (most recent call last):
    memscale.core.errors.ConfigError: plan(exact='no') must be True or False
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False")


def optional(check: Check) -> Check:
    def check_unless_none(value: object) -> Any:
        return None if value is None else check(value)

    return check_unless_none


def validate(record: Any, checks: Mapping[str, Check]) -> None:
    """Normalizes every field of a frozen `record`, or raises one error for all bad ones."""
    owner = type(record).__name__
    lines = []
    for name in (field.name for field in dataclasses.fields(record)):
        value = getattr(record, name)
        try:
            object.__setattr__(record, name, checks[name](value))
        except Misfit as misfit:
            lines.append(f"{owner}({name}={value!r}) {misfit}")
    if lines:
        raise ConfigError("\n".join(lines))


TIERS = ("pinned", "pageable", "disk")
"""The names of all memory tiers besides the device, fastest first."""


def check_tier(where: str, tier: object) -> None:
    """Raises `ConfigError`, which begins with `where`, unless `tier` is the name of a tier or ``"auto"``."""
    if tier not in ("auto", *TIERS):
        names = ", ".join(map(repr, ("auto", *TIERS)))
        raise ConfigError(f"{where} must be the name of a memory tier, one of {names}, got {tier!r}")
