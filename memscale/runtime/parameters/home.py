"""A parameter that lives on another tier, and what autograd saves of it.

A parameter at *home* is an ordinary CPU tensor, the same `nn.Parameter` object as before over memory of another tier.
An optimizer, a `state_dict` or a printout work on it as on any other. Its bytes on the device are those of an `Entry`
that is always away and may be loaded any number of times; its gradient goes where it lives.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from memscale.core.simulating import simulating
from memscale.core.versions import changed_error, described, version
from memscale.runtime.engine.entry import Entry, Handle, Layout, Record

if TYPE_CHECKING:
    from memscale.runtime.engine.engine import Engine

# What a region asks for at once: the numbers of its homes.
Group = tuple[int, ...]
_numbers = itertools.count()
# By the storage of the parameter. Not the engines' own: a parameter has one home, whichever runtime's.
_at_home: dict[int, Home] = {}


class Home:
    """Where a parameter lives."""

    __slots__ = (
        "__weakref__",
        "address",
        "entry",
        "group",
        "layout",
        "loaded",
        "number",
        "parameter",
        "title",
    )

    def __init__(self, parameter: torch.Tensor, entry: Entry, layout: Layout, data: torch.Tensor) -> None:
        self.number = next(_numbers)
        self.parameter = weakref.ref(parameter)
        self.entry = entry
        self.layout = layout
        self.title = ""  # what its region calls it, once that has looked
        self.address = data.untyped_storage().data_ptr()
        self.group: Group = (self.number,)
        self.loaded = (-1, -1)  # the versions of the parameter and of its bytes on the device, when these were loaded

    @property
    def device(self) -> torch.device:
        """The device that it comes to."""
        assert self.entry.like is not None
        return self.entry.like.device

    def version(self) -> int:
        """The version counter of the parameter."""
        parameter = self.parameter()
        return -1 if parameter is None else version(parameter)

    def __str__(self) -> str:
        """What an error calls the parameter."""
        return described(self.title or "a parameter", self.layout.dtype, self.layout.size)

    @property
    def engine(self) -> Engine:
        """What moves it."""
        return self.entry.engine

    def save(self, tensor: torch.Tensor) -> Handle:
        """A handle on `tensor`, which is the parameter on the device, or a view of that."""
        layout = Layout(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        with self.engine.lock:
            self.engine.copies.pump()
            return self._new_handle(layout)

    def save_whole(self) -> Handle:
        """A handle on the parameter, which is on the device."""
        with self.engine.lock:
            return self._new_handle(self.layout)

    def _new_handle(self, layout: Layout) -> Handle:
        entry, parameter = self.entry, self.parameter()
        assert entry.base is not None
        assert parameter is not None
        changes = version(entry.base) - self.loaded[1]  # which come home when the region leaves
        return Handle(entry, HomeRecord(self, parameter.detach(), layout, version(parameter) + changes))

    def send(self, gradient: torch.Tensor) -> torch.Tensor:
        """See `Gradients.send`."""
        return self.engine.gradients.send(self.parameter(), self.entry.tier, gradient)

    def received(self, gradient: torch.Tensor) -> None:
        """See `Gradients.received`."""
        self.engine.gradients.received(gradient)

    def forget_changes(self) -> None:
        """Leave the parameter as it was before a region changed it on the device."""
        assert self.entry.base is not None
        self.loaded = (self.loaded[0], version(self.entry.base))


class HomeRecord(Record):
    """A parameter, or a view of one, that autograd saved while it was on the device."""

    __slots__ = ("_contents", "_home")

    def __init__(self, home: Home, contents: torch.Tensor, layout: Layout, version: int) -> None:
        super().__init__(contents, version)
        self.alias = None
        self.layout = layout
        self._home = home
        self._contents = contents  # autograd would keep the parameter's memory too, should it get another one

    def check(self) -> None:
        """See `Record.check`."""
        assert self.layout is not None
        if self._home.parameter() is not None and (now := self._home.version()) != self.version:
            raise changed_error(str(self._home), now, self.version)


def home_of(parameter: torch.Tensor) -> Home | None:
    """Where `parameter` lives, if it is not where it was made."""
    storage = parameter.untyped_storage()
    home = registry().get(storage._cdata)
    if home is None or home.parameter() is not parameter:
        return None
    # `share_memory_()` gives a storage other memory, and leaves it the same object.
    return home if storage.data_ptr() == home.address else None


class Visit:
    """One run of a region: what it has on the device, also by the storage there."""

    __slots__ = ("__weakref__", "homes", "loaded")

    def __init__(self) -> None:
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


def home_on_device(tensor: torch.Tensor) -> Home | None:
    """Where the parameter lives that a running region has on the device as `tensor`, or as what that is a view of."""
    if not running:
        return None
    key = tensor.untyped_storage()._cdata
    home = next((visit.loaded[key] for visit in _visits() if key in visit.loaded), None)
    return None if home is None or home.parameter() is None else home


def is_used(home: Home | None) -> bool:
    """Whether a running region has it on the device."""
    return home is not None and any(home in visit.homes for visit in _visits())


def registry() -> dict[int, Home]:
    """All homes, by the storage of the parameter; a simulation has its own."""
    step = simulating()
    return _at_home if step is None else step.homes
