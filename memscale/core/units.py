"""Formats numbers for people and parses their sizes. All other code counts in bytes and seconds."""

from __future__ import annotations

import math
import numbers
import re
import textwrap
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from memscale.core.errors import ConfigError
from memscale.core.misuse import shown

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_DIGITS = 12  # after the decimal point, enough for one byte in TiB
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def format_bytes(nbytes: float) -> str:
    """Returns `nbytes` with three significant digits in the largest fitting binary unit.

    >>> format_bytes(512), format_bytes(1536), format_bytes(3 * 2**30), format_bytes(1023.9 * 2**20)
    ('512 B', '1.50 KiB', '3.00 GiB', '1.00 GiB')
    """
    return _in_unit(nbytes, None)


def _in_unit(nbytes: float, digits: int | None) -> str:
    """Formats `nbytes` with `digits` digits after the point; `None` means three significant digits."""
    power = 0
    # 999.5 instead of 1024, so that no number has four digits before the point.
    while abs(nbytes) >= 999.5 and power < len(_UNITS) - 1:
        nbytes /= 1024
        power += 1
    if power == 0:
        return f"{nbytes:.0f} B"
    return f"{_three_digits(nbytes) if digits is None else f'{nbytes:.{digits}f}'} {_UNITS[power]}"


def format_unlike(*sizes: float) -> tuple[str, ...]:
    """Formats `sizes` that a sentence compares, with enough digits that different sizes have different texts.

    >>> format_unlike(134 * 2**20, 134.004 * 2**20), format_unlike(3 * 2**30, 2**20)
    (('134.000 MiB', '134.004 MiB'), ('3.00 GiB', '1.00 MiB'))
    """
    texts = tuple(map(format_bytes, sizes))
    digits = 0
    while len(set(texts)) < len(set(sizes)) and digits < _MOST_DIGITS:
        digits += 1
        texts = tuple(_in_unit(nbytes, digits) for nbytes in sizes)
    return texts


def format_seconds(seconds: float) -> str:
    """Returns `seconds` with three significant digits in s, ms or µs.

    >>> format_seconds(0.25), format_seconds(3.14159), format_seconds(4.2e-6)
    ('250 ms', '3.14 s', '4.20 µs')
    """
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds * 1e6)} µs"


def format_flops(flops: float) -> str:
    """Returns a number of floating point operations with three significant digits and a decimal prefix.

    >>> format_flops(12), format_flops(4.096e9), format_flops(9.999e11)
    ('12 FLOP', '4.10 GFLOP', '1.00 TFLOP')
    """
    power = 0
    while flops >= 999.5 and power < len(_PREFIXES) - 1:
        flops /= 1000
        power += 1
    return f"{flops:.0f} FLOP" if power == 0 else f"{_three_digits(flops)} {_PREFIXES[power]}FLOP"


def format_count(value: float) -> str:
    """Returns a number with three significant digits and a prefix for powers of 1000.

    >>> format_count(1234.0), format_count(0.5), format_count(2.5e10)
    ('1.23 k', '0.5', '25 B')
    """
    for power, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= power:
            return f"{value / power:.3g}{name}"
    return f"{value:.3g}"


def _three_digits(value: float) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}"


def aligned(rows: Sequence[Sequence[str]], sides: str, gap: str = "  ") -> list[str]:
    """Returns each row as a line, with its columns aligned left (``<``) or right (``>``).

    >>> aligned([("tier", "out"), ("disk", "7")], "<>")
    ['tier  out', 'disk    7']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows)
    return [gap.join(row).rstrip() for row in cells]


def table_lines(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Returns `aligned` rows for a terminal of 80 columns: the last column wraps within itself.

    >>> print("\\n".join(table_lines([("memory", "plan"), ("1 GiB", "checkpoint() on layers.* " * 4)], "><")))
    memory  plan
     1 GiB  checkpoint() on layers.* checkpoint() on layers.* checkpoint() on
            layers.* checkpoint() on layers.*
    """
    heads = [line[:-1] for line in aligned([(*row[:-1], "|") for row in rows], sides)]
    room = max(_LEAST_ROOM, COLUMNS - len(heads[0]))
    lines = []
    for head, row in zip(heads, rows, strict=True):
        first, *others = textwrap.wrap(row[-1], room, **_WHOLE_WORDS) or [""]
        # A word that is wider than the column has a line of its own.
        lines += [head, f"  {first}"] if len(first) > room else [head + first]
        lines += [" " * len(head) + other for other in others]
    return [line.rstrip() for line in lines]


def wrapped(text: str) -> str:
    """Wraps each line of `text` at 80 columns, with continuations indented by two more spaces.

    A number stays on the line of its unit.

    >>> print(wrapped("  " + "word " * 17))
      word word word word word word word word word word word word word word word
        word word
    >>> print(wrapped("word " * 15 + "5.0 GiB"))
    word word word word word word word word word word word word word word word
      5.0 GiB
    """
    lines = []
    for line in text.split("\n"):
        further = " " * (len(line) - len(line.lstrip()) + 2)
        fits = len(line) <= COLUMNS
        tied = _UNIT.sub("\u00a0", line)
        lines += [line] if fits else textwrap.wrap(tied, COLUMNS, subsequent_indent=further, **_WHOLE_WORDS)
    return "\n".join(lines).replace("\u00a0", " ")


_SIZES = {"b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    # "24G" is binary, as in containers and batch systems.
    _SIZES |= {f"{_prefix}b": 1000**_power} | dict.fromkeys((_prefix, f"{_prefix}i", f"{_prefix}ib"), 1024**_power)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)
_NUMBER = re.compile(r"\s*([+-]?\d+)(\.\d+)?\s*", re.ASCII)
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*", re.ASCII)
_RULE = "bytes as an int, a string such as '6GiB' or '6GB', or a share of the memory: '90%' or a float in (0, 1]"
COLUMNS = 80  # the width of printed tables and texts
_UNIT = re.compile(r"(?<=\d) (?=(?:[KMGT]iB|[mµ]?s|×|%)(?:\W|$))|(?<=×) (?=\d)")  # a space that breaks no line
_WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
_LEAST_ROOM = 24  # the smallest width of a table's last column
_FEWEST_BYTES = 1024  # a smaller int is a slip, since devices have GiB
_GIB = 1 << 30


def budget_bytes(budget: int | float | str, whole_bytes: int, *, argument: str = "budget") -> int:
    """Converts a caller's budget to bytes, rounded down.

    >>> budget_bytes("6GiB", 1) - budget_bytes("6GB", 1)
    442450944
    >>> budget_bytes(0.5, 1001), budget_bytes(4096, 1001)
    (500, 4096)
    >>> budget_bytes("90%", 1000), budget_bytes("0.9", 1000), budget_bytes("1K", 1)
    (900, 900, 1024)

    Args:
        budget: an int is bytes; a string is a number with a unit, ``"6GiB"`` or ``"6G"`` (binary) or ``"6GB"``
            (decimal), in any case; a float in (0, 1] is a share of `whole_bytes`, and so is ``"90%"``. A string
            without a unit means the same as the number.
        whole_bytes: the bytes of the device's memory.
        argument: the name of the argument in messages.

    Raises:
        ConfigError: `budget` is none of these, less than one byte, or an int too small to mean bytes.
    """
    if isinstance(budget, str) and (number := _NUMBER.fullmatch(budget)):
        budget = float(budget) if number[2] else int(budget)
    if isinstance(budget, str) and (share := _SHARE.fullmatch(budget)) and 0 < Decimal(share[1]) <= 100:
        nbytes = int(Decimal(share[1]) * whole_bytes / 100)
    elif isinstance(budget, str):
        nbytes = _parsed_bytes(budget, argument)
    elif isinstance(budget, numbers.Real) and not isinstance(budget, numbers.Integral) and 0 < budget <= 1:
        nbytes = int(budget * whole_bytes)
    elif isinstance(budget, numbers.Integral) and not isinstance(budget, bool):
        nbytes = int(budget)
    else:
        remedy = f"; write '{budget:g}GiB'" if isinstance(budget, float) and 1 < budget < math.inf else ""
        raise ConfigError(f"{argument}={shown(budget)} must be {_RULE}{remedy}")
    if nbytes < 1:
        raise ConfigError(f"{argument}={budget!r} is {nbytes} bytes and must be at least 1; pass {_RULE}")
    if isinstance(budget, numbers.Integral) and nbytes < _FEWEST_BYTES and whole_bytes >= _GIB:
        raise ConfigError(f"{argument}={budget!r} is {nbytes} bytes; if GiB are meant, write {argument}='{budget}GiB'")
    return nbytes


def _parsed_bytes(text: str, argument: str) -> int:
    match = _SIZE.fullmatch(text)
    number, unit = match.groups() if match else ("", "")
    if unit.lower() not in _SIZES or not match:
        raise ConfigError(f"{argument}={text!r} must be {_RULE}")
    return int(Decimal(number) * _SIZES[unit.lower()])
