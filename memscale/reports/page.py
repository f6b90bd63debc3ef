"""What HTML reports have in common: where they are written, how they look and move; nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path

from memscale.core import ConfigError, format_bytes
from memscale.reports.drawing import COLOURS, css_name
from memscale.reports.text import percent

STYLE = f":root {{ {' '.join(f'{css_name(category)}: {colour};' for category, colour in COLOURS.items())} }}"
STYLE += """
:root {
  color-scheme: light dark;
  --paper: #ffffff; --ink: #1f2328; --faint: #6b7280; --line: #e2e5e9; --hover: #f3f5f8;
}
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171c; --ink: #e6e8eb; --faint: #98a1ad; --line: #2c323b; --hover: #1d222a;
    --input: #d5d9df; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1rem; font-weight: 500; color: var(--faint); }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.1rem; }
.peak { margin: 0; font-size: 2.2rem; font-weight: 650; }
.facts { margin: .1rem 0; color: var(--faint); }
code, .path { font-family: ui-monospace, monospace; font-size: .9em; }
svg { display: block; width: 100%; height: auto; margin-top: 1rem; outline-offset: 2px; }
svg text { fill: var(--faint); font-size: 12px; }
svg .grid { stroke: var(--line); }
svg .phase { stroke: var(--ink); stroke-opacity: .5; stroke-width: .7; }
svg .top { stroke: var(--ink); stroke-dasharray: 5 3; }
svg .dot { fill: var(--ink); }
svg .cursor { stroke: var(--ink); visibility: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; margin: .4rem 0 0; padding: 0; list-style: none; }
.legend b, .number { font-variant-numeric: tabular-nums; }
.chip { display: inline-block; width: .8em; height: .8em; margin-right: .4em; border-radius: 2px; }
.scroll { max-height: 34rem; overflow: auto; }
table { width: 100%; border-collapse: collapse; }
th { position: sticky; top: 0; background: var(--paper); color: var(--faint); font-weight: 500; text-align: left; }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.wide { width: 40%; }
td.path, td code { white-space: normal; overflow-wrap: anywhere; }
.number { text-align: right; }
.bar { display: flex; height: .7em; background: var(--hover); border-radius: 2px; overflow: hidden; }
.bar i { height: 100%; }
.row { display: grid; grid-template-columns: 1fr 6.5rem 6.5rem 6.5rem 4rem 6rem 9rem; gap: .8rem; align-items: center;
  padding: .12rem 0; border-bottom: 1px solid var(--line); }
.tree { overflow-x: auto; }
.tree > * { min-width: 50rem; }
.row .path { overflow-wrap: anywhere; }
.row:hover, tr:hover td { background: var(--hover); }
summary { cursor: pointer; list-style: none; }
summary::-webkit-details-marker { display: none; }
summary .path::before { content: "▸ "; color: var(--faint); }
details[open] > summary .path::before { content: "▾ "; }
.leaf .path::before { content: "  "; white-space: pre; }
.head { color: var(--faint); }
"""

SCRIPT = """
const data = JSON.parse(document.getElementById("timeline").textContent);
const svg = document.getElementById("chart"), cursor = svg.querySelector(".cursor");
const values = [...document.querySelectorAll(".legend b")], moment = document.getElementById("moment");
let at = data.peak;
const digits = (value) => value.toFixed(value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2);
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; value >= 999.5 && power < units.length - 1; power++) value /= 1024;
  return (power ? digits(value) : value.toFixed(0)) + " " + units[power];
}
function show(column) {
  at = Math.max(0, Math.min(data.total.length - 1, column));
  const x = data.left + (at + 0.5) * data.width / data.total.length;
  cursor.setAttribute("x1", x);
  cursor.setAttribute("x2", x);
  cursor.style.visibility = "visible";
  values.forEach((value, index) => { value.textContent = bytes(data.live[index][at]); });
  const position = (at + 0.5) / data.total.length * data.end;
  const phase = data.phases.filter(([, begin]) => begin <= position).pop();
  moment.textContent = `${phase ? phase[0] + ", " : ""}${data.unit ? digits(position) + " " + data.unit
    : "operator " + Math.round(position)}: ${bytes(data.total[at])} live`;
}
svg.addEventListener("pointermove", (event) => {
  const box = svg.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width * data.span - data.left;
  show(Math.floor(x / data.width * data.total.length));
});
svg.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (step) { show(at + step * (event.shiftKey ? 20 : 1)); event.preventDefault(); }
});
"""

#: What the file of a page may end in.
PAGES = (".html", ".htm")


def checked_target(path: str | PathLike[str], caller: str, suffixes: Sequence[str], remedy: str) -> Path:
    """The file to write a report to, a picture or a page.

    Raises:
        ConfigError: it has another suffix, or its folder does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        named = suffixes[0] if ".html" in suffixes else " or ".join(suffixes)
        raise ConfigError(f"{caller}(path) must end in {named}, got {str(path)!r}; {remedy}")
    if not target.parent.is_dir():
        raise ConfigError(f"{caller}(path) must be in a folder that exists, got {str(path)!r}; make the folder first")
    return target


def write_page(target: Path, title: str, body: Iterable[str], *, style: str = "", script: str = "") -> None:
    """Write one HTML file that needs nothing else."""
    lines = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style></head><body>",
        *body,
        f"<script>{script}</script></body></html>" if script else "</body></html>",
    )
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def by_category(heading: str, held_bytes: Mapping[str, int], whole: int) -> Iterator[str]:
    """A table of categories, the largest first."""
    yield f"<h2>By category</h2><table>{header(heading, '>bytes', '>%', '')}"
    for category, nbytes in sorted(held_bytes.items(), key=lambda item: -item[1]):
        yield (
            f"<tr><td>{chip(category)}{escape(category)}</td>{number(format_bytes(nbytes))}"
            f'{number(percent(nbytes, whole))}<td class="wide">{shares([(category, nbytes)], whole)}</td></tr>'
        )
    yield "</table>"


def listed(texts: Sequence[str]) -> Iterator[str]:
    """Notes as a list; nothing where there are none."""
    if texts:
        yield f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def header(*names: str) -> str:
    """A row of headings, on the right where they begin with ``>``."""
    cells = (f'<th class="number">{name[1:]}</th>' if name[:1] == ">" else f"<th>{name}</th>" for name in names)
    return f"<tr>{''.join(cells)}</tr>"


def number(text: str) -> str:
    """A cell with a number."""
    return f'<td class="number">{escape(text)}</td>'


def chip(category: str) -> str:
    """A small square in the colour of a category."""
    return f'<span class="chip" style="background:var({css_name(category)})"></span>'


def shares(parts: Sequence[tuple[str, int]], whole: int) -> str:
    """A bar of a whole, with each part in the colour of its category."""
    widths = (
        f'<i style="width:{100 * nbytes / max(whole, 1):.2f}%;background:var({css_name(category)})"></i>'
        for category, nbytes in parts
        if nbytes
    )
    return f'<div class="bar">{"".join(widths)}</div>'
