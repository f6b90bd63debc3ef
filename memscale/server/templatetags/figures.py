"""Template filters: formatted bytes and seconds, and the style sheet's class of a category."""

from __future__ import annotations

from typing import Any

from django import template

from memscale.core import format_bytes, format_seconds
from memscale.reports import css_class

register = template.Library()


@register.filter
def nbytes(value: float | None) -> str:
    """Formats bytes with a unit; None is an empty cell."""
    return "" if value is None else format_bytes(value)


@register.filter
def change(value: float) -> str:
    """Formats a change in bytes with its sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else '±'}{format_bytes(abs(value))}"


@register.filter
def seconds(value: float | None) -> str:
    """Formats seconds with a unit; None is an empty cell."""
    return "" if value is None else format_seconds(value)


@register.filter
def percent(value: float | None) -> str:
    """Formats a share as a signed percentage with two decimals."""
    return "" if value is None else f"{100 * value:+.2f} %"


register.filter("css", css_class)


@register.filter
def got(mapping: Any, key: Any) -> Any:
    """Returns the value of a key."""
    return mapping.get(key)


@register.filter
def width(value: float, whole: float) -> str:
    """Returns the length of a bar in a picture that is 100 wide."""
    return f"{100 * min(1.0, max(0.0, value / whole if whole else 0.0)):.2f}"
