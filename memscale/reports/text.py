"""Prints profiles as compact tables for a terminal, at most 80 columns wide and about 35 lines long."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence

from memscale.core import COLUMNS, ConfigError, aligned, check_count, format_bytes, format_flops, format_seconds
from memscale.hardware import COLLECTIVES
from memscale.reports.drawing import percent
from memscale.reports.module_tree import ROOT, TOP, Held, module_tree, stacks, summary
from memscale.simulation import Holding, Profile, ProfileDiff, differences

_LINES = 35
_MODULES = 10
_TABLES = 19  # rows of the two tables of categories and modules together, which leaves room for a note
_TENSORS = 7
_WORTH_A_WORD = 0.01
_CAUSES = {"input": "copies back", "room": "room", "disk": "the disk", "host": "the host"}
_CAUSES |= {"stream": "another stream"} | {kind: f"{kind.removesuffix('s')}s" for kind in COLLECTIVES}


def profile_text(profile: Profile) -> str:
    """Returns the text of ``str(profile)``."""
    parts = sorted(profile.by_category.items(), key=lambda item: -item[1])
    held = [(name, format_bytes(nbytes), percent(nbytes, profile.peak_bytes)) for name, nbytes in parts if nbytes]
    lines = [
        f"peak {format_bytes(profile.peak_bytes)} {profile.moment}",
        *(f"  {fact}" for fact in facts(profile)),
        *_table(("at the peak", "bytes", "%"), held),
        *_module_table(profile, min(_MODULES, _TABLES - len(profile.by_category))),
        *_tensor_table(profile),
    ]
    return "\n".join([*lines, *_notes(profile.notes, _LINES - len(lines))])


def facts(profile: Profile) -> list[str]:
    """Returns lines about the peak relative to the device, the moment of the peak, and the totals of the step."""
    usable_bytes = profile.hardware.usable_bytes
    share = percent(profile.peak_bytes, usable_bytes)
    device = [f"{share} % of {format_bytes(usable_bytes)} on {profile.hardware.name}"]
    if profile.reserved_peak_bytes is not None:
        device.append(f"the allocator reserves {format_bytes(profile.reserved_peak_bytes)}")
    moved = []
    if profile.by_tier:
        tiers = ", ".join(f"{format_bytes(nbytes)} {tier}" for tier, nbytes in profile.by_tier.items())
        moved.append(f"on other tiers at most {tiers}")
    if profile.prefetch_depth:
        moved.append(f"prefetch depth {profile.prefetch_depth}")
    how, bound = ("simulated", "at least ") if profile.method == "static" else ("measured", "")
    step = [how, f"first step {format_bytes(profile.first_step_peak_bytes)}"]
    if profile.step_seconds is not None:
        step.append(f"time {bound}{format_seconds(profile.step_seconds)}")
        moved += _waits(profile, profile.step_seconds)
    if profile.flops:
        step.append(format_flops(profile.flops))
    return ["; ".join(line) for line in (device, step, moved) if line]


def _waits(profile: Profile, step_seconds: float) -> list[str]:
    """Returns the causes and shares of the step's time in which the device waits, without negligible ones."""
    shown = [
        f"{format_seconds(seconds)} for {_CAUSES[cause]}"
        for cause, seconds in sorted(profile.exposed_seconds.items(), key=lambda item: -item[1])
        if seconds >= _WORTH_A_WORD * step_seconds
    ]
    return [f"waits {', '.join(shown)}"] if shown else []


def diff_text(diff: ProfileDiff) -> str:
    """Returns the text of ``str(diff)``."""
    before, after = diff.before, diff.after
    peaks = f"peak {format_bytes(before.peak_bytes)} -> {format_bytes(after.peak_bytes)}"
    ratio = after.peak_bytes / before.peak_bytes if before.peak_bytes else float("inf")
    change = f"{signed(diff.peak_bytes)}, {ratio:.3f} ×"
    lines = [f"{peaks} ({change if diff.peak_bytes else 'the same'}), now {after.moment}"]
    if before.step_seconds and after.step_seconds:
        times = f"{format_seconds(before.step_seconds)} -> {format_seconds(after.step_seconds)}"
        lines.append(f"  time {times} ({after.step_seconds / before.step_seconds:.3f} ×)")
    rows = [
        (name, *(_or_dash(profile.by_category.get(name, 0)) for profile in (before, after)), signed(nbytes))
        for name, nbytes in sorted(diff.by_category.items(), key=lambda item: -abs(item[1]))
        if nbytes
    ]
    lines += _table(("at the peaks", "before", "after", "change"), rows)
    return "\n".join([*lines, *_changed_modules(before, after)])


def _changed_modules(before: Profile, after: Profile) -> list[str]:
    if not before.categories_by_module or not after.categories_by_module:
        return []  # unknown for a measured step
    paths = patterns(after, before)
    first, second = before.categories_by_module, after.categories_by_module
    changes = [(path, differences(first.get(path, {}), second.get(path, {}))) for path in {**first, **second}]
    root = module_tree(((paths[path], Held.of(parts)) for path, parts in changes), ())
    rows = [
        (part.path or ROOT, *map(signed, part.held), signed(part.held.nbytes))
        for part in summary(root, _MODULES)
        if any(part.held)
    ]
    return _table(("by module", "resident", "transient", "change"), rows)


def patterns(*profiles: Profile) -> dict[str, str]:
    """Maps each module path of the profiles to the pattern of equal layers that it belongs to."""
    parameter_bytes = {path: 0 for profile in profiles for path in profile.seconds_by_module}
    for profile in profiles:
        for path, parts in profile.categories_by_module.items():
            parameter_bytes[path] = max(parameter_bytes.get(path, 0), parts.get("parameter", 0))
    return stacks(parameter_bytes)


def alike(profile: Profile) -> list[tuple[Holding, str, int]]:
    """Groups storages at the peak by equal layers. Returns (one storage, pattern of modules, count), largest first."""
    paths = patterns(profile)
    groups: dict[tuple[object, ...], list[Holding]] = defaultdict(list)
    for holding in profile.holdings:
        module, name = holding.path, ""
        if module not in paths:  # the path of a parameter, or of a tensor that belongs to one
            module, _, name = module.rpartition(".")
        path = ".".join(filter(None, (paths.get(module, module), name)))
        groups[path, holding.nbytes, holding.category, holding.op, holding.shape, holding.dtype].append(holding)
    found = [(members[0], str(key[0]), len(members)) for key, members in groups.items()]
    return sorted(found, key=lambda group: -group[0].nbytes * group[2])


def is_cut(profile: Profile, holding: Holding) -> bool:
    """Whether ``profile.holdings``, which lists only the largest storages, may lack others like this one."""
    listed_bytes = sum(other.nbytes for other in profile.holdings) + profile.by_category.get("rounding", 0)
    return listed_bytes < profile.peak_bytes and holding.nbytes == profile.holdings[-1].nbytes


def module_text(profile: Profile, by: str, rows: int) -> str:
    """Returns the text of ``Profile.table``.

    Raises:
        ConfigError: `by` or `rows` is wrong, or the profile has no times to sort by.
    """
    if by not in ("bytes", "time"):
        raise ConfigError(f"table(by={by!r}) must be 'bytes' or 'time'")
    check_count(f"table(rows={rows!r})", rows)
    if by == "time" and not profile.seconds_by_module:
        raise ConfigError(
            f"table(by='time') has no times: the speed of {profile.hardware.name} is not known, or the step was "
            "measured as a whole; simulate it for a card, or with hardware=Hardware.measure()"
        )
    return "\n".join(_module_table(profile, rows, longest_first=by == "time"))


def _module_table(profile: Profile, most: int, *, longest_first: bool = False) -> list[str]:
    paths = patterns(profile)
    root = module_tree(
        ((paths[path], Held.of(parts)) for path, parts in profile.categories_by_module.items()),
        ((paths[path], seconds) for path, seconds in profile.seconds_by_module.items()),
        by_time=longest_first,
    )
    timed = bool(profile.seconds_by_module)
    rows = []
    for part in summary(root, most) if root.weight else ():
        numbers = (*map(_or_dash, part.held), _or_dash(part.held.nbytes), percent(part.held.nbytes, profile.peak_bytes))
        time = [format_seconds(part.seconds) if part.seconds else "-"] if timed else []
        rows.append((part.path or ROOT, *numbers, *time))
    return _table(("by module", "resident", "transient", "total", "%", *(["time"] if timed else [])), rows)


def _tensor_table(profile: Profile) -> list[str]:
    rows = [
        (
            f"{count}{'+' if is_cut(profile, holding) else ''} × {format_bytes(holding.nbytes)}",
            holding.category,
            f"{holding.dtype}{list(holding.shape)}" if holding.dtype else "",
            ": ".join(filter(None, (path or TOP, holding.op.removeprefix("aten::")))),
        )
        for holding, path, count in alike(profile)[:_TENSORS]
    ]
    return ["largest tensors at the peak", *(f"  {line}" for line in _aligned(rows, "><<<"))] if rows else []


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with names on the left and numbers on the right; empty without rows."""
    if not rows:
        return []
    return _aligned([header, *((f"  {name}", *cells) for name, *cells in rows)], "<" + ">" * (len(header) - 1))


def _aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Returns each row as a line, with its columns aligned left (``<``) or right (``>``).

    If the columns do not fit, the widest ones are shortened in the middle of their texts.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * len(widths) > COLUMNS:
        widths[widths.index(max(widths))] -= 1
    cut = [[shortened(cell, width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return aligned(cut, sides)


def shortened(text: str, width: int) -> str:
    """Shortens `text` to at most `width` letters, in the middle, since paths differ at both ends.

    >>> shortened("transformer.h.0.mlp", 12)
    'transf…0.mlp'
    """
    return text if len(text) <= width else f"{text[: width - width // 2]}…{text[len(text) - width // 2 + 1 :]}"


def signed(nbytes: int) -> str:
    """Formats a change in bytes with its sign; no change is a dash.

    >>> signed(-2048), signed(1), signed(0)
    ('-2.00 KiB', '+1 B', '-')
    """
    return f"{'+' if nbytes > 0 else '-'}{format_bytes(abs(nbytes))}" if nbytes else "-"


def _or_dash(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _notes(notes: Sequence[str], room: int) -> list[str]:
    """Returns the notes that fit into `room` lines; if some do not, the last line has their number."""
    lines: list[str] = []
    for at, note in enumerate(notes):
        wrapped = textwrap.wrap(f"note: {note}", COLUMNS, subsequent_indent="  ")
        is_last = at == len(notes) - 1
        if len(lines) + len(wrapped) + (not is_last) > room:
            return [*lines, f"note: {len(notes) - at} more in Profile.notes"]
        lines += wrapped
    return lines
