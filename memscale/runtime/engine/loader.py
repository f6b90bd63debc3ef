"""`Loader`: brings the bytes of a tier to the device when they are requested, and frees them there."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable

import torch

from memscale.runtime.backends.protocol import ALIGNMENT, Backend, Buffer, Event
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.transfers import Transfers


class LoadState(enum.Enum):
    """The place of loaded bytes."""

    DEVICE = "where they were"
    LEAVING = "on the device, with a copy to a tier in flight"
    OFFLOADED = "on a tier"
    BACK = "on a tier, and on the device or in a copy to it"
    KEPT = "on the device, in the engine's own memory, because no tier could take them"


class Loadable:
    """Bytes with a place on a tier, now or later, that may be loaded to the device any number of times."""

    buffer: Buffer | None = None
    base: torch.Tensor | None = None  # all the bytes, on the device
    like: torch.Tensor | None = None  # an empty tensor of the device
    arrival: Copy | None = None

    def __init__(self, nbytes: int, state: LoadState) -> None:
        self.nbytes = nbytes
        self.state = state

    def copies(self) -> tuple[Copy, ...]:
        """Returns the last copy requested in each direction."""
        return () if self.arrival is None else (self.arrival,)

    def written(self) -> list[Event]:
        """Returns the events after which the bytes are on the tier."""
        return []

    def loads_into(self, base: torch.Tensor) -> None:
        """Called before a load to `base` is requested."""

    def is_gone(self) -> None:
        """Called when the memory on the device belongs to this object no longer."""
        self.base = None
        self.state = LoadState.OFFLOADED

    def events(self) -> list[Event]:
        """Returns the end events of the copies that have started."""
        return [copy.event for copy in self.copies() if copy.event is not None]

    def is_moving(self) -> bool:
        """Whether a copy of the bytes is in flight, so that their device memory cannot be freed yet."""
        return self.base is not None and any(copy.is_under_way() for copy in self.copies())


class Loader:
    """Loads bytes to the device and keeps a list of what is loaded. The engine's lock is held in every call."""

    def __init__(self, backend: Backend, transfers: Transfers) -> None:
        self._backend = backend
        self._transfers = transfers
        self.back: dict[Loadable, None] = {}

    def load(
        self, item: Loadable, *, started: Callable[[Event], None], seconds: float = 0.0, group: Hashable | None = None
    ) -> None:
        """Requests the bytes of an item on a tier, which are needed in about `seconds`, together with their `group`."""
        assert item.buffer is not None
        assert item.like is not None
        room = item.nbytes + -item.nbytes % ALIGNMENT
        with torch.inference_mode(False):  # the loaded tensor may be used after the caller's inference mode
            base = self._backend.empty(room, item.like)
        # The memory is allocated and ordered now; the link decides when the copy starts.
        after = [self._backend.record()]
        after += item.written()
        item.loads_into(base)
        target = base[: item.nbytes]
        arrival = self._transfers.ask_in(
            item.buffer, target, after=after, seconds=seconds, started=started, group=group
        )
        # All three together, before the copy starts: after an interruption, memory without a copy would pass for
        # loaded.
        item.base, item.arrival, item.state = base, arrival, LoadState.BACK
        self.back[item] = None
        self._transfers.pump()

    def arrived(self, item: Loadable) -> torch.Tensor:
        """Returns the bytes of a loaded item; later work on the caller's stream may read them."""
        assert item.base is not None
        if item.arrival is not None:
            error = self._transfers.arrive(item.arrival, item.base).error()
            if error is not None:
                self.forget(item)
                raise error
        return item.base

    def let_go(self, item: Loadable) -> None:
        """Frees the device memory of a loaded item; its bytes stay on the tier."""
        if item.state is not LoadState.BACK:
            return
        if item.arrival is not None:
            self._transfers.no_longer(item.arrival)
        self.forget(item)

    def forget(self, item: Loadable) -> None:
        """Does what `let_go` does, if no copy to the item's memory is in flight."""
        item.is_gone()
        self.back.pop(item, None)
