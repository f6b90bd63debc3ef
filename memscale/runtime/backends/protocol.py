"""`Backend`: the interface between the offload engine and a kind of device.

A backend has

- *streams*: queues of work that run in order, concurrently with each other. There is one copy stream per direction, and
  there are *compute streams*, on which the model runs. A thread is on one compute stream at a time. Device memory
  belongs to one compute stream: it is reused only after the work that was queued there.
- *events*, each a point in a stream;
- *tiers*, the places outside the device where bytes can live, and *buffers*, bytes on a tier;
- one asynchronous `copy`.

The engine uses nothing else, so the same engine runs on a GPU, on a host whose next tier is disk, on fake tensors, and
in tests on a device with an adversarial scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from memscale.runtime.storage.tiers import TierUse

Stream = Literal["out", "in"]

# Moved bytes start at a multiple of this, in their storage, in a buffer of several, and after they come back: kernels
# choose their code path, and with it the order of sums, by alignment. It also allows a view of the bytes in any dtype.
ALIGNMENT = 64
# Storages below this travel together where the host's time for a copy is longer than the copy, as with a GPU.
TOGETHER_BYTES = 1024**2


def one_behind_the_other(sources: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each of the tensors that `Backend.gather` copies, with its first byte in the buffer."""
    start = 0
    for source in sources:
        yield start, source
        start += source.nbytes + -source.nbytes % ALIGNMENT


class Event(Protocol):
    """A point in a stream; done when all work queued before it is done."""

    def done(self) -> bool:
        """Whether all work before the event is done. Never blocks."""

    def span(self) -> tuple[float, float] | None:
        """Returns when the copy before the event began and ended, in seconds on the backend's clock, if known."""

    def error(self) -> BaseException | None:
        """Returns why the copy before the event failed, or None if it succeeded. Never blocks; valid once `done`."""


class Buffer(Protocol):
    """Bytes on a tier outside the device."""

    @property
    def tier(self) -> str:
        """The tier of the bytes, which may be lower than the requested one."""

    @property
    def nbytes(self) -> int:
        """The bytes of the tier's cap that the buffer takes."""


class Backend(Protocol):
    """A kind of device and the tiers below it."""

    tiers: tuple[str, ...]
    """The names of the tiers, nearest to the device first; allocation tries them in this order."""

    together_bytes: int
    """Storages smaller than this travel together; 0 lets each travel alone."""

    def allocate(self, nbytes: int, tier: str) -> Buffer | None:
        """Allocates `nbytes` on `tier` ("auto" is the nearest), or on the first tier below it that has room.

        Returns None if every tier is full. Never waits for room, because only the caller's own backward may free any.
        """

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        """Frees `buffer`; its bytes are reused only after the events in `after`."""

    def map(self, buffer: Buffer) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Returns the bytes of `buffer` as memory that the CPU works on in place; called at most once, before any copy.

        Copies of the buffer read and write this same memory, and leave as little of it in RAM as the tier allows. The
        array, and tensors made of it, must not be used after `free`.
        """

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """Returns a new uint8 tensor of `nbytes` on the device of `like`, in memory of the caller's stream."""

    def lend(self, tensor: torch.Tensor) -> None:
        """Called before the caller's stream uses memory of another stream, whose reuse then waits for the caller's."""

    def discard(self, tensor: torch.Tensor) -> None:
        """Called just before a device tensor is freed; its bytes are not read again."""

    def trim(self, *, if_grown: bool = False) -> None:
        """Returns cached free memory to the device. May synchronize with the device, so it is called rarely.

        With `if_grown`, only if memory for large blocks was reserved since the previous such call.
        """

    def compute_stream(self) -> int:
        """Returns the caller's compute stream. Called for each stashed tensor, so it has to be fast."""

    def record(self, stream: int | None = None) -> Event:
        """Returns an event after all work queued on a compute stream so far; None is the caller's stream."""

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> Event:
        """Queues a copy of all bytes of the device tensor on `stream`, to start after the events in `after`.

        One of `source` and `target` is a uint8 tensor on the device, the other one a buffer. The caller leaves both
        untouched until the returned event is done.
        """

    def gather(self, sources: Sequence[torch.Tensor], buffer: Buffer, *, after: Sequence[Event]) -> Event:
        """Queues one copy out of several device tensors, as `copy` does, if `together_bytes` is not 0.

        The memory of each tensor is in one piece, from its first element on. In the buffer it starts at the next
        multiple of `ALIGNMENT` behind the one before.
        """

    def wait(self, event: Event, stream: int | None = None) -> None:
        """Makes all later work of a compute stream wait for `event`; None is the caller's stream."""

    def synchronize(self, event: Event) -> None:
        """Blocks the calling thread until `event`, as it must before it touches memory that `map` returned."""

    def clock(self) -> float:
        """Returns the time in seconds on the clock of `Event.span`."""

    def usage(self) -> Mapping[str, TierUse]:
        """Returns the present and the highest use of each tier."""
