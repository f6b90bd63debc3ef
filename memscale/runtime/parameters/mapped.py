"""`MappedTensors`: memory of a tier as CPU tensors, on which the CPU works in place."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from memscale.core import RuntimeUnavailable
from memscale.runtime.backends.protocol import Backend, Buffer, Event
from memscale.runtime.engine.link import Copy
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.parameters.host_parameter import HostParameter


class Mapped:
    """Bytes of a tier with tensors over them; freed when nothing refers to the tensors' storage."""

    __slots__ = ("_backend", "buffer", "copies", "host")

    def __init__(self, buffer: Buffer, backend: Backend) -> None:
        self.buffer: Buffer | None = buffer  # None once it was freed
        self._backend = weakref.ref(backend)  # weak: tensors may outlive the runtime; their mapping keeps the file
        self.copies: list[Copy] = []  # copies that may be in flight when the last tensor is dropped
        self.host: HostParameter | None = None  # the host parameter whose bytes these are

    def is_moving(self) -> bool:
        """Whether a load of the parameter is in flight; copies of a gradient do not count: its reuse waits for them."""
        return self.host is not None and self.host.is_moving()

    def give_back(self, after: Sequence[Event]) -> None:
        """Frees the buffer after its copies and the events in `after`."""
        copied = [copy.event for copy in self.copies if not copy.give_up() and copy.event is not None]
        buffer, self.buffer = self.buffer, None
        if buffer is not None and (backend := self._backend()) is not None:
            backend.free(buffer, after=[*after, *copied])


class MappedTensors:
    """Allocates CPU tensors over the tiers of one engine."""

    def __init__(self, engine: Engine) -> None:
        # Weak: the tensors may outlive the runtime, whose file and threads must not wait for them.
        self._owner = weakref.ref(engine)

    def take(self, nbytes: int, tier: str) -> tuple[Mapped, torch.Tensor] | None:
        """Returns bytes on `tier` or the next tier below, and a uint8 CPU tensor over them; None if none has room."""
        engine = self._owner()
        assert engine is not None, "the caller holds the engine"
        backend = engine.backend
        buffer = backend.allocate(nbytes, tier)
        if buffer is None:
            return None
        try:
            contents = self.tensor_over(buffer, backend)
        except RuntimeUnavailable:  # on a filesystem without preallocation a full disk would kill the process
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
        """Returns a uint8 CPU tensor over the memory of `buffer`."""
        return torch.from_numpy(backend.map(buffer))

    def _end(self, mapped: Mapped) -> None:
        if (engine := self._owner()) is not None:
            engine.finalized.add(mapped, self.close)
        else:  # the runtime is gone, and other runtimes may share its backend
            mapped.give_back(())

    def close(self, mapped: Mapped) -> None:
        """Frees memory whose tensors are gone. The engine's lock is held."""
        host = mapped.host
        if (engine := self._owner()) is None:  # the engine is being collected
            mapped.give_back(() if host is None else host.events())
            return
        reading = [] if host is None else host.mover.end(host)
        if mapped.buffer is not None:
            engine.count_live(mapped.buffer.tier, -mapped.buffer.nbytes)
        mapped.give_back(reading)


def shaped(contents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns the bytes as a tensor of the type, shape and strides of `like`."""
    return contents.view(like.dtype).as_strided(like.size(), like.stride()).detach()
