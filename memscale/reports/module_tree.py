"""Builds a tree of modules with sums of bytes and seconds, and groups equal layers, for printed tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain, groupby
from typing import NamedTuple

ROOT = "(model)"
TOP = "(top level)"
REST = "(the rest)"
_RESIDENT = ("parameter", "buffer", "optimizer state", "gradient")
_THIN = 0.01  # a part below this share of the whole gets no line
_FEWEST = 3  # the least number of parts to name if not all fit


class Held(NamedTuple):
    """Bytes at the peak: resident (parameters, buffers, optimizer states, gradients) and transient (all others)."""

    resident_bytes: int
    transient_bytes: int

    @classmethod
    def of(cls, by_category: Mapping[str, int]) -> Held:
        """Returns the two sums over the categories.

        >>> Held.of({"parameter": 4, "gradient": 4, "activation": 9})
        Held(resident_bytes=8, transient_bytes=9)
        """
        resident_bytes = sum(by_category.get(category, 0) for category in _RESIDENT)
        return cls(resident_bytes, sum(by_category.values()) - resident_bytes)

    @property
    def nbytes(self) -> int:
        """Both together."""
        return self.resident_bytes + self.transient_bytes


class Branch(NamedTuple):
    """A module, or several equal ones, with its submodules, and their bytes at the peak.

    Attributes:
        path: the path of the module; for several, with their numbers as ``*``, ``{1-6}`` or ``{0,2,4}``.
        held: the bytes, or changes of bytes.
        seconds: the time of its operators.
        weight: the sum of the absolute bytes of its modules, or its seconds if the tree is sorted by time.
        parts: its submodules, heaviest first, and a part for the bytes of the module itself.
    """

    path: str
    held: Held
    seconds: float
    weight: float
    parts: tuple[Branch, ...] = ()


def module_tree(
    held: Iterable[tuple[str, Held]], seconds: Iterable[tuple[str, float]], *, by_time: bool = False
) -> Branch:
    """Returns the root of the tree of modules.

    >>> root = module_tree([("", Held(0, 1)), ("a.b", Held(0, 2)), ("a.c", Held(4, 0))], [("a.b", 0.5)])
    >>> root.held, [(part.path, part.held.nbytes, part.seconds) for part in root.parts]
    (Held(resident_bytes=4, transient_bytes=3), [('a', 6, 0.5), ('(top level)', 1, 0.0)])
    >>> root = module_tree([("a", Held(0, 9)), ("b", Held(0, 1))], [("a", 0.25), ("b", 0.5)], by_time=True)
    >>> [part.path for part in root.parts]
    ['b', 'a']

    Args:
        held, seconds: pairs of a module's path and its own bytes or seconds; equal paths are added.
        by_time: sort parts by time instead of bytes.
    """
    own_bytes: dict[str, list[Held]] = defaultdict(list)
    for path, own in held:
        own_bytes[path].append(own)
    own_seconds: dict[str, float] = defaultdict(float)
    for path, value in seconds:
        own_seconds[path] += value
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for path in (*own_bytes, *own_seconds):
        at = path
        while at:
            above = at.rpartition(".")[0]
            names[above][at] = None
            at = above

    def part(path: str) -> Branch:
        def leaf(name: str) -> Branch:
            weight = own_seconds[path] if by_time else sum(map(abs, chain(*own_bytes[path])))
            return Branch(name, _total(own_bytes[path]), own_seconds[path], weight)

        below = [part(child) for child in names.get(path, ())]
        if not below:
            return leaf(path or TOP)
        if own_bytes[path] or own_seconds[path]:
            below.append(leaf(f"{path} (itself)" if path else TOP))
        return _sum(path, below)

    return part("")


def _sum(path: str, parts: Iterable[Branch]) -> Branch:
    parts = tuple(_largest_first(parts))
    seconds, weight = sum(part.seconds for part in parts), sum(part.weight for part in parts)
    return Branch(path, _total(part.held for part in parts), seconds, weight, parts)


def _total(held: Iterable[Held]) -> Held:
    return Held(*map(sum, zip((0, 0), *held, strict=True)))


def _largest_first(parts: Iterable[Branch]) -> list[Branch]:
    return sorted(parts, key=lambda part: (-part.weight, [name.zfill(6) for name in part.path.split(".")]))


def summary(root: Branch, lines: int) -> list[Branch]:
    """Returns at most `lines` parts that add up to `root`: the largest is split while they fit; the last is the rest.

    The part that takes longest never goes into the rest, but has a line of its own.

    >>> layers = [(f"h.{at}.{part}", Held(0, size)) for at in "01" for part, size in (("mlp", 9), ("attn", 7))]
    >>> root = module_tree([*layers, ("head", Held(8, 0))], [])
    >>> [(part.path, part.held.nbytes) for part in summary(root, 4)]
    [('h.0', 16), ('h.1', 16), ('head', 8)]
    """
    shown, small = [root], []
    while True:
        for part in _largest_first(shown):
            large, lost = _split(part, root.weight, lines - len(shown))
            if large:
                break
        else:
            break
        shown = [*(other for other in shown if other is not part), *large]
        small += lost
    longest = max(small, key=lambda part: part.seconds, default=None)
    if longest is not None and longest.seconds > max((part.seconds for part in shown), default=0.0):
        small = [part for part in small if part is not longest]
        if len(shown) + 2 > lines:
            *shown, least = _largest_first(shown)
            small.append(least)
        shown.append(longest)
    rest = [_sum(REST, small)] if any(part.weight or part.seconds or any(part.held) for part in small) else []
    return [*_largest_first(shown), *rest]


def _split(part: Branch, whole: float, lines: int) -> tuple[list[Branch], list[Branch]]:
    """Returns up to `lines` parts of `part`, and parts too small for a line; empty if a split says too little."""
    large = [below for below in part.parts if below.weight >= _THIN * whole]
    named = large[:lines]
    # The rest of the root joins the rest of the table; the rest of another module is named if it is large enough.
    has_rest = part.path != "" and sum(below.weight for below in part.parts[len(named) :]) >= _THIN * whole
    if has_rest:
        named = large[: lines - 1]
    if not named or len(named) < min(_FEWEST, len(large)):
        return [], []
    others = list(part.parts[len(named) :])
    if has_rest:
        return [*named, _sum(f"{part.path} (rest)", others)._replace(parts=())], []
    return named, others


def stacks(parameter_bytes: Mapping[str, int]) -> dict[str, str]:
    """Returns a pattern for each module path; layers of a stack with equal parameters share a pattern.

    >>> stacks({"h.0.fc": 4, "h.0.act": 0, "h.1.fc": 4, "h.1.act": 0})["h.1.act"]
    'h.*.act'
    >>> found = stacks({"0": 9, "1.fc": 5, "2.fc": 5, "3": 9, "4": 7})
    >>> found["0"], found["2.fc"], found["4"]
    ('{0,3}', '{1-2}.fc', '4')

    Args:
        parameter_bytes: the bytes of each module's own parameters, by its path.
    """
    # For each module: the path from there, and the bytes, of every module with parameters in it.
    inside: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for path, nbytes in parameter_bytes.items():
        names = path.split(".") if path else []
        for depth in range(1, len(names) + 1):
            inside[".".join(names[:depth])] += [(".".join(names[depth:]), nbytes)] if nbytes else []
    found = {"": ""}
    paths = sorted(inside, key=lambda path: path.count("."))
    for _, level in groupby(paths, key=lambda path: path.count(".")):
        numbers: dict[str, set[str]] = defaultdict(set)  # all numbers below a pattern
        groups: dict[tuple[str, object], set[str]] = defaultdict(set)  # those of equal modules, or a single name
        of = {}
        for path in level:
            above, _, name = path.rpartition(".")
            of[path] = found[above], tuple(sorted(inside[path])) if name.isdecimal() else name
            groups[of[path]].add(name)
            numbers[found[above]].update({name} if name.isdecimal() else ())
        for path, group in of.items():
            alike, above = groups[group], group[0]
            name = "*" if len(alike) > 1 and alike == numbers[above] else _numbers(alike)
            found[path] = f"{above}.{name}" if above else name
    return found


def _numbers(names: Collection[str]) -> str:
    """Returns the name of a module, or of several by their numbers."""
    if len(names) == 1:
        return next(iter(names))
    numbers = sorted(map(int, names))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}-{numbers[-1]}}}"
    shown = numbers if len(numbers) <= 4 else [*numbers[:2], "…", numbers[-1]]
    return f"{{{','.join(map(str, shown))}}}"
