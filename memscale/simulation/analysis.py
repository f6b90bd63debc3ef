"""From the books of a simulated step to its `Profile`."""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from memscale.core import format_bytes, format_unlike
from memscale.hardware import Hardware, has_rate
from memscale.simulation.allocator.caching import TRIM, TRIM_IF_GROWN, Replay, replay
from memscale.simulation.allocator.settings import AllocatorSettings
from memscale.simulation.ledger import CATEGORIES, Ledger, OpCall, Phase, StorageRecord
from memscale.simulation.results import Holding, Moment, Profile
from memscale.simulation.schedule.clock import Clock
from memscale.simulation.schedule.schedule import Schedule
from memscale.simulation.schedule.sizing import prefetch_depth

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WORTH_A_SETTING = 0.01  # of the device
_OF_AMD = ("AMD ", "Radeon ")
_HOLDINGS = 512
_ROUNDING = "rounding"
_PLACES = {category: place for place, category in enumerate(CATEGORIES)}
_NAMED_FOR_TENSORS = ("parameter", "buffer", "gradient", "optimizer state")


@dataclass(frozen=True)
class _Peak:
    nbytes: int
    event: int
    alive: tuple[int, ...]


def analyse(
    ledger: Ledger,
    clock: Clock,
    notes: tuple[str, ...],
    by_tier: Mapping[str, int] | None = None,
    capacity_bytes: int | None = None,
    *,
    advises: bool = False,
) -> Profile:
    """The profile of the last step in `ledger`.

    Args:
        ledger: of at least two steps, the first from a fresh optimizer; with `add_in_place` done.
        clock: when each of its operators ran, and on what; on a CUDA device what counts is the blocks that its
            allocator would hand out.
        notes: what the simulation assumed.
        by_tier: the most bytes that each tier below the device held.
        capacity_bytes: what the step may take of a CUDA device; None is all that the allocator can get of it.
        advises: whether to look for what the allocator would reserve under other settings, where that may be less.
    """
    hardware = clock.hardware
    sizes, reserved, warnings = _allocated(ledger, hardware, capacity_bytes, advises=advises)
    peaks = _peaks(ledger, sizes)
    categories = _categories(ledger)
    steady = peaks[-1]
    first_event, first_op = ledger.steps[-1]
    schedule = Schedule.of_last_step(clock, ledger.ops, first_op) if clock.timed else None
    by_category: dict[str, int] = defaultdict(int)
    by_module: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for number in steady.alive:
        record = ledger.records[number]
        by_category[categories[number]] += record.nbytes
        by_module[_module(record)][categories[number]] += record.nbytes
    if rounding := steady.nbytes - sum(by_category.values()):
        by_category[_ROUNDING] = by_module["allocator"][_ROUNDING] = rounding
    changes, positions, phases = _timeline(ledger, sizes, categories, *_positions(ledger, clock))
    largest = sorted(steady.alive, key=lambda number: -ledger.records[number].nbytes)[:_HOLDINGS]
    return Profile(
        method="static",
        notes=(*notes, *warnings, *_unlike_cuda(hardware), *_untimed(ledger, hardware)),
        hardware=hardware,
        peak_bytes=steady.nbytes,
        first_step_peak_bytes=peaks[0].nbytes,
        reserved_peak_bytes=reserved,
        moment=_moment(ledger, steady, first_event),
        by_category=dict(sorted(by_category.items(), key=lambda item: _PLACES[item[0]])),
        categories_by_module={path: dict(parts) for path, parts in sorted(by_module.items())},
        by_tier=dict(by_tier or {}),
        holdings=tuple(_holding(ledger, number, categories[number]) for number in largest),
        flops=sum(op.flops for op in ledger.ops[first_op:]),
        step_seconds=None if schedule is None else schedule.seconds,
        exposed_seconds={} if schedule is None else schedule.exposed_seconds,
        prefetch_depth=None if schedule is None else _prefetch_depth(ledger, clock),
        seconds_by_module={} if schedule is None else schedule.seconds_by_module,
        changes=changes,
        positions=positions,
        position_unit="operators" if schedule is None else "seconds",
        phases=phases,
        schedule=schedule,
    )


def _settings() -> AllocatorSettings:
    """The allocator's settings in this environment, which a process that trains would inherit."""
    return AllocatorSettings.from_env(next(filter(None, map(os.environ.get, _ALLOCATOR_VARIABLES)), ""))


def _allocated(
    ledger: Ledger, hardware: Hardware, capacity_bytes: int | None, *, advises: bool = False
) -> tuple[list[int], int | None, list[str]]:
    """What each storage takes of the device, what the allocator reserves at its most, and what is to be said about it.

    On CUDA a storage takes a whole block. Where the device is too small for all that the allocator would like to keep,
    it gives back what it only caches before an allocation fails, and the blocks are those that it hands out then.
    """
    exact = [record.nbytes for record in ledger.records]
    if hardware.device_type != "cuda":
        return exact, None, []
    events = _allocator_events(ledger)
    settings = _settings()
    count = len(exact)
    capacity_bytes = max(1, hardware.usable_bytes if capacity_bytes is None else capacity_bytes)
    streams = {number: record.stream for number, record in enumerate(ledger.records) if record.stream}
    streams |= {number + count: stream for number, stream in streams.items()}  # of the repetition
    found, notes = replay(events, settings=settings, streams=streams), []
    advice = [*_advice(events, found, settings, streams, capacity_bytes)] if advises else []
    # The fraction that a process allows itself, and the collection that goes with it, only count against a capacity.
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
    sizes = [blocks.get(number + count, blocks.get(number, 0)) for number in range(count)]
    return sizes, found.reserved_peak_bytes, notes + advice


def _advice(
    events: Sequence[tuple[int, int]],
    found: Replay,
    settings: AllocatorSettings,
    streams: Mapping[int, int],
    capacity_bytes: int,
) -> Iterator[str]:
    """Expandable segments, if the step would reserve less with them, by a share of the device that is worth a setting.

    They grow where fixed ones are left with holes that nothing larger fits in.
    """
    least = _WORTH_A_SETTING * capacity_bytes
    if settings.expandable_segments or found.reserved_peak_bytes - found.allocated_peak_bytes < least:
        return
    expandable = replace(settings, expandable_segments=True)
    less = replay(events, settings=expandable, streams=streams).reserved_peak_bytes
    if found.reserved_peak_bytes - less >= least:
        expanding, fixed = format_unlike(less, found.reserved_peak_bytes)
        yield (
            f"with {_ALLOCATOR_VARIABLES[0]}=expandable_segments:True the step would reserve {expanding} in place of "
            f"{fixed}"
        )


def _allocator_events(ledger: Ledger) -> list[tuple[int, int]]:
    """The events that `replay` takes: of the steps, and of the last of them once more.

    A step that begins among the blocks that the one before left may be given others: a third step of T5 reserves 5 %
    more than the second. What the repetition allocates has the numbers that follow those of the records.
    """
    last, trims, trims_if_grown = ledger.steps[-1][0], set(ledger.trims), set(ledger.trims_if_grown)
    events: list[tuple[int, int]] = []
    begin = 0
    exact = [record.nbytes for record in ledger.records]
    for at, event in enumerate(ledger.events):
        if at == last:
            begin = len(events)
        if at in trims:
            events.append(TRIM)
        if at in trims_if_grown:
            events.append(TRIM_IF_GROWN)
        # Freed under its own size: the 0 bytes of an empty tensor are no event, at its death as at its birth.
        events.append((event - 1, exact[event - 1]) if event > 0 else (-event - 1, -exact[-event - 1]))
    return events + _once_more(events[begin:], len(ledger.records))


def _once_more(step: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The events of `step` again, in which storage number `n` of it is number ``n + count``.

    What a step frees of the one before, such as its gradients, the repetition frees of this one. None if what this one
    leaves is something else.
    """
    born = {number: nbytes for number, nbytes in step if nbytes > 0}
    died = {number: -nbytes for number, nbytes in step if nbytes < 0 <= number}
    left = sorted(born.keys() - died.keys())
    former = sorted(died.keys() - born.keys())
    if [born[number] for number in left] != [died[number] for number in former]:
        return []
    renamed = {number: number + count for number in born} | dict(zip(former, left, strict=True))
    return [(renamed.get(number, number), nbytes) for number, nbytes in step]


def _peaks(ledger: Ledger, sizes: list[int]) -> list[_Peak]:
    """The peak of each step; the first to reach it, if several moments do."""
    bounds = [event for event, _ in ledger.steps] + [len(ledger.events)]
    peaks = []
    live = 0
    alive: dict[int, None] = {}
    live += _apply(ledger.events[: bounds[0]], alive, sizes)
    for begin, end in itertools.pairwise(bounds):
        best, at = live, begin - 1
        for index, event in enumerate(ledger.events[begin:end], begin):
            live += sizes[event - 1] if event > 0 else -sizes[-event - 1]
            if live > best:
                best, at = live, index
        _apply(ledger.events[begin : at + 1], alive, sizes)
        peaks.append(_Peak(best, at, tuple(alive)))
        _apply(ledger.events[at + 1 : end], alive, sizes)
    return peaks


def _apply(events: Sequence[int], alive: dict[int, None], sizes: list[int]) -> int:
    """Let `events` happen to what is `alive`; returns how many bytes they add."""
    added = 0
    for event in events:
        if event > 0:
            alive[event - 1] = None
            added += sizes[event - 1]
        else:
            alive.pop(-event - 1, None)
            added -= sizes[-event - 1]
    return added


def _categories(ledger: Ledger) -> list[str]:
    """The category of each storage; of one without, whether backward waited for it, or whether it came and went."""
    found: list[str] = []
    in_forward, in_backward = (
        [op.phase is phase for op in ledger.ops] + [False] for phase in (Phase.FORWARD, Phase.BACKWARD)
    )  # the last one is that of what no operator made, number -1
    backwards = [at for at, number in enumerate(ledger.event_ops) if in_backward[number]]
    died = {-event - 1: at for at, event in enumerate(ledger.events) if event < 0}
    born = {event - 1: at for at, event in enumerate(ledger.events) if event > 0}
    following = iter(backwards)
    next_backward = next(following, None)
    for number, record in enumerate(ledger.records):
        if record.category:
            found.append(record.category)
            continue
        at = born.get(number, 0)
        while next_backward is not None and next_backward < at:
            next_backward = next(following, None)
        waited = (
            in_forward[record.op] and next_backward is not None and died.get(number, len(ledger.events)) > next_backward
        )
        found.append("activation" if waited else "temporary")
    return found


def _module(record: StorageRecord) -> str:
    return record.path.rpartition(".")[0] if record.category in _NAMED_FOR_TENSORS else record.path


def _positions(ledger: Ledger, clock: Clock) -> tuple[list[float], list[float]]:
    """When the operators of the last step begin and end; one after the other if their times are not known."""
    first_op = ledger.steps[-1][1]
    if not clock.timed:
        count = len(ledger.ops) - first_op
        return [float(at) for at in range(count)], [float(at + 1) for at in range(count)]
    zero = clock.steps[-1]
    return [begin - zero for begin in clock.begins[first_op:]], [end - zero for end in clock.ends[first_op:]]


def _prefetch_depth(ledger: Ledger, clock: Clock) -> int | None:
    """The depth that hides the copies of the last step; None if there are none."""
    first_op, zero = ledger.steps[-1][1], clock.steps[-1]
    moved = [transfer for transfer in clock.transfers if transfer.begin >= zero]
    if not moved:
        return None
    ops = ledger.ops[first_op:]
    passes = itertools.accumulate(
        itertools.pairwise([ops[0], *ops]), lambda count, pair: count + (pair[0].phase is not pair[1].phase), initial=0
    )
    seconds = [end - begin for begin, end in zip(clock.begins[first_op:], clock.ends[first_op:], strict=True)]
    return prefetch_depth(seconds, list(passes)[1:], moved, first=first_op)


def _unlike_cuda(hardware: Hardware) -> list[str]:
    """What of the bytes is not known to hold on a device that is not a CPU nor an NVIDIA card with its own memory.

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


def _untimed(ledger: Ledger, hardware: Hardware) -> list[str]:
    """Why a step has no time on hardware that says how fast it is: it does not compute in the step's dtype."""
    if not hardware.flops_per_second:
        return []
    missing = ", ".join(sorted(dtype for dtype in ledger.computes_in() if not has_rate(dtype, hardware)))
    if not missing:
        return []
    known = ", ".join(sorted(hardware.flops_per_second))
    return [
        f"no step time: {hardware.name} has no rate for {missing}, in which the step computes, and the memory is that "
        f"of a card that has; train in a dtype that it has ({known}), or write the rate down with "
        "dataclasses.replace(hardware, flops_per_second=...)"
    ]


def _moment(ledger: Ledger, peak: _Peak, begin: int) -> Moment:
    if peak.event < begin:
        return Moment("the beginning", "", Phase.FORWARD.value)
    op = ledger.ops[ledger.event_ops[peak.event]]
    return Moment(op.name, op.path, op.phase.value)


def _holding(ledger: Ledger, number: int, category: str) -> Holding:
    record = ledger.records[number]
    op: OpCall | None = ledger.ops[record.op] if record.op >= 0 else None
    return Holding(
        record.nbytes,
        category,
        record.path,
        op.name if op else "",
        op.phase.value if op else "",
        record.shape,
        record.dtype,
    )


def _timeline(
    ledger: Ledger, sizes: list[int], categories: list[str], begins: list[float], ends: list[float]
) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...], tuple[tuple[str, float], ...]]:
    """The changes of the last step, their positions, and where its phases begin."""
    begin, first_op = ledger.steps[-1]
    alive: dict[int, None] = {}
    _apply(ledger.events[:begin], alive, sizes)
    rounding = _PLACES[_ROUNDING]
    parts = [
        (_PLACES[category], each.nbytes, size - each.nbytes)
        for each, size, category in zip(ledger.records, sizes, categories, strict=True)
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
    for event, op in zip(ledger.events[begin:], ledger.event_ops[begin:], strict=True):
        # An operator's results are there while it runs, and what it was the last to need until it is done.
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
    for op_call, at in zip(ledger.ops[first_op:], begins, strict=True):
        if op_call.phase is not last:
            last = op_call.phase
            phases.append((last.value, at))
    return tuple(changes), tuple(positions), tuple(phases)
