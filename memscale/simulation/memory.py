"""The device memory of a trace: the allocator's block of each storage, the peak of each step, the reserved bytes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memscale.core import format_bytes, format_unlike
from memscale.simulation.allocator.caching import TRIM, TRIM_IF_GROWN, Replay, replay
from memscale.simulation.allocator.settings import AllocatorSettings
from memscale.simulation.trace import Trace

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WORTH_A_SETTING = 0.01  # the share of the device's memory that a setting has to save to be advised


@dataclass(frozen=True)
class Peak:
    """The peak of a step: its bytes, the index of the event that first reaches it, and the storages alive then."""

    nbytes: int
    event: int
    alive: tuple[int, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """The device memory of a trace.

    Attributes:
        sizes: the bytes of each storage; on CUDA the bytes of its block.
        peaks: the peak of each step.
        reserved_peak_bytes: the most bytes that the allocator reserves; None without a caching allocator.
        notes: notes for the user about the allocator.
    """

    sizes: tuple[int, ...]
    peaks: tuple[Peak, ...]
    reserved_peak_bytes: int | None
    notes: tuple[str, ...]


def memory(
    trace: Trace,
    allocator: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    advises: bool = False,
) -> DeviceMemory:
    """Returns the device memory of a trace on the device that it is for.

    On CUDA a storage takes a whole block. Where the device is full, the allocator gives back its cached memory before
    an allocation fails, and the blocks are those of a replay with this capacity.

    Args:
        trace: the trace of at least two steps, the first with a fresh optimizer.
        allocator: the settings of PyTorch's CUDA allocator; None reads the environment, which a training process
            would inherit.
        capacity_bytes: the most bytes that the step may take of a CUDA device; None means ``hardware.usable_bytes``.
        advises: whether the notes name settings that would reserve less.
    """
    exact = [storage.nbytes for storage in trace.storages]
    if trace.hardware.device_type != "cuda":
        return DeviceMemory(tuple(exact), tuple(_peaks(trace, exact)), None, ())
    events = _allocator_events(trace)
    settings = allocator or AllocatorSettings.from_env(next(filter(None, map(os.environ.get, _VARIABLES)), ""))
    count = len(exact)
    capacity_bytes = max(1, trace.hardware.usable_bytes if capacity_bytes is None else capacity_bytes)
    streams = {number: storage.stream for number, storage in enumerate(trace.storages) if storage.stream}
    streams |= {number + count: stream for number, stream in streams.items()}  # for the repeated step
    found, notes = replay(events, settings=settings, streams=streams), list[str]()
    advice = [*_advice(events, found, settings, streams, capacity_bytes)] if advises else []
    # `memory_fraction` and garbage collection have an effect only in a replay with a capacity.
    if found.reserved_peak_bytes > capacity_bytes or settings.memory_fraction < 1:
        bounded = replay(events, settings=settings, capacity_bytes=capacity_bytes, streams=streams)
        if bounded.out_of_memory_at is None:
            if bounded.retries:
                often = "once, which" if bounded.retries == 1 else f"{bounded.retries} times, each of which"
                notes.append(
                    f"it fits because PyTorch gives back cached memory when the device is full, here {often} waits for "
                    f"the device; with more memory it would reserve {format_bytes(found.reserved_peak_bytes)}"
                )
            found = bounded
        elif found.reserved_peak_bytes <= capacity_bytes:
            notes.append(
                f"it does not fit: the allocator's per_process_memory_fraction:{settings.memory_fraction} leaves it "
                f"{format_bytes(settings.memory_fraction * capacity_bytes)}"
            )
    blocks = found.block_bytes
    sizes = tuple(blocks.get(number + count, blocks.get(number, 0)) for number in range(count))
    return DeviceMemory(sizes, tuple(_peaks(trace, sizes)), found.reserved_peak_bytes, (*notes, *advice))


def _advice(
    events: Sequence[tuple[int, int]],
    found: Replay,
    settings: AllocatorSettings,
    streams: Mapping[int, int],
    capacity_bytes: int,
) -> Iterator[str]:
    """Yield the advice to use expandable segments, if the step would reserve at least 1 % of the device less with them.

    An expandable segment grows; fixed segments leave holes that no larger block fits in.
    """
    least = _WORTH_A_SETTING * capacity_bytes
    if settings.expandable_segments or found.reserved_peak_bytes - found.allocated_peak_bytes < least:
        return
    expandable = replace(settings, expandable_segments=True)
    less = replay(events, settings=expandable, streams=streams).reserved_peak_bytes
    if found.reserved_peak_bytes - less >= least:
        expanding, fixed = format_unlike(less, found.reserved_peak_bytes)
        yield (f"with {_VARIABLES[0]}=expandable_segments:True the step would reserve {expanding} in place of {fixed}")


def _allocator_events(trace: Trace) -> list[tuple[int, int]]:
    """Returns the events for `replay`: all steps of the trace, and the last step once more.

    A step that begins among the blocks of the previous step may get other blocks and reserve more, so the last step is
    repeated. A storage of the repeated step has its number plus the number of storages.
    """
    last, trims, trims_if_grown = trace.steps[-1][0], set(trace.trims), set(trace.trims_if_grown)
    events: list[tuple[int, int]] = []
    begin = 0
    exact = [storage.nbytes for storage in trace.storages]
    for at, event in enumerate(trace.events):
        if at == last:
            begin = len(events)
        if at in trims:
            events.append(TRIM)
        if at in trims_if_grown:
            events.append(TRIM_IF_GROWN)
        # A free has the storage's own size: an empty tensor has 0 bytes, and `replay` ignores its birth and its death.
        events.append((event - 1, exact[event - 1]) if event > 0 else (-event - 1, -exact[-event - 1]))
    return events + _once_more(events[begin:], len(trace.storages))


def _once_more(step: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Returns the events of `step` again, with storage `n` renamed to ``n + count``.

    Where `step` frees storages of the previous step, such as gradients, the repetition frees those that `step` leaves.
    The result is empty if the two lists of storages differ in their sizes.
    """
    born = {number: nbytes for number, nbytes in step if nbytes > 0}
    died = {number: -nbytes for number, nbytes in step if nbytes < 0 <= number}
    left = sorted(born.keys() - died.keys())
    former = sorted(died.keys() - born.keys())
    if [born[number] for number in left] != [died[number] for number in former]:
        return []
    renamed = {number: number + count for number in born} | dict(zip(former, left, strict=True))
    return [(renamed.get(number, number), nbytes) for number, nbytes in step]


def _peaks(trace: Trace, sizes: Sequence[int]) -> Iterator[Peak]:
    """Yields the peak of each step; where several events reach it, the first one."""
    bounds = [event for event, _ in trace.steps] + [len(trace.events)]
    live = 0
    alive: dict[int, None] = {}
    live += applied(trace.events[: bounds[0]], alive, sizes)
    for begin, end in itertools.pairwise(bounds):
        best, at = live, begin - 1
        for index, event in enumerate(trace.events[begin:end], begin):
            live += sizes[event - 1] if event > 0 else -sizes[-event - 1]
            if live > best:
                best, at = live, index
        applied(trace.events[begin : at + 1], alive, sizes)
        yield Peak(best, at, tuple(alive))
        applied(trace.events[at + 1 : end], alive, sizes)


def applied(events: Sequence[int], alive: dict[int, None], sizes: Sequence[int]) -> int:
    """Applies `events` to the set `alive` of storage numbers, and returns the bytes that they add."""
    added = 0
    for event in events:
        if event > 0:
            alive[event - 1] = None
            added += sizes[event - 1]
        else:
            alive.pop(-event - 1, None)
            added -= sizes[-event - 1]
    return added
