"""The analysis of a trace: its device memory (`memory`), and its `Profile` (`analyse`).

The device memory is the allocator's block of each storage, the peak of each step, and the reserved bytes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memscale.core import format_bytes, format_unlike
from memscale.hardware import Hardware, has_rate
from memscale.simulation.allocator.allocator_settings import AllocatorSettings
from memscale.simulation.allocator.caching import TRIM, TRIM_IF_GROWN, Replayed, replay
from memscale.simulation.results import Holding, Moment, Profile
from memscale.simulation.schedule.schedule import Schedule, prefetch_depth
from memscale.simulation.trace import CATEGORIES, Phase, Storage, Trace

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
    # `memory_fraction` has an effect only in a replay with a capacity.
    if found.reserved_peak_bytes > capacity_bytes or settings.memory_fraction < 1:
        bounded = replay(events, settings=settings, capacity_bytes=capacity_bytes, streams=streams)
        if bounded.out_of_memory_at is None:
            if bounded.retries:
                often = "once, which" if bounded.retries == 1 else f"{bounded.retries} times, each of which"
                notes.append(
                    f"the step fits because PyTorch frees cached memory when the device is full, here {often} waits "
                    f"for the device; with more memory it would reserve {format_bytes(found.reserved_peak_bytes)}"
                )
            found = bounded
        elif found.reserved_peak_bytes <= capacity_bytes:
            notes.append(
                f"the step does not fit: per_process_memory_fraction:{settings.memory_fraction} allows "
                f"{format_bytes(settings.memory_fraction * capacity_bytes)}"
            )
    blocks = found.block_bytes
    sizes = tuple(blocks.get(number + count, blocks.get(number, 0)) for number in range(count))
    return DeviceMemory(sizes, tuple(_peaks(trace, sizes)), found.reserved_peak_bytes, (*notes, *advice))


def _advice(
    events: Sequence[tuple[int, int]],
    found: Replayed,
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


_OF_AMD = ("AMD ", "Radeon ")
_HOLDINGS = 512
_ROUNDING = "rounding"
_PLACES = {category: place for place, category in enumerate(CATEGORIES)}
_NAMED_FOR_TENSORS = ("parameter", "buffer", "gradient", "optimizer state")


def analyse(trace: Trace, capacity_bytes: int | None = None, *, advises: bool = False) -> Profile:
    """Returns the profile of the last step in `trace`; arguments as of `memory`."""
    taken = memory(trace, capacity_bytes=capacity_bytes, advises=advises)
    hardware, storages = trace.hardware, trace.storages
    peak = taken.peaks[-1]
    schedule = Schedule.of_last_step(trace) if trace.times.timed else None
    by_category: dict[str, int] = defaultdict(int)
    by_module: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for storage in (storages[number] for number in peak.alive):
        by_category[storage.category] += storage.nbytes
        by_module[_module(storage)][storage.category] += storage.nbytes
    if rounding := peak.nbytes - sum(by_category.values()):
        by_category[_ROUNDING] = by_module["allocator"][_ROUNDING] = rounding
    changes, positions, phases = _timeline(trace, taken, *_positions(trace))
    largest = sorted(peak.alive, key=lambda number: -storages[number].nbytes)[:_HOLDINGS]
    return Profile(
        method="static",
        notes=(*trace.notes, *taken.notes, *_unlike_cuda(hardware), *(() if trace.times.timed else _untimed(trace))),
        hardware=hardware,
        peak_bytes=peak.nbytes,
        first_step_peak_bytes=taken.peaks[0].nbytes,
        reserved_peak_bytes=taken.reserved_peak_bytes,
        moment=_moment(trace, peak),
        by_category=dict(sorted(by_category.items(), key=lambda item: _PLACES[item[0]])),
        categories_by_module={path: dict(parts) for path, parts in sorted(by_module.items())},
        by_tier=dict(trace.by_tier),
        holdings=tuple(_holding(trace, storages[number]) for number in largest),
        flops=sum(op.flops for op in trace.last_operators),
        step_seconds=None if schedule is None else schedule.seconds,
        exposed_seconds={} if schedule is None else schedule.exposed_seconds,
        prefetch_depth=None if schedule is None or not schedule.copies else _prefetch_depth(trace),
        seconds_by_module={} if schedule is None else schedule.seconds_by_module,
        changes=changes,
        positions=positions,
        position_unit="operators" if schedule is None else "seconds",
        phases=phases,
        schedule=schedule,
    )


def _module(storage: Storage) -> str:
    return storage.path.rpartition(".")[0] if storage.category in _NAMED_FOR_TENSORS else storage.path


def _positions(trace: Trace) -> tuple[list[float], list[float]]:
    """Returns when each operator of the last step begins and ends: in seconds, or by its index if times are unknown."""
    first_op, times = trace.steps[-1][1], trace.times
    if not times.timed:
        count = len(trace.ops) - first_op
        return [float(at) for at in range(count)], [float(at + 1) for at in range(count)]
    zero = times.steps[-1]
    return [begin - zero for begin in times.begins[first_op:]], [end - zero for end in times.ends[first_op:]]


def _prefetch_depth(trace: Trace) -> int:
    """Returns the prefetch depth that hides the copies of the last step, at least one."""
    ops, first_op, times = trace.last_operators, trace.steps[-1][1], trace.times
    moved = [transfer for transfer in times.transfers if transfer.begin >= times.steps[-1]]
    passes = itertools.accumulate(
        itertools.pairwise([ops[0], *ops]), lambda count, pair: count + (pair[0].phase is not pair[1].phase), initial=0
    )
    seconds = [end - begin for begin, end in zip(times.begins[first_op:], times.ends[first_op:], strict=True)]
    return prefetch_depth(seconds, list(passes)[1:], moved, first=first_op)


def _unlike_cuda(hardware: Hardware) -> list[str]:
    """Returns notes on bytes that are uncertain on a device other than a CPU or an NVIDIA card with its own memory.

    >>> _unlike_cuda(Hardware.named("t4")), [note[:32] for note in _unlike_cuda(Hardware.named("mi300x"))]
    ([], ['blocks and reserved memory are t'])
    """
    if hardware.device_type not in ("cpu", "cuda"):
        return [
            f"bytes are those of the tensors: how PyTorch's allocator for {hardware.device_type} rounds and caches is "
            "not modelled, nor the scratch memory of its kernels; leave room for both"
        ]
    if hardware.unified_memory:
        return [
            f"{hardware.name} has no memory but the host's: what the system, other programs and data loaders take of "
            "it is not counted; leave room for them"
        ]
    if hardware.device_type == "cuda" and hardware.name.startswith(_OF_AMD):
        return [
            "blocks and reserved memory are those of PyTorch's CUDA allocator, whose code ROCm builds run; the scratch "
            "memory of AMD's libraries (hipBLASLt, MIOpen) is not known, and CUDA's is counted in its place"
        ]
    return []


def _untimed(trace: Trace) -> list[str]:
    """Returns a note if the hardware's rates lack a dtype in which the step computes, so the step has no time."""
    hardware = trace.hardware
    if not hardware.flops_per_second:
        return []
    missing = ", ".join(sorted(dtype for dtype in trace.computes_in() if not has_rate(dtype, hardware)))
    if not missing:
        return []
    known = ", ".join(sorted(hardware.flops_per_second))
    return [
        f"no step time: {hardware.name} has no rate for {missing}, in which the step computes, and the memory is that "
        f"of a card that has; train in a dtype that it has ({known}), or write the rate down with "
        "dataclasses.replace(hardware, flops_per_second=...)"
    ]


def _moment(trace: Trace, peak: Peak) -> Moment:
    if peak.event < trace.steps[-1][0]:
        return Moment("the beginning", "", Phase.FORWARD.value)
    op = trace.ops[trace.event_ops[peak.event]]
    return Moment(op.name, op.path, op.phase.value)


def _holding(trace: Trace, storage: Storage) -> Holding:
    op = trace.ops[storage.op] if storage.op >= 0 else None
    name, phase = (op.name, op.phase.value) if op else ("", "")
    return Holding(storage.nbytes, storage.category, storage.path, name, phase, storage.shape, storage.dtype)


def _timeline(
    trace: Trace, taken: DeviceMemory, begins: Sequence[float], ends: Sequence[float]
) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...], tuple[tuple[str, float], ...]]:
    """Returns the changes of the last step, their positions, and the beginnings of its phases."""
    begin, first_op = trace.steps[-1]
    alive: dict[int, None] = {}
    applied(trace.events[:begin], alive, taken.sizes)
    rounding = _PLACES[_ROUNDING]
    parts = [
        (_PLACES[each.category], each.nbytes, size - each.nbytes)
        for each, size in zip(trace.storages, taken.sizes, strict=True)
    ]
    before: dict[int, int] = defaultdict(int)
    for number in alive:
        category, nbytes, rest = parts[number]
        before[category] += nbytes
        if rest:
            before[rounding] += rest
    changes = sorted(before.items())
    positions = [0.0] * len(changes)
    latest = 0.0 if positions else -math.inf
    for event, op in zip(trace.events[begin:], trace.event_ops[begin:], strict=True):
        # An operator's results exist while it runs, and its last-used arguments until it ends.
        at = 0.0 if op < first_op else (begins if event > 0 else ends)[op - first_op]
        latest = max(latest, at)
        sign = 1 if event > 0 else -1
        category, nbytes, rest = parts[sign * event - 1]
        changes.append((category, sign * nbytes))
        positions.append(latest)
        if rest:
            changes.append((rounding, sign * rest))
            positions.append(latest)
    phases: list[tuple[str, float]] = []
    last = None
    for op_call, at in zip(trace.last_operators, begins, strict=True):
        if op_call.phase is not last:
            last = op_call.phase
            phases.append((last.value, at))
    return tuple(changes), tuple(positions), tuple(phases)
