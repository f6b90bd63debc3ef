"""Bytes of a tier on the device: loaded when they are asked for, and let go of there."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable

import torch

from memscale.runtime.backends.protocol import Backend, Buffer, Event
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.transfers import Transfers

# What moves starts at a multiple of this in its storage, as it does when it comes back: kernels choose their path, and
# with it the order of sums, by alignment. It is also what makes any dtype's view of the bytes possible.
ALIGNMENT = 64


class State(enum.Enum):
    """Where some bytes are."""

    DEVICE = "where they were"
    LEAVING = "on the device and on their way out"
    AWAY = "on a tier"
    BACK = "on a tier and on the device again, or on their way there"
    KEPT = "on the device, in memory of ours, since they could not be copied to any tier"


class Loadable:
    """Bytes that have, or will have, a place on a tier, and that may come to the device any number of times."""

    __slots__ = ("arrival", "base", "buffer", "like", "nbytes", "state")

    def __init__(self, nbytes: int, state: State) -> None:
        self.nbytes = nbytes
        self.state = state
        self.buffer: Buffer | None = None
        self.base: torch.Tensor | None = None  # all the bytes, on the device
        self.like: torch.Tensor | None = None  # an empty tensor of the device
        self.arrival: Copy | None = None

    def copies(self) -> tuple[Copy, ...]:
        """What was asked for last, in each direction."""
        return () if self.arrival is None else (self.arrival,)

    def written(self) -> list[Event]:
        """What a load has to come after, for its bytes to be on the tier."""
        return []

    def loads_into(self, base: torch.Tensor) -> None:
        """Called before a load to `base` is asked for."""

    def is_gone(self) -> None:
        """Its memory on the device is no longer its own."""
        self.base = None
        self.state = State.AWAY

    def events(self) -> list[Event]:
        """The ends of its copies that have started."""
        return [copy.event for copy in self.copies() if copy.event is not None]

    def is_moving(self) -> bool:
        """Whether a copy of its bytes is under way, so that its memory on the device cannot be freed at once."""
        return self.base is not None and any(copy.is_under_way() for copy in self.copies())


class Loader:
    """Brings bytes to the device, and knows which it has brought. The engine's lock is held in all that it does."""

    def __init__(self, backend: Backend, transfers: Transfers) -> None:
        self._backend = backend
        self._transfers = transfers
        self.back: dict[Loadable, None] = {}

    def load(
        self, item: Loadable, *, started: Callable[[Event], None], seconds: float = 0.0, group: Hashable | None = None
    ) -> None:
        """Ask for the bytes of an item that is away; they are expected to be needed in `seconds`, with its `group`."""
        assert item.buffer is not None
        assert item.like is not None
        room = item.nbytes + -item.nbytes % ALIGNMENT
        with torch.inference_mode(False):  # what is loaded may be used after the caller's inference mode
            base = self._backend.empty(room, item.like)
        # Memory and order are those of now; when the copy itself starts, the link decides.
        after = [self._backend.record()]
        after += item.written()
        item.loads_into(base)
        target = base[: item.nbytes]
        arrival = self._transfers.ask_in(
            item.buffer, target, after=after, seconds=seconds, started=started, group=group
        )
        # In one go, and before anything starts: memory that nothing was asked to fill would pass for what arrived.
        item.base, item.arrival, item.state = base, arrival, State.BACK
        self.back[item] = None
        self._transfers.pump()

    def arrived(self, item: Loadable) -> torch.Tensor:
        """The bytes of an item that was loaded; what the caller's stream is given from here on may read them."""
        assert item.base is not None
        if item.arrival is not None:
            error = self._transfers.arrive(item.arrival, item.base).error()
            if error is not None:
                self.forget(item)
                raise error
        return item.base

    def let_go(self, item: Loadable) -> None:
        """Free the device's memory of a loaded item; its bytes on the tier stay for another time."""
        if item.state is not State.BACK:
            return
        if item.arrival is not None:
            self._transfers.no_longer(item.arrival)
        self.forget(item)

    def forget(self, item: Loadable) -> None:
        """As `let_go`, where no copy to its memory is under way."""
        item.is_gone()
        self.back.pop(item, None)
