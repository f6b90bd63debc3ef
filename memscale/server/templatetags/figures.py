"""Filters for templates: bytes and seconds as the rest of memscale writes them, and classes for categories' colours."""

from __future__ import annotations

from typing import Any

from django import template

from memscale.core import format_bytes, format_seconds

register = template.Library()


@register.filter
def nbytes(value: float | None) -> str:
    """Bytes with a unit; an empty cell for None."""
    return "" if value is None else format_bytes(value)


@register.filter
def change(value: float) -> str:
    """A change in bytes, with its sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{format_bytes(abs(value))}"


@register.filter
def seconds(value: float | None) -> str:
    """Seconds with a unit; an empty cell for None."""
    return "" if value is None else format_seconds(value)


@register.filter
def percent(value: float | None) -> str:
    """A share with its sign, to a hundredth of a percent."""
    return "" if value is None else f"{100 * value:+.2f} %"


@register.filter
def css(category: str) -> str:
    """The class that colours a category; one class for all that are not known."""
    from memscale.server.charts import CLASSES

    return CLASSES.get(category, "c-other")


@register.filter
def got(mapping: Any, key: Any) -> Any:
    """The value of a key."""
    return mapping.get(key)


@register.filter
def width(value: float, whole: float) -> str:
    """The length of a bar in a picture that is 100 wide."""
    return f"{100 * min(1.0, max(0.0, value / whole if whole else 0.0)):.2f}"
