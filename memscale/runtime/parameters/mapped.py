"""Memory of another tier that the CPU works on in place, under tensors of its own."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from memscale.core import RuntimeUnavailable
from memscale.runtime.backends.protocol import Backend, Buffer, Event
from memscale.runtime.engine.engine import Engine
from memscale.runtime.engine.link import Copy
from memscale.runtime.parameters.home import Home


class Mapped:
    """Bytes of a tier with tensors over them, given back once nothing refers to the tensors' storage."""

    __slots__ = ("_backend", "buffer", "copies", "home")

    def __init__(self, buffer: Buffer, backend: Backend) -> None:
        self.buffer: Buffer | None = buffer  # `None` once it was given back
        self._backend = weakref.ref(backend)  # weakly, for tensors may outlive a runtime, and keep its file
        self.copies: list[Copy] = []  # what may be under way when nothing refers to it any more
        self.home: Home | None = None  # of the parameter whose bytes these are

    def is_moving(self) -> bool:
        """See `Ended`. Copies of a gradient are no matter: its memory is reused only after them."""
        return self.home is not None and self.home.is_moving()

    def give_back(self, after: Sequence[Event]) -> None:
        """Free the buffer, once its copies and the events in `after` are done."""
        copied = [copy.event for copy in self.copies if not copy.give_up() and copy.event is not None]
        buffer, self.buffer = self.buffer, None
        if buffer is not None and (backend := self._backend()) is not None:
            backend.free(buffer, after=[*after, *copied])


class MappedTensors:
    """The CPU tensors over the tiers of one engine."""

    def __init__(self, engine: Engine) -> None:
        # Weakly: the tensors may outlive a runtime, and what that holds, a file among it, must not wait for them.
        self._owner = weakref.ref(engine)

    def take(self, nbytes: int, tier: str) -> tuple[Mapped, torch.Tensor] | None:
        """Bytes on `tier` or the next below, and a uint8 CPU tensor over them; `None` where no tier has room."""
        engine = self._owner()
        assert engine is not None, "whoever asks has it"
        backend = engine.backend
        buffer = backend.allocate(nbytes, tier)
        if buffer is None:
            return None
        try:
            contents = self.tensor_over(buffer, backend)
        except RuntimeUnavailable:  # a filesystem that cannot promise room would kill the process later
            backend.free(buffer, after=())
            return None
        except BaseException:
            backend.free(buffer, after=())
            raise
        engine.count_live(buffer.tier, nbytes)
        mapped = Mapped(buffer, backend)
        weakref.finalize(contents.untyped_storage(), self._end, mapped).atexit = False
        return mapped, contents

    def tensor_over(self, buffer: Buffer, backend: Backend) -> torch.Tensor:
        """A uint8 CPU tensor whose memory is that of `buffer`."""
        return torch.from_numpy(backend.map(buffer))

    def _end(self, mapped: Mapped) -> None:
        if (engine := self._owner()) is not None:
            engine.finalized.add(mapped, self.close)
        else:  # a runtime that is gone, whose backend others may use
            mapped.give_back(())

    def close(self, mapped: Mapped) -> None:
        """Give back memory whose tensors are gone. The engine's lock is held."""
        home = mapped.home
        if (engine := self._owner()) is None:  # it is being collected
            mapped.give_back(() if home is None else home.events())
            return
        reading = [] if home is None else home.mover.end(home)
        if mapped.buffer is not None:
            engine.count_live(mapped.buffer.tier, -mapped.buffer.nbytes)
        mapped.give_back(reading)


def shaped(contents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The bytes as a tensor of the type, shape and strides of `like`."""
    return contents.view(like.dtype).as_strided(like.size(), like.stride()).detach()
