"""The analysis of a trace: its `Profile`."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from memscale.hardware import Hardware, has_rate
from memscale.simulation.memory import DeviceMemory, Peak, applied, memory
from memscale.simulation.results import Holding, Moment, Profile
from memscale.simulation.schedule.schedule import Schedule
from memscale.simulation.schedule.sizing import prefetch_depth
from memscale.simulation.trace import CATEGORIES, Phase, Storage, Trace

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
        notes=(*trace.notes, *taken.notes, *_unlike_cuda(hardware), *_untimed(trace)),
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
        prefetch_depth=None if schedule is None else _prefetch_depth(trace),
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


def _prefetch_depth(trace: Trace) -> int | None:
    """Returns the prefetch depth that hides the copies of the last step; None if the step has no copies."""
    ops, first_op, times = trace.last_operators, trace.steps[-1][1], trace.times
    moved = [transfer for transfer in times.transfers if transfer.begin >= times.steps[-1]]
    if not moved:
        return None
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
