"""A profile as one HTML file that needs nothing else: no network, no fonts, no library."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from os import PathLike

from memscale.core import format_bytes, format_flops, format_seconds
from memscale.hardware import Hardware
from memscale.reports.chart import chart
from memscale.reports.module_tree import ROOT, TOP, Branch, Held, module_tree
from memscale.reports.page import (
    PAGES,
    SCRIPT,
    by_category,
    checked_target,
    chip,
    header,
    listed,
    number,
    shares,
    write_page,
)
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
    target = checked_target(path, "Profile.html", PAGES, "use plot() for a picture")
    title = f"{format_bytes(profile.peak_bytes)}: memory of a training step"
    write_page(target, title, _body(profile), script=SCRIPT)


def _body(profile: Profile) -> Iterator[str]:
    yield "<h1>Peak memory of a training step</h1>"
    yield f'<p class="peak">{format_bytes(profile.peak_bytes)}</p>'
    for fact in (str(profile.moment), *facts(profile)):
        yield f'<p class="facts">{escape(fact)}</p>'
    yield chart(profile)
    yield from by_category("at the peak", profile.by_category, profile.peak_bytes)
    yield from _modules(profile)
    yield from _tensors(profile)
    yield from listed(profile.notes)
    yield "<h2>Hardware</h2>"
    yield from _hardware(profile.hardware)


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
        + shares(list(zip(("parameter", "activation"), part.held, strict=True)), peak_bytes)
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
    yield header(">count", ">each", ">together", "category", "tensor", "made by", "path")
    for holding, path, count in alike(profile)[:_TENSORS]:
        tensor = f"{holding.dtype}{list(holding.shape)}" if holding.dtype else ""
        yield (
            f"<tr>{number(f'{count}+' if is_cut(profile, holding) else str(count))}"
            f"{number(format_bytes(holding.nbytes))}{number(format_bytes(holding.nbytes * count))}"
            f"<td>{chip(holding.category)}{escape(holding.category)}</td><td>{escape(tensor)}</td>"
            f"<td><code>{escape(holding.op)}</code> {escape(holding.phase)}</td>"
            f'<td class="path">{escape(path or TOP)}</td></tr>'
        )
    yield "</table></div>"


def _hardware(hardware: Hardware) -> Iterator[str]:
    bandwidth = hardware.bandwidth_bytes_per_second
    known = {
        "name": hardware.name,
        "device type": hardware.device_type,
        "memory": format_bytes(hardware.memory_bytes),
        "usable for tensors": format_bytes(hardware.usable_bytes),
        "compute capability": ".".join(map(str, hardware.capability)) if hardware.capability else "",
        **{f"{dtype} per second": format_flops(rate) for dtype, rate in hardware.flops_per_second.items()},
        "memory bandwidth per second": format_bytes(bandwidth) if bandwidth else "",
        "speeds": ("measured here" if hardware.measured else "from the data sheet")
        if hardware.flops_per_second
        else "not known",
    }
    yield "<table>"
    for name, value in known.items():
        if value:
            yield f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
    yield "</table>"
