"""`HostParameter`: a parameter that lives on a tier, `Saved`: what autograd saves of it, `Residency`: its use by a run.

A host parameter is an ordinary CPU tensor: the same `nn.Parameter` object as before, over memory of a tier. Optimizers,
`state_dict` and `print` work on it as usual. Its bytes are always on the tier, and are loaded to the device any number
of times; its gradient is copied to the tier.
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
from memscale.runtime.engine.loader import Loadable, LoadState

# The host parameters that a region uses together, by their numbers.
Group = tuple[int, ...]
_numbers = itertools.count()
NEVER = (-1, -1)  # stands for the versions of a parameter that was never loaded
# By the address of the parameter's storage, for all runtimes: a parameter lives on one tier only.
HOST_PARAMETERS: dict[int, HostParameter] = {}


class Mover(Protocol):
    """Moves parameters between their tiers and one device: the interface of `HostParameters` for its parts."""

    def enter(self, residency: Residency, hosts: Sequence[HostParameter]) -> list[torch.Tensor]:
        """Returns the parameters on the device, for a region that runs now."""

    def exit(self, residency: Residency, *, failed: bool = False) -> None:
        """Called when the region has run."""

    def lag(self, sequence: int) -> int:
        """Returns the autograd sequence number for a node that waits for a gradient."""

    def save(self, host: HostParameter, tensor: torch.Tensor | None = None) -> Saved:
        """Returns what autograd saves for the parameter on the device, or for `tensor`, a view of it there."""

    def fetch(self, saved: Saved) -> torch.Tensor:
        """Returns the tensor behind `saved`, on the device."""

    def drop(self, host: HostParameter) -> None:
        """Called when a `Saved` of `host` is dropped; this may happen at any moment."""

    def send(self, host: HostParameter, gradient: torch.Tensor) -> torch.Tensor:
        """Returns `gradient` on the parameter's tier; its values are valid after `received`."""

    def received(self, gradient: torch.Tensor) -> None:
        """Waits for the values of a tensor that `send` returned."""

    def end(self, host: HostParameter) -> list[Event]:
        """Forgets a host parameter that nothing refers to; returns events of copies that may still read its bytes."""


class HostParameter(Loadable):
    """A parameter whose memory is on a tier below the device."""

    def __init__(
        self,
        mover: Mover,
        parameter: torch.Tensor,
        tier: str,
        buffer: Buffer | None,
        like: torch.Tensor,
        data: torch.Tensor,
    ) -> None:
        super().__init__(parameter.nbytes, LoadState.OFFLOADED)
        self.mover = mover
        self.tier = tier
        self.buffer, self.like = buffer, like
        self.number = next(_numbers)
        self.parameter = weakref.ref(parameter)
        self.layout = Layout(parameter.dtype, parameter.size(), parameter.stride(), 0, False, False)
        self.title = ""  # the parameter's name in its region, for messages
        self.address = data.untyped_storage().data_ptr()
        self.group: Group = (self.number,)
        self.loaded = NEVER  # the versions of the parameter and of its bytes on the device at the last load
        self.alive: set[int] = set()  # ids of the live `Saved` objects
        self.fetched: set[int] = set()  # ids of those that backward has fetched since the last load

    @property
    def device(self) -> torch.device:
        """The device to which the parameter is loaded."""
        assert self.like is not None
        return self.like.device

    def version(self) -> int:
        """Returns the version counter of the parameter, or -1 if the parameter is gone."""
        parameter = self.parameter()
        return -1 if parameter is None else version(parameter)

    def __str__(self) -> str:
        """Returns the words by which errors name the parameter."""
        return described(self.title or "a parameter", self.layout.dtype, self.layout.size)

    def loads_into(self, base: torch.Tensor) -> None:
        self.loaded = (self.version(), version(base))

    def is_gone(self) -> None:
        super().is_gone()
        self.fetched.clear()

    def is_fetched(self) -> bool:
        """Whether backward has fetched every `Saved` of the parameter."""
        return self.alive <= self.fetched  # one operation, because a `Saved` may be dropped at any moment

    def changes(self) -> int:
        """Returns how often the parameter was changed on the device since it was loaded."""
        assert self.base is not None
        return version(self.base) - self.loaded[1]

    def forget_changes(self) -> None:
        """Discards changes that a region made to the parameter on the device."""
        assert self.base is not None
        self.loaded = (self.loaded[0], version(self.base))


class Saved:
    """A host parameter, or a view of one, that autograd saved while it was on the device."""

    __slots__ = ("_contents", "_version", "host", "layout")

    def __init__(self, host: HostParameter, layout: Layout) -> None:
        parameter = host.parameter()
        assert parameter is not None
        self.host, self.layout = host, layout
        self._contents = parameter.detach()  # keeps the present memory even if the parameter gets another one
        self._version = version(parameter) + host.changes()  # the version after the region's changes are copied back
        host.fetched.discard(id(self))  # an earlier object may have had the same id
        host.alive.add(id(self))

    def check(self) -> None:
        """Raises `CorrectnessError` if the parameter was changed in place after it was saved."""
        if self.host.parameter() is not None and (now := self.host.version()) != self._version:
            raise changed_error(str(self.host), now, self._version)

    def __del__(self) -> None:
        if hasattr(self, "host"):
            self.host.alive.discard(id(self))
            self.host.mover.drop(self.host)


def host_parameter_of(
    parameter: torch.Tensor, by_storage: Mapping[int, HostParameter] = HOST_PARAMETERS
) -> HostParameter | None:
    """Returns the entry of `parameter` in the table `by_storage`, or None for an ordinary parameter."""
    storage = parameter.untyped_storage()
    host = by_storage.get(storage._cdata)
    if host is None or host.parameter() is not parameter:
        return None
    # `share_memory_()` replaces the memory of a storage and keeps the storage object.
    return host if storage.data_ptr() == host.address else None


class Residency:
    """A run of a region: its host parameters on the device, and whether it is the first run."""

    __slots__ = ("__weakref__", "hosts", "is_first", "loaded")

    def __init__(self) -> None:
        self.is_first = False
        self.hosts: Sequence[HostParameter] = ()
        self.loaded: dict[int, HostParameter] = {}

    def begin(self, hosts: Sequence[HostParameter]) -> None:
        """Called when the region begins to run with `hosts`."""
        self.hosts = hosts
        running[weakref.ref(self, _forget)] = None

    def end(self) -> None:
        """Called when the region has ended."""
        running.pop(weakref.ref(self), None)


# The running residencies of all engines and threads. Weak: after a KeyboardInterrupt `end` may never be called.
running: dict[weakref.ref[Residency], None] = {}


def _forget(over: weakref.ref[Residency]) -> None:
    running.pop(over, None)


def _residencies() -> list[Residency]:
    return [residency for reference in tuple(running) if (residency := reference()) is not None]


def any_is_running() -> bool:
    """Whether a region in any thread has host parameters on a device."""
    return bool(running)


def host_parameter_on_device(tensor: torch.Tensor) -> HostParameter | None:
    """Returns the `HostParameter` of the parameter that a running region has on the device as `tensor` or its base."""
    if not running:
        return None
    key = tensor.untyped_storage()._cdata
    host = next((residency.loaded[key] for residency in _residencies() if key in residency.loaded), None)
    return None if host is None or host.parameter() is None else host


def is_used(host: HostParameter) -> bool:
    """Whether a running region has the parameter on the device."""
    return any(host in residency.hosts for residency in _residencies())
