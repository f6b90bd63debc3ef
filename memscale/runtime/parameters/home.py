"""A parameter that lives on another tier, and what autograd saves of it.

A parameter at *home* is an ordinary CPU tensor, the same `nn.Parameter` object as before over memory of another tier.
An optimizer, a `state_dict` or a printout work on it as on any other. Its bytes are always on the tier, and come to the
device any number of times; its gradient goes where it lives.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from memscale.core import changed_error, described, version
from memscale.runtime.backends.protocol import Buffer, Event
from memscale.runtime.engine.entry import Layout
from memscale.runtime.engine.loader import Loadable, State

# What a region asks for at once: the numbers of its homes.
Group = tuple[int, ...]
_numbers = itertools.count()
NEVER = (-1, -1)  # the versions of what was not loaded yet
# By the storage of the parameter. Not the engines' own: a parameter has one home, whichever runtime's.
AT_HOME: dict[int, Home] = {}


class Mover(Protocol):
    """What moves parameters between their homes and one device: `Homes`, which stands above this."""

    def enter(self, visit: Visit, homes: Sequence[Home]) -> list[torch.Tensor]:
        """The parameters on the device, for a region that runs now."""

    def exit(self, visit: Visit, *, failed: bool = False) -> None:
        """The region has run."""

    def lag(self, sequence: int) -> int:
        """The place in the order of backward for a node that waits for a gradient."""

    def save(self, home: Home, tensor: torch.Tensor | None = None) -> Saved:
        """What autograd keeps of the parameter on the device, or of `tensor`, a view of it there."""

    def fetch(self, saved: Saved) -> torch.Tensor:
        """What `save` was given, on the device."""

    def drop(self, home: Home) -> None:
        """Called when a `Saved` of `home` goes. May happen at any moment."""

    def send(self, home: Home, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` where the parameter lives; its values are there after `received`."""

    def received(self, gradient: torch.Tensor) -> None:
        """Wait until the values of what `send` returned are there."""

    def end(self, home: Home) -> list[Event]:
        """Forget a home that nothing refers to any more; what may still read its bytes."""


class Home(Loadable):
    """Where a parameter lives."""

    __slots__ = (
        "__weakref__",
        "address",
        "alive",
        "asked",
        "group",
        "layout",
        "loaded",
        "mover",
        "number",
        "parameter",
        "tier",
        "title",
    )

    def __init__(
        self,
        mover: Mover,
        parameter: torch.Tensor,
        tier: str,
        buffer: Buffer | None,
        like: torch.Tensor,
        data: torch.Tensor,
    ) -> None:
        super().__init__(parameter.nbytes, State.AWAY)
        self.mover = mover
        self.tier = tier
        self.buffer, self.like = buffer, like
        self.number = next(_numbers)
        self.parameter = weakref.ref(parameter)
        self.layout = Layout(parameter.dtype, parameter.size(), parameter.stride(), 0, False, False)
        self.title = ""  # what its region calls it, once that has looked
        self.address = data.untyped_storage().data_ptr()
        self.group: Group = (self.number,)
        self.loaded = NEVER  # the versions of the parameter and of its bytes on the device, when these were loaded
        self.alive: set[int] = set()  # each `Saved`, by id
        self.asked: set[int] = set()  # those that backward has asked for since the bytes last came

    @property
    def device(self) -> torch.device:
        """The device that it comes to."""
        assert self.like is not None
        return self.like.device

    def version(self) -> int:
        """The version counter of the parameter."""
        parameter = self.parameter()
        return -1 if parameter is None else version(parameter)

    def __str__(self) -> str:
        """What an error calls the parameter."""
        return described(self.title or "a parameter", self.layout.dtype, self.layout.size)

    def loads_into(self, base: torch.Tensor) -> None:
        self.loaded = (self.version(), version(base))

    def is_gone(self) -> None:
        super().is_gone()
        self.asked.clear()

    def is_asked(self) -> bool:
        """Whether backward has asked for all that autograd keeps of it."""
        return self.alive <= self.asked  # in one go: whatever is alive may end at any moment

    def changes(self) -> int:
        """How often it was changed on the device since it was loaded."""
        assert self.base is not None
        return version(self.base) - self.loaded[1]

    def forget_changes(self) -> None:
        """Leave the parameter as it was before a region changed it on the device."""
        assert self.base is not None
        self.loaded = (self.loaded[0], version(self.base))


class Saved:
    """A parameter, or a view of one, that autograd saved while it was on the device."""

    __slots__ = ("_contents", "_version", "home", "layout")

    def __init__(self, home: Home, layout: Layout) -> None:
        parameter = home.parameter()
        assert parameter is not None
        self.home, self.layout = home, layout
        self._contents = parameter.detach()  # autograd would keep the parameter's memory too, should it get another one
        self._version = version(parameter) + home.changes()  # which come home when the region ends
        home.asked.discard(id(self))  # of one that had this address before
        home.alive.add(id(self))

    def check(self) -> None:
        """Raise `CorrectnessError` if the parameter was changed in place after it was saved."""
        if self.home.parameter() is not None and (now := self.home.version()) != self._version:
            raise changed_error(str(self.home), now, self._version)

    def __del__(self) -> None:
        if hasattr(self, "home"):
            self.home.alive.discard(id(self))
            self.home.mover.drop(self.home)


def home_of(parameter: torch.Tensor, at_home: Mapping[int, Home] = AT_HOME) -> Home | None:
    """Where `parameter` lives, if it is not where it was made, as far as `at_home` knows: all homes, by storage."""
    storage = parameter.untyped_storage()
    home = at_home.get(storage._cdata)
    if home is None or home.parameter() is not parameter:
        return None
    # `share_memory_()` gives a storage other memory, and leaves it the same object.
    return home if storage.data_ptr() == home.address else None


class Visit:
    """One run of a region: what it has on the device, also by the storage there, and whether it is the first run."""

    __slots__ = ("__weakref__", "homes", "is_first", "loaded")

    def __init__(self) -> None:
        self.is_first = False
        self.homes: Sequence[Home] = ()
        self.loaded: dict[int, Home] = {}

    def begin(self, homes: Sequence[Home]) -> None:
        """The region runs, and uses `homes`."""
        self.homes = homes
        running[weakref.ref(self, _forget)] = None

    def end(self) -> None:
        """It does not run any more."""
        running.pop(weakref.ref(self), None)


# Of all engines and threads. Weakly: one that a Ctrl-C kept from ending is over when its frames are.
running: dict[weakref.ref[Visit], None] = {}


def _forget(over: weakref.ref[Visit]) -> None:
    running.pop(over, None)


def _visits() -> list[Visit]:
    return [visit for reference in tuple(running) if (visit := reference()) is not None]


def any_is_running() -> bool:
    """Whether some region, of any thread, has parameters on a device."""
    return bool(running)


def home_on_device(tensor: torch.Tensor) -> Home | None:
    """Where the parameter lives that a running region has on the device as `tensor`, or as what that is a view of."""
    if not running:
        return None
    key = tensor.untyped_storage()._cdata
    home = next((visit.loaded[key] for visit in _visits() if key in visit.loaded), None)
    return None if home is None or home.parameter() is None else home


def is_used(home: Home) -> bool:
    """Whether a running region has it on the device."""
    return any(home in visit.homes for visit in _visits())
