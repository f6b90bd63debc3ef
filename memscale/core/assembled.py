"""Functions that say what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class Assembled:
    """A function made of others, and perhaps of a module. Whoever looks for what it depends on goes on at its parts."""

    def parts(self) -> tuple[Any, ...]:
        """What is called in the end."""
        raise NotImplementedError

    def reassembled(self, remap: Callable[[Any], Any]) -> Any:
        """The same of other parts, those that `remap` gives: as a copy of a module needs it."""
        raise NotImplementedError


def assembled_in(thing: Any) -> Iterator[Assembled]:
    """`thing` and all that it is made of, outermost first; without what modules among them call."""
    if isinstance(thing, Assembled):
        yield thing
        for part in thing.parts():
            yield from assembled_in(part)


def is_of_modules(thing: Any) -> bool:
    """Whether `thing` is a module, or made of modules only."""
    if thing is None or isinstance(thing, nn.Module):
        return True
    return isinstance(thing, Assembled) and all(map(is_of_modules, thing.parts()))


def modules_in(thing: Any) -> Iterator[nn.Module]:
    """The modules that `thing` is made of."""
    if isinstance(thing, nn.Module):
        yield thing
    elif isinstance(thing, Assembled):
        for part in thing.parts():
            yield from modules_in(part)
