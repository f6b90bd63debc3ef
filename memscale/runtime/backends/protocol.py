"""Where transforms and backends meet: what the offload engine asks of a machine.

A backend has *streams*, queues of work that run in the order given, next to each other: one for each direction of the
link, and the *compute streams*, where the model runs. Of these a thread is on one at a time, and memory of the device
is one's: whatever reuses it comes after what that stream was given. A backend has *events*, which mark a point in a
stream; *tiers*, the places outside the device where bytes can live; *buffers*, bytes on a tier; and one asynchronous
`copy`. The engine above it knows nothing else, so the same engine runs on a GPU, on a host whose next tier is disk, on
fake tensors, and, in tests, on a device whose scheduler is adversarial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from memscale.runtime.storage.tiers import TierUse

Stream = Literal["out", "in"]


class Event(Protocol):
    """A point in a stream; done when all work before it is."""

    def done(self) -> bool:
        """Whether the point has been passed. Never blocks."""

    def span(self) -> tuple[float, float] | None:
        """When the copy that the event ends began and ended, in seconds of the backend's clock; `None` if unknown."""

    def error(self) -> BaseException | None:
        """Why the copy before the event failed, once it is done; `None` where it succeeded. Never blocks."""


class Buffer(Protocol):
    """Bytes on a tier outside the device."""

    @property
    def tier(self) -> str:
        """The tier that the bytes live on, which may be lower than the one that was asked for."""

    @property
    def nbytes(self) -> int:
        """How many bytes of the tier's cap it takes up."""


class Backend(Protocol):
    """One kind of device and the tiers below it."""

    tiers: tuple[str, ...]
    """The names of the tiers, nearest to the device first: the order in which they are tried."""

    def allocate(self, nbytes: int, tier: str) -> Buffer | None:
        """`nbytes` bytes on `tier` ("auto" is the nearest), or on the first tier below it that has room.

        `None` when every tier is full. Never waits for room: what would free it may be the caller's own backward.
        """

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        """Give `buffer` back; its bytes are used again only when the events in `after` are done."""

    def map(self, buffer: Buffer) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The bytes of `buffer` as memory that the CPU works on in place; asked for at most once, before any copy.

        What is written there is what a later copy reads, and the other way round. The array, and tensors made of it,
        must not be used after `free`. Copies of such a buffer leave as little of it in RAM as the tier allows.
        """

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """A new uint8 tensor on the device, memory of the caller's stream; `like` is an empty one of that device."""

    def lend(self, tensor: torch.Tensor) -> None:
        """Called before the caller's stream uses memory of another one, which is to reuse it only afterwards."""

    def discard(self, tensor: torch.Tensor) -> None:
        """Called with a tensor of the device whose bytes nobody will read again, just before its memory is freed."""

    def trim(self, *, if_grown: bool = False) -> None:
        """Give memory of the device that is free, and only cached, back to it. May wait for the device, so seldom.

        `if_grown` asks for that only if more was taken of the device, for large blocks, since it was so asked before.
        """

    def compute_stream(self) -> int:
        """The compute stream that the caller is on. Asked for each tensor that is stashed, so it has to be quick."""

    def record(self, stream: int | None = None) -> Event:
        """An event behind all that a compute stream has been given so far; `None` is the caller's."""

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> Event:
        """Queue a copy of all bytes of the device's side on `stream`, to start when the events in `after` are done.

        One side is a uint8 tensor of the device, the other a buffer. The caller keeps both untouched until the event
        that this returns is done.
        """

    def wait(self, event: Event, stream: int | None = None) -> None:
        """Let all that a compute stream is given from here on come after `event`; `None` is the caller's."""

    def synchronize(self, event: Event) -> None:
        """Let the calling thread come after `event`, as it must before it touches memory that `map` returned."""

    def clock(self) -> float:
        """Seconds on the clock of `Event.span`."""

    def usage(self) -> Mapping[str, TierUse]:
        """What each tier holds, and held at most."""
