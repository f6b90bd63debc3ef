"""Memory of another tier that the CPU works on in place, under tensors of its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from memscale.core.errors import RuntimeUnavailable
from memscale.core.simulating import simulating
from memscale.runtime.backends.protocol import Backend, Buffer, Event
from memscale.runtime.engine.link import Copy

if TYPE_CHECKING:
    from memscale.runtime.engine.engine import Engine
    from memscale.runtime.parameters.home import Home


class Room:
    """Bytes of a tier with tensors over them, given back once nothing refers to the tensors' storage."""

    __slots__ = ("_backend", "buffer", "copies", "home")

    def __init__(self, buffer: Buffer, backend: Backend) -> None:
        self.buffer: Buffer | None = buffer  # `None` once it was given back
        self._backend = weakref.ref(backend)  # weakly, for tensors may outlive a runtime, and keep its file
        self.copies: list[Copy] = []  # what may be under way when nothing refers to it any more
        self.home: Home | None = None  # of the parameter whose bytes these are

    def is_moving(self) -> bool:
        """See `Moving`. Copies of a gradient are no matter: its memory is reused only after them."""
        return self.home is not None and self.home.entry.is_moving()

    def give_back(self, after: Sequence[Event]) -> None:
        """Free the buffer, once its copies and the events in `after` are done."""
        copied = [copy.event for copy in self.copies if not copy.give_up() and copy.event is not None]
        buffer, self.buffer = self.buffer, None
        if buffer is not None and (backend := self._backend()) is not None:
            backend.free(buffer, after=[*after, *copied])


class Rooms:
    """The rooms of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._owner = weakref.ref(engine)  # weakly, as `Homes` does

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None, "its engine has them"
        return engine

    def take(self, nbytes: int, tier: str) -> tuple[Room, torch.Tensor] | None:
        """Bytes on `tier` or the next below, and a uint8 CPU tensor over them; `None` where no tier has room."""
        backend, step = self._engine.backend, simulating()
        buffer = backend.allocate(nbytes, tier)
        if buffer is None:
            return None
        try:
            contents = torch.from_numpy(backend.map(buffer)) if step is None else step.away(nbytes)
        except RuntimeUnavailable:  # a filesystem that cannot promise room would kill the process later
            backend.free(buffer, after=())
            return None
        except BaseException:
            backend.free(buffer, after=())
            raise
        self._engine.count_live(buffer.tier, nbytes)
        room = Room(buffer, backend)
        weakref.finalize(contents.untyped_storage(), self._end, room).atexit = False
        return room, contents

    def _end(self, room: Room) -> None:
        if (engine := self._owner()) is not None:
            engine.leftovers.leave(room, self.close)
        else:  # a runtime that is gone, whose backend others may use
            room.give_back(())

    def close(self, room: Room) -> None:
        """Give back a room that is over. The engine's lock is held."""
        if (engine := self._owner()) is None:  # it is being collected
            room.give_back(() if room.home is None else room.home.entry.events())
            return
        reading = [] if room.home is None else engine.homes.end(room.home)
        if room.buffer is not None:
            engine.count_live(room.buffer.tier, -room.buffer.nbytes)
        room.give_back(reading)


def shaped(contents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The bytes as a tensor of the type, shape and strides of `like`."""
    return contents.view(like.dtype).as_strided(like.size(), like.stride()).detach()
