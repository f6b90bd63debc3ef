"""The backend of simulations: counts bytes on tiers and on the link, and moves none.

The engine runs as in a real step: it frees a fake tensor's storage after the copy out, and makes a new one for
backward. A simulation that watches storages therefore sees the memory that offloading saves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from memscale.runtime.backends.protocol import Buffer, Event, Stream
from memscale.runtime.storage.mapping import Bytes
from memscale.runtime.storage.tiers import TierUse, at_or_below


class _Passed:
    """An event of a device on which every copy is instantaneous."""

    def done(self) -> bool:
        return True

    def span(self) -> None:
        return None

    def error(self) -> None:
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class CountedBuffer:
    """Bytes that a real step would place on a tier."""

    tier: str
    nbytes: int


Source = torch.Tensor | Buffer | Sequence[torch.Tensor]


class TraceBackend:
    """A simulated device and its tiers.

    Args:
        caps: for each tier, nearest first, the most bytes that it takes; None for no cap.
        together_bytes: as that of the device's real backend.

    Attributes:
        on_trim: called instead of returning cached memory to the device, with the value of `if_grown`.
        on_copy: called with the source and the target of each copy; with a list of sources for `gather`.
        spilled_bytes: by tier, the highest number of bytes there for which a tier above had no room.
    """

    def __init__(self, caps: Mapping[str, int | None], *, together_bytes: int = 0) -> None:
        self.on_trim: Callable[[bool], object] = lambda if_grown: None
        self.on_copy: Callable[[Source, torch.Tensor | Buffer], object] = lambda source, target: None
        self.tiers = tuple(caps)
        self.together_bytes = together_bytes
        self._caps = dict(caps)
        self._used = dict.fromkeys(caps, 0)
        self._high_water = dict.fromkeys(caps, 0)
        self._spilled: set[CountedBuffer] = set()
        self._spilling = dict.fromkeys(caps, 0)
        self.spilled_bytes: dict[str, int] = {}

    def allocate(self, nbytes: int, tier: str) -> CountedBuffer | None:
        for place, name in enumerate(at_or_below(self.tiers, tier)):
            cap = self._caps[name]
            if cap is None or self._used[name] + nbytes <= cap:
                self._used[name] += nbytes
                self._high_water[name] = max(self._high_water[name], self._used[name])
                buffer = CountedBuffer(name, nbytes)
                if place:
                    self._note_spill(buffer)
                return buffer
        return None

    def _note_spill(self, buffer: CountedBuffer) -> None:
        self._spilled.add(buffer)
        self._spilling[buffer.tier] += buffer.nbytes
        self.spilled_bytes[buffer.tier] = max(self._spilling[buffer.tier], self.spilled_bytes.get(buffer.tier, 0))

    def free(self, buffer: Buffer, *, after: Sequence[Event]) -> None:
        assert isinstance(buffer, CountedBuffer)
        self._used[buffer.tier] -= buffer.nbytes
        if buffer in self._spilled:
            self._spilled.remove(buffer)
            self._spilling[buffer.tier] -= buffer.nbytes

    def map(self, buffer: Buffer) -> Bytes:
        raise AssertionError(
            f"{buffer.nbytes} bytes on {buffer.tier} are only counted in a trace and have no memory to map; a "
            f"simulation makes its own tensors"
        )

    def empty(self, nbytes: int, like: torch.Tensor) -> torch.Tensor:
        """Makes a fake tensor through `like`, which knows its fake mode, as backward's threads have none active."""
        return like.new_empty(nbytes)

    def discard(self, tensor: torch.Tensor) -> None:
        """Does nothing."""

    def trim(self, *, if_grown: bool = False) -> None:
        self.on_trim(if_grown)

    def lend(self, tensor: torch.Tensor) -> None:
        """Does nothing: a simulation has one stream."""

    def compute_stream(self) -> int:
        return 0

    def record(self, stream: int | None = None) -> Event:
        return _Passed()

    def copy(
        self, source: torch.Tensor | Buffer, target: torch.Tensor | Buffer, stream: Stream, *, after: Sequence[Event]
    ) -> Event:
        self.on_copy(source, target)
        return _Passed()

    def gather(self, sources: Sequence[torch.Tensor], buffer: Buffer, *, after: Sequence[Event]) -> Event:
        self.on_copy(sources, buffer)
        return _Passed()

    def wait(self, event: Event, stream: int | None = None) -> None:
        """Does nothing: every event is done."""

    def synchronize(self, event: Event) -> None:
        """Does nothing: every event is done."""

    def clock(self) -> float:
        """Returns 0: no time passes."""
        return 0.0

    def usage(self) -> Mapping[str, TierUse]:
        """Returns the counted bytes; without real memory there is no fragmentation."""
        return {tier: TierUse(self._high_water[tier], used, 0, 0) for tier, used in self._used.items()}
