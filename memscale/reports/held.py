"""What held memory at a moment, as a page like that of a profile: by category, and by who asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from os import PathLike

from memscale.core import format_bytes
from memscale.reports.page import PAGES, by_category, checked_target, chip, header, listed, number, write_page

#: Together, in how many pieces, what for, the line that asked for it, and its whole stack.
Row = tuple[str, str, str, str, str]


def write_held(
    path: str | PathLike[str], title: str, held_bytes: Mapping[str, int], rows: Sequence[Row], remarks: Sequence[str]
) -> None:
    """Write one HTML file that needs nothing else.

    Raises:
        ConfigError: the suffix is not ``.html``, or the folder does not exist.
    """
    target = checked_target(path, "Explanation.html", PAGES, "print it for a text")
    total = format_bytes(sum(held_bytes.values()))
    body = _body(total, title, held_bytes, rows, remarks)
    write_page(target, f"{total}: memory when an allocation failed", body)


def _body(
    total: str, title: str, held_bytes: Mapping[str, int], rows: Sequence[Row], remarks: Sequence[str]
) -> Iterator[str]:
    yield "<h1>In tensors when an allocation failed</h1>"
    yield f'<p class="peak">{total}</p><p class="facts">{escape(title)}</p>'
    yield from by_category("at the failure", held_bytes, sum(held_bytes.values()))
    if rows:
        yield f'<h2>Asked for by</h2><div class="scroll"><table>{header(">together", ">pieces", "category", "line")}'
        for together, count, category, where, stack in rows:
            line = f'<span class="path">{escape(where)}</span>'
            if stack:
                line = f"<details><summary>{line}</summary><pre>{escape(stack)}</pre></details>"
            kind = f"<td>{chip(category)}{escape(category)}</td>"
            yield f'<tr>{number(together)}{number(count)}{kind}<td class="path">{line}</td></tr>'
        yield "</table></div>"
    yield from listed(remarks)
