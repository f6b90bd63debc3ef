"""How numbers are written for people. Everything else in memscale counts in bytes and seconds."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def format_bytes(nbytes: float) -> str:
    """Return ``nbytes`` with three digits in the binary unit that suits it.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30), format_bytes(1023.9 * 2**20)
    ('512 B', '1.50 KiB', '3.00 GiB', '1.00 GiB')
    """
    power = 0
    # 999.5 and not 1024, so that no number needs a fourth digit before its point.
    while abs(nbytes) >= 999.5 and power < len(_UNITS) - 1:
        nbytes /= 1024
        power += 1
    if power == 0:
        return f"{nbytes:.0f} B"
    digits = 0 if abs(nbytes) >= 99.95 else 1 if abs(nbytes) >= 9.995 else 2
    return f"{nbytes:.{digits}f} {_UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """Return ``seconds`` in the unit that suits them.

    >>> format_seconds(0.25), format_seconds(3.14159)
    ('250 ms', '3.14 s')
    """
    return f"{seconds:.2f} s" if seconds >= 0.9995 else f"{seconds * 1e3:.0f} ms"
