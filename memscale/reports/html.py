"""A profile as one HTML file that needs nothing else: no network, no fonts, no library."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from os import PathLike
from pathlib import Path

from memscale.core import ConfigError, format_bytes, format_flops, format_seconds
from memscale.hardware import Hardware
from memscale.reports.chart import chart, chip
from memscale.reports.drawing import css_name
from memscale.reports.module_tree import ROOT, TOP, Branch, Held, module_tree
from memscale.reports.page import SCRIPT, STYLE
from memscale.reports.text import alike, facts, is_cut, percent
from memscale.simulation import Profile

_TENSORS = 100
_OPEN_DEPTH = 2
_FEW = 12  # submodules that are shown without a click


def write_html(profile: Profile, path: str | PathLike[str]) -> None:
    """Write `Profile.html`'s page.

    Raises:
        ConfigError: the suffix is not ``.html``, or the folder does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"Profile.html(path) must end in .html, got {str(path)!r}; use plot() for a picture")
    if not target.parent.is_dir():
        raise ConfigError(
            f"Profile.html(path) must be in a folder that exists, got {str(path)!r}; make the folder first"
        )
    target.write_text(_page(profile), encoding="utf-8")


def _page(profile: Profile) -> str:
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{format_bytes(profile.peak_bytes)}: memory of a training step</title>",
        f"<style>{STYLE}</style></head><body>",
        "<h1>Peak memory of a training step</h1>",
        f'<p class="peak">{format_bytes(profile.peak_bytes)}</p>',
        f'<p class="facts">{escape(str(profile.moment))}</p>',
        *(f'<p class="facts">{escape(fact)}</p>' for fact in facts(profile)),
        chart(profile),
        "<h2>By category</h2>",
        *_categories(profile),
        *_modules(profile),
        *_tensors(profile),
        *_notes(profile.notes),
        "<h2>Hardware</h2>",
        *_hardware(profile.hardware),
        f"<script>{SCRIPT}</script></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _categories(profile: Profile) -> Iterator[str]:
    yield f"<table>{_header('at the peak', '>bytes', '>%', '')}"
    for category, nbytes in sorted(profile.by_category.items(), key=lambda item: -item[1]):
        bar = _bar([(category, nbytes)], profile.peak_bytes)
        yield (
            f"<tr><td>{chip(category)}{escape(category)}</td>{_number(format_bytes(nbytes))}"
            f'{_number(percent(nbytes, profile.peak_bytes))}<td class="wide">{bar}</td></tr>'
        )
    yield "</table>"


def _modules(profile: Profile) -> Iterator[str]:
    if not profile.categories_by_module:
        return
    root = module_tree(
        ((path, Held.of(parts)) for path, parts in profile.categories_by_module.items()),
        profile.seconds_by_module.items(),
    )
    yield "<h2>By module</h2>"
    yield '<div class="tree"><div class="row head"><span class="path">module</span>'
    yield "".join(f'<span class="number">{name}</span>' for name in ("resident", "transient", "total", "%", "time"))
    yield "<span></span></div>"
    yield from _branch(root, profile.peak_bytes, 0)
    yield "</div>"


def _branch(part: Branch, peak_bytes: int, depth: int) -> Iterator[str]:
    numbers = (
        *(format_bytes(nbytes) if nbytes else "" for nbytes in (*part.held, part.held.nbytes)),
        percent(part.held.nbytes, peak_bytes),
        format_seconds(part.seconds) if part.seconds else "",
    )
    name = part.path.rpartition(".")[2] or ROOT
    row = (
        f'<span class="path" style="padding-left:{1.2 * depth:.1f}em">{escape(name)}</span>'
        + "".join(f'<span class="number">{number}</span>' for number in map(escape, numbers))
        + _bar(list(zip(("parameter", "activation"), part.held, strict=True)), peak_bytes)
    )
    if not part.parts:
        yield f'<div class="row leaf" title="{escape(part.path)}">{row}</div>'
        return
    is_open = " open" if depth < _OPEN_DEPTH or len(part.parts) == 1 else ""
    is_open = is_open if len(part.parts) <= _FEW else ""
    yield f'<details{is_open}><summary class="row" title="{escape(part.path)}">{row}</summary>'
    for child in part.parts:
        yield from _branch(child, peak_bytes, depth + 1)
    yield "</details>"


def _tensors(profile: Profile) -> Iterator[str]:
    if not profile.holdings:
        return
    yield '<h2>Largest tensors at the peak</h2><div class="scroll"><table>'
    yield _header(">count", ">each", ">together", "category", "tensor", "made by", "path")
    for holding, path, count in alike(profile)[:_TENSORS]:
        tensor = f"{holding.dtype}{list(holding.shape)}" if holding.dtype else ""
        yield (
            f"<tr>{_number(f'{count}+' if is_cut(profile, holding) else str(count))}"
            f"{_number(format_bytes(holding.nbytes))}{_number(format_bytes(holding.nbytes * count))}"
            f"<td>{chip(holding.category)}{escape(holding.category)}</td><td>{escape(tensor)}</td>"
            f"<td><code>{escape(holding.op)}</code> {escape(holding.phase)}</td>"
            f'<td class="path">{escape(path or TOP)}</td></tr>'
        )
    yield "</table></div>"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    if notes:
        yield f"<h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"


def _hardware(hardware: Hardware) -> Iterator[str]:
    known = {
        "name": hardware.name,
        "device type": hardware.device_type,
        "memory": format_bytes(hardware.memory_bytes),
        "usable for tensors": format_bytes(hardware.usable_bytes),
        "compute capability": ".".join(map(str, hardware.capability)) if hardware.capability else "",
        **{f"{dtype} per second": format_flops(rate) for dtype, rate in hardware.flops_per_second.items()},
        "memory bandwidth per second": _rate(hardware.bandwidth_bytes_per_second),
        "speeds": ("measured here" if hardware.measured else "from the data sheet")
        if hardware.flops_per_second
        else "not known",
    }
    yield "<table>"
    for name, value in known.items():
        if value:
            yield f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
    yield "</table>"


def _rate(bytes_per_second: float | None) -> str:
    return format_bytes(bytes_per_second) if bytes_per_second else ""


def _header(*names: str) -> str:
    """A row of headings, on the right where they begin with ``>``."""
    cells = (f'<th class="number">{name[1:]}</th>' if name[:1] == ">" else f"<th>{name}</th>" for name in names)
    return f"<tr>{''.join(cells)}</tr>"


def _number(text: str) -> str:
    return f'<td class="number">{escape(text)}</td>'


def _bar(shares: Sequence[tuple[str, int]], whole: int) -> str:
    parts = [
        f'<i style="width:{100 * nbytes / whole:.2f}%;background:var({css_name(category)})"></i>'
        for category, nbytes in shares
        if nbytes
    ]
    return f'<div class="bar">{"".join(parts)}</div>'
