"""`Assembled`: functions that list the functions and modules that they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class Assembled:
    """A function that calls other functions or modules, its parts. Captures of the function follow its parts."""

    def parts(self) -> tuple[Any, ...]:
        """Returns the functions and modules that this function calls."""
        raise NotImplementedError

    def reassembled(self, remap: Callable[[Any], Any]) -> Any:
        """Returns a copy with each part replaced by ``remap(part)``, as needed for a copy of a module."""
        raise NotImplementedError


def assembled_in(thing: Any) -> Iterator[Assembled]:
    """Yields the `Assembled` functions in `thing`, outermost first, without those inside its modules."""
    if isinstance(thing, Assembled):
        yield thing
        for part in thing.parts():
            yield from assembled_in(part)


def is_of_modules(thing: Any) -> bool:
    """Whether `thing` is a module, or an `Assembled` function all of whose parts are."""
    if thing is None or isinstance(thing, nn.Module):
        return True
    return isinstance(thing, Assembled) and all(map(is_of_modules, thing.parts()))


def modules_in(thing: Any) -> Iterator[nn.Module]:
    """Yields the modules in `thing` and its parts."""
    if isinstance(thing, nn.Module):
        yield thing
    elif isinstance(thing, Assembled):
        for part in thing.parts():
            yield from modules_in(part)
