"""What held memory at a moment, as a page like that of a profile: by category, and by who asked for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path

from memscale.core import ConfigError, format_bytes
from memscale.reports.chart import chip
from memscale.reports.drawing import css_name
from memscale.reports.page import STYLE

# Which colour stands for a category that profiles have not.
_LIKE = {"backward": "gradient"}

#: Together, in how many pieces, what for, the line that asked for it, and its whole stack.
Row = tuple[str, str, str, str, str]


def write_held(
    path: str | PathLike[str],
    title: str,
    by_category: Mapping[str, int],
    rows: Sequence[Row],
    remarks: Sequence[str],
) -> None:
    """Write one HTML file that needs nothing else.

    Raises:
        ConfigError: the suffix is not ``.html``, or the folder does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm") or not target.parent.is_dir():
        raise ConfigError(f"html(path) must end in .html, in a folder that exists, got {str(path)!r}")
    target.write_text("\n".join(_page(title, by_category, rows, remarks)) + "\n", encoding="utf-8")


def _page(title: str, by_category: Mapping[str, int], rows: Sequence[Row], remarks: Sequence[str]) -> Iterator[str]:
    total = sum(by_category.values())
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{format_bytes(total)}: memory when an allocation failed</title><style>{STYLE}</style></head><body>"
    yield "<h1>In tensors when an allocation failed</h1>"
    yield f'<p class="peak">{format_bytes(total)}</p><p class="facts">{escape(title)}</p>'
    yield "<h2>By category</h2><table>"
    yield '<tr><th>at the failure</th><th class="number">bytes</th><th class="number">%</th><th>share</th></tr>'
    for category, nbytes in sorted(by_category.items(), key=lambda item: -item[1]):
        share = 100 * nbytes / max(total, 1)
        colour = css_name(_LIKE.get(category, category))
        bar = f'<div class="bar"><i style="width:{share:.2f}%;background:var({colour})"></i></div>'
        yield (
            f'<tr><td>{_chip(category)}{escape(category)}</td><td class="number">{format_bytes(nbytes)}</td>'
            f'<td class="number">{share:.1f}</td><td class="wide">{bar}</td></tr>'
        )
    yield "</table>"
    if rows:
        yield '<h2>Asked for by</h2><div class="scroll"><table><tr><th class="number">together</th>'
        yield '<th class="number">pieces</th><th>category</th><th>line</th></tr>'
    for together, count, category, where, stack in rows:
        line = f'<span class="path">{escape(where)}</span>'
        if stack:
            line = f"<details><summary>{line}</summary><pre>{escape(stack)}</pre></details>"
        yield (
            f'<tr><td class="number">{together}</td><td class="number">{count}</td>'
            f'<td>{_chip(category)}{escape(category)}</td><td class="path">{line}</td></tr>'
        )
    yield "</table></div>" if rows else ""
    if remarks:
        yield f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(remark)}</li>' for remark in remarks)}</ul>"
    yield "</body></html>"


def _chip(category: str) -> str:
    return chip(_LIKE.get(category, category))
