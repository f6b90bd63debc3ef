"""Ground truth for memory: the allocator events of one real step."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef

from memscale.core import ConfigError, RuntimeUnavailable, internals, shown, tensors
from memscale.simulation.results import MemoryTimeline
from memscale.simulation.rules.few_bits import quantization_tensors
from memscale.simulation.sandbox.step_scope import with_storages
from memscale.simulation.trace import CATEGORIES

Roles = Callable[[], Mapping[str, Iterable[torch.Tensor]]]

#: Categories that no event shows; the caller names their tensors through ``roles``.
ROLES = ("parameter", "optimizer state", "gradient", "input")
_BACKWARD_NODE = "autograd::engine::evaluate_function"
_ALLOCATION = "[memory]"
_CUDA = 1  # c10::DeviceType::CUDA, as the profiler writes it


@dataclass(frozen=True, eq=False)
class AllocatorTrace:
    """The memory of one device during one real step: bytes at start, peak and end, and live bytes over time.

    Args:
        start_bytes: the bytes that lived when the step began. On CUDA, all bytes that the allocator held; on CPU, where
            the allocator keeps no such count, the bytes of the storages named by ``roles`` (0 without it).
        peak_bytes: the most bytes that lived at once, `start_bytes` included.
        end_bytes: the bytes that lived when the step returned, `start_bytes` included.
        seconds: wall time of the step, with the recording's small overhead.
        backward_seconds: seconds from the step's start to the first node of a backward pass; None without a backward.
        timeline: live bytes over time in seconds, by category. Buffers count as ``parameter``, and scratch memory of
            kernels as ``temporary``.
    """

    start_bytes: int
    peak_bytes: int
    end_bytes: int
    seconds: float
    backward_seconds: float | None
    timeline: MemoryTimeline

    @property
    def growth_bytes(self) -> int:
        """The peak minus the bytes that lived before the step."""
        return self.peak_bytes - self.start_bytes


class _Held(NamedTuple):
    """A storage with a role, held by a weak reference: a strong one would keep alive a storage that the step frees."""

    role: str
    nbytes: int
    ref: StorageWeakRef


class _Event(NamedTuple):
    """An allocator event: positive bytes allocate, negative bytes free."""

    time_ns: int
    address: int
    nbytes: int
    in_backward: bool


def measure(
    step: Callable[[], object],
    *,
    device: torch.device | str = "cpu",
    roles: Roles | None = None,
) -> AllocatorTrace:
    """Runs ``step`` once and returns every byte that the allocator of ``device`` handed out and took back.

    The numbers come from PyTorch's real allocators: on CPU from the allocation events of ``torch.profiler``, on
    CUDA from ``torch.cuda.max_memory_allocated`` for the peak and from those events for the timeline. A block has
    the role of the tensor that holds it before or after the step. A block without a role is an ``activation`` if it
    was allocated outside a backward pass and still lived when a later backward node began, else ``temporary``.
    Memory from before the step without a role is ``other`` on CUDA and not counted on CPU: without ``roles`` a CPU
    peak lacks weights and optimizer states, and must not be compared with a budget.

    >>> import torch, memscale as ms
    >>> trace = ms.measure(lambda: torch.empty(1 << 20, dtype=torch.uint8))
    >>> trace.growth_bytes, trace.end_bytes
    (1048576, 0)

    Args:
        step: called without arguments; its result is dropped before the recording ends.
        device: the device whose memory is counted, ``"cpu"`` or a CUDA device.
        roles: called before and after the step; maps names in :data:`ROLES` to the tensors that have
            that role at the time of the call. :func:`training_roles` makes ``roles`` for a usual training step.

    Raises:
        ConfigError: ``step`` or ``roles`` cannot be called, ``device`` is neither a CPU nor a CUDA device, or ``roles``
            names an unknown role.
        RuntimeUnavailable: ``device`` is a CUDA device and PyTorch finds none, or a profiler of the caller's is on.

    Warns:
        RuntimeWarning: the step freed memory from before the step, which the CPU allocator does not
            report; the bytes are then counted to the end, so `peak_bytes` is an upper bound.

    Cost: the step runs a few percent slower, and the events take about 1 KiB each while they are read; on CUDA the
    events go through a temporary file.
    """
    device = _checked_device(device)
    if not callable(step):
        raise ConfigError(
            f"measure() runs a step, got {shown(step)}; write measure(lambda: model(batch).sum().backward())"
        )
    if roles is not None and not callable(roles):
        raise ConfigError(
            f"measure(roles={shown(roles)}) must be a function or None; write roles=training_roles(model, optimizer)"
        )
    if internals.autograd._profiler_enabled():
        raise RuntimeUnavailable(
            "measure() records a step with PyTorch's profiler, which already records this thread and would end here; "
            "call measure() before that recording or after it"
        )
    # Cyclic garbage of earlier steps would otherwise be freed at a random moment of this step.
    gc.collect()
    before = _held(roles, device)
    start_by_role = dict.fromkeys(CATEGORIES, 0)
    for held in before.values():
        start_by_role[held.role] += held.nbytes
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start_by_role["other"] = max(0, torch.cuda.memory_allocated(device) - sum(start_by_role.values()))

    with (
        _quietly(),
        # torch.profiler.profile would import the compiler and build a Python object for every event.
        profile(use_kineto=True, profile_memory=True) as recording,
    ):
        began_ns, began = time.time_ns(), time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began

    events, backward_ns = _read(recording, device)
    after = _held(roles, device)
    deltas, seen_frees = _deltas(events, before, after, backward_ns, device)
    deltas[:, 0] = [start_by_role[category] for category in CATEGORIES]
    live_bytes = dict(zip(CATEGORIES, deltas.cumsum(axis=1), strict=True))
    offsets = [0, *(max(0, event.time_ns - began_ns) for event in events)]
    backward_seconds = max(0, backward_ns[0] - began_ns) / 1e9 if backward_ns else None
    phases = (("forward", 0.0), *((("backward", backward_seconds),) if backward_seconds is not None else ()))
    timeline = MemoryTimeline(np.array(offsets, dtype=np.float64) / 1e9, "seconds", live_bytes, phases)
    total_bytes = timeline.total_bytes
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        peak_bytes = int(total_bytes.max())
        unseen_bytes = sum(held.nbytes for at, held in before.items() if at not in seen_frees and held.ref.expired())
        if unseen_bytes:
            warnings.warn(
                f"the step freed {unseen_bytes} bytes that lived before it, which the CPU allocator does not "
                "report: peak_bytes is an upper bound; for the exact peak drop old gradients before the step",
                RuntimeWarning,
                stacklevel=2,
            )
    return AllocatorTrace(
        start_bytes=int(total_bytes[0]),
        peak_bytes=peak_bytes,
        end_bytes=int(total_bytes[-1]),
        seconds=seconds,
        backward_seconds=backward_seconds,
        timeline=timeline,
    )


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps Kineto from logging the start and end of each recording to stderr, between the lines of a command.

    Kineto reads the variable when the first recording of a process starts.
    """
    own = "KINETO_LOG_LEVEL" not in os.environ
    if own:
        os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        if own:
            del os.environ["KINETO_LOG_LEVEL"]


def training_roles(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: object = None
) -> Roles:
    """Returns the ``roles`` of a usual training step: parameters, their gradients, states and the batch.

    >>> layer = torch.nn.Linear(4, 2, bias=False)
    >>> roles = training_roles(layer)
    >>> [(role, sum(t.nbytes for t in tensors)) for role, tensors in roles().items()]
    [('parameter', 32), ('optimizer state', 0), ('gradient', 0), ('input', 0)]

    Args:
        model: its parameters, its buffers and the scales of quantized weights are ``parameter``; the parameters'
            ``.grad`` are ``gradient``.
        optimizer: the tensors of its state are ``optimizer state``.
        batch: a tree whose tensors are ``input``.
    """

    def roles() -> dict[str, list[torch.Tensor]]:
        parameters = list(model.parameters())
        scales = [tensor for module in model.modules() for tensor in quantization_tensors(module).values()]
        states = dict(optimizer.state) if optimizer is not None else {}
        return {
            "parameter": [*parameters, *model.buffers(), *scales],
            "optimizer state": tensors(list(states.values())),
            "gradient": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "input": tensors(batch),
        }

    return roles


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"measure(device=...) got {device!r}, which is no device of PyTorch") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"measure(device=...) must be a CPU or a CUDA device, got {str(device)!r}")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeUnavailable(f"measure(device={str(device)!r}) needs CUDA, and PyTorch finds none here")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _held(roles: Roles | None, device: torch.device) -> dict[int, _Held]:
    """Returns the storages on ``device`` that have a role now, by address."""
    named = roles() if roles is not None else {}
    unknown = sorted(set(named) - set(ROLES))
    if unknown:
        raise ConfigError(f"measure(roles=...) returned the unknown roles {unknown}; known are {list(ROLES)}")
    held: dict[int, _Held] = {}
    for role in ROLES:
        for tensor in with_storages(list(named.get(role, ()))):
            storage = tensor.untyped_storage()
            if storage.device == device and storage.nbytes():
                ref = StorageWeakRef(storage)
                held.setdefault(storage.data_ptr(), _Held(role, storage.nbytes(), ref))
    return held


def _read(recording: profile, device: torch.device) -> tuple[list[_Event], list[int]]:
    """Returns the allocator events of ``device`` and the start times of backward nodes (ns), both in order of time."""
    results = recording.kineto_results
    assert results is not None
    events: list[_Event] = []
    backward_ns: list[int] = []
    pending = [(root, False) for root in results.experimental_event_tree()]
    while pending:
        node, in_backward = pending.pop()
        fields: Any = node.extra_fields
        if node.name == _ALLOCATION:
            if fields.device == device:
                events.append(_Event(node.start_time_ns, fields.ptr, fields.alloc_size, in_backward))
        elif not in_backward and node.name.startswith(_BACKWARD_NODE):
            in_backward = True
            backward_ns.append(node.start_time_ns)
        pending.extend((child, in_backward) for child in reversed(node.children))
    if device.type == "cuda":
        in_backward_at = {(event.time_ns, event.address) for event in events if event.in_backward}
        events = [
            event._replace(in_backward=(event.time_ns, event.address) in in_backward_at)
            for event in _written_events(recording, device)
        ]
    events.sort(key=lambda event: event.time_ns)
    return events, sorted(backward_ns)


def _written_events(recording: profile, device: torch.device) -> list[_Event]:
    """Returns the allocator events of a CUDA device, read from the profiler's trace file.

    The profiler's event tree omits allocator events outside operators (a release by `del` is one), and its flat list
    has no addresses; the file has both.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recording.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    base_ns = int(trace["baseTimeNanoseconds"])
    events = []
    for event in trace["traceEvents"]:
        about = event.get("args", {})
        if event["name"] == "[memory]" and about["Device Type"] == _CUDA and about["Device Id"] == device.index:
            events.append(_Event(base_ns + round(event["ts"] * 1000), about["Addr"], about["Bytes"], False))
    return events


def _deltas(
    events: list[_Event],
    before: Mapping[int, _Held],
    after: Mapping[int, _Held],
    backward_ns: list[int],
    device: torch.device,
) -> tuple[npt.NDArray[np.int64], set[int]]:
    """Returns the change in bytes by (category, event), column 0 empty, and the held addresses whose free was seen."""
    deltas = np.zeros((len(CATEGORIES), len(events) + 1), dtype=np.int64)
    row = {category: index for index, category in enumerate(CATEGORIES)}
    blocks: list[tuple[int, int | None]] = []  # the indices of the two events; None for a block that outlives the step
    alive: dict[int, int] = {}
    seen_frees: set[int] = set()
    for index, event in enumerate(events):
        allocated = alive.pop(event.address, None)
        if allocated is not None:
            # An address handed out twice was freed in between, by a thread that the profiler does not record.
            blocks.append((allocated, index))
        if event.nbytes > 0:
            alive[event.address] = index
        elif allocated is None:
            held = before.get(event.address) if event.address not in seen_frees else None
            if held is not None:
                seen_frees.add(event.address)
                deltas[row[held.role], index + 1] -= held.nbytes
            if device.type == "cuda":
                # CUDA blocks are rounded up, so a free returns a little more than the tensor's bytes.
                # On CPU the profiler's sizes of blocks from before the recording may be stale, so they are not read.
                excess_bytes = -event.nbytes - (held.nbytes if held is not None else 0)
                deltas[row["other"], index + 1] -= excess_bytes
    blocks.extend((index, None) for index in alive.values())
    for allocated, freed in blocks:
        birth, death = events[allocated], None if freed is None else events[freed]
        category = row[_category(birth, death, after, backward_ns)]
        deltas[category, allocated + 1] += birth.nbytes
        if freed is not None:
            deltas[category, freed + 1] -= birth.nbytes
    return deltas, seen_frees


def _category(birth: _Event, death: _Event | None, after: Mapping[int, _Held], backward_ns: list[int]) -> str:
    if death is None and birth.address in after:
        return after[birth.address].role
    following = bisect_right(backward_ns, birth.time_ns)
    if birth.in_backward or following == len(backward_ns):
        return "temporary"
    return "activation" if death is None or death.time_ns > backward_ns[following] else "temporary"
