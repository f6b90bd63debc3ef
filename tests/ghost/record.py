"""A record of the calls that order memory, as a CUDA program makes them, and what is wrong with their order.

The fake libcudart records copies, events, waits, launches and pinned memory. A dispatch mode adds which memory a kernel
is given, and `allocator.cpp` which blocks PyTorch's allocator hands out and gets back, each at its moment.
"""

import contextlib
import ctypes
import gc
import importlib
from bisect import bisect_right, insort
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale.optimizers.separability import check_separable
from tests.support.checking.accesses import Access, join

_NAMES = (
    "kernel, copy, fill, record, wait, done, event waited, stream waited, device waited, malloc, free, pinned, "
    "unpinned, stream"
)
KINDS = dict(enumerate(_NAMES.split(", "), start=1)) | {32: "handed out", 33: "given back", 34: "read", 35: "write"}
READ, WRITTEN = 34, 35
_FOLLOWER = Path(torch.__file__).parents[1] / "nvidia/cu13/lib/libghost_allocator.so"
_PAGE_BITS = 21
_HOST = "host"


class Call(NamedTuple):
    """One call: copies and fills have `to`, `source` and `size`; events are `to`."""

    kind: str
    stream: int
    to: int
    source: int
    size: int
    thread: int


class _Raw(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("kind", "stream", "to", "source", "size", "thread")]


def fake_runtime():
    """The fake libcudart, or `None` where a real one is loaded, or none."""
    if not torch.cuda.is_available():
        return None
    lib = ctypes.CDLL("libcudart.so.13")
    if not hasattr(lib, "ghost_record"):
        return None
    lib.ghost_calls.restype = ctypes.c_size_t
    lib.ghost_note.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    lib.ghost_delay.argtypes = [ctypes.c_ulonglong]
    return lib


@pytest.fixture(scope="module", name="lib")
def recording():
    """The fake libcudart, for tests that read its record."""
    found = fake_runtime()
    if found is None:
        pytest.skip("a real CUDA runtime keeps no record of its calls")
    torch.zeros(1).cuda()
    ctypes.CDLL(str(_FOLLOWER)).ghost_follow_allocator()
    gc.collect()
    gc.freeze()  # what is there by now need not be gone through again in every program
    yield found
    gc.unfreeze()


@pytest.fixture
def tried_on_the_cpu(monkeypatch):
    """Optimizers are tried where numbers are right: by those of fake kernels, nothing would pass for separable."""
    small = [torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3))]
    evidence = check_separable(torch.optim.AdamW(small), None)
    module = importlib.import_module("memscale.optimizers.transformed")
    monkeypatch.setattr(module, "check_separable", lambda optimizer, how: evidence)


class Accessing(TorchDispatchMode):
    """Notes which memory each operator is given, before it runs."""

    def __init__(self, lib):
        super().__init__()
        self._note = lib.ghost_note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func._opname
        if func.is_view or name in ("record_stream", "detach"):
            return func(*args, **kwargs)
        if not name.startswith("new_") and not name.endswith("_like"):  # which look at sizes only
            self._note_arguments(func._schema.arguments, args, kwargs)
        made = func(*args, **kwargs)
        if not name.startswith(("empty", "new_empty")):
            for tensor in tree_leaves(made):
                self._access(tensor, WRITTEN)
        return made

    def _note_arguments(self, arguments, args, kwargs):
        values = [*args, *[kwargs.get(argument.name) for argument in arguments[len(args) :]]]
        for argument, value in zip(arguments, values, strict=True):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                self._access(tensor, WRITTEN if written else READ)

    def _access(self, tensor, kind):
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or tensor.numel() == 0:
            return
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        stream = torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else -1
        self._note(kind, stream, tensor.data_ptr(), extent * tensor.element_size())


@contextlib.contextmanager
def recorded(lib, *, delay=0):
    """A list that has the calls of the body once that is over; `delay` is the seed of `ghost_delay`."""
    found = []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    lib.ghost_delay(delay)
    lib.ghost_record(1)
    try:
        with Accessing(lib):
            yield found
    finally:
        lib.ghost_record(0)
        lib.ghost_delay(0)
        raw = ctypes.POINTER(_Raw)()
        count = lib.ghost_calls(ctypes.byref(raw))
        found += [
            Call(KINDS[call.kind], call.stream, call.to, call.source, call.size, call.thread) for call in raw[:count]
        ]


class Race(NamedTuple):
    """Two accesses to the same bytes that no call orders, or a copy of what nothing has written."""

    what: str
    first: str
    second: str


class Order:
    """Vector clocks over a record. A stream's work comes after what the host had seen done when it was given that."""

    def __init__(self):
        self.races = []
        self._clocks = {}
        self._events = {}
        self._seen = {_HOST: 1}  # what the host knows to be done, and its own time
        self._accesses = defaultdict(list)  # by page of addresses
        self._blocks = []  # where those begin that are handed out, in order
        self._ends = {}
        self._written = {}  # whether anything has been written to each
        self._ranges = {}  # pinned memory

    def check(self, calls):
        """What is wrong with the order of `calls`."""
        for number, call in enumerate(calls):
            if (rule := getattr(self, "_" + call.kind.replace(" ", "_"), None)) is not None:
                rule(call, f"{number}: {call.kind} on {call.stream:#x}")
        return self.races

    def _issue(self, stream):
        clock = self._clocks.setdefault(stream, {})
        join(clock, self._seen)
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def _record(self, call, site):
        self._events[call.to] = dict(self._issue(call.stream))

    def _wait(self, call, site):
        join(self._clocks.setdefault(call.stream, {}), self._events.get(call.to, {}))

    def _done(self, call, site):
        join(self._seen, self._events.get(call.to, {}))

    _event_waited = _done

    def _stream_waited(self, call, site):
        join(self._seen, self._clocks.get(call.stream, {}))

    def _device_waited(self, call, site):
        for clock in self._clocks.values():
            join(self._seen, clock)

    def _handed_out(self, call, site):
        """Whoever has the block may write it at once, on the stream that it was asked for on."""
        self._touch("write", call.stream, self._issue(call.stream), call.to, call.size, site)
        insort(self._blocks, call.to)
        self._ends[call.to], self._written[call.to] = call.to + call.size, False

    def _given_back(self, call, site):
        if self._written.pop(call.to, None) is not None:
            self._blocks.remove(call.to)

    def _read(self, call, site):
        self._access("read", call, site)

    def _write(self, call, site):
        self._access("write", call, site)

    def _access(self, kind, call, site):
        if call.stream != -1:
            self._touch(kind, call.stream, self._issue(call.stream), call.to, call.size, site)
        elif any(start <= call.to < stop for start, stop in self._ranges.items()):
            self._seen[_HOST] += 1
            self._touch(kind, _HOST, self._seen, call.to, call.size, site)
        if kind == "write":
            self._is_written(call.to)

    def _fill(self, call, site):
        self._touch("write", call.stream, self._issue(call.stream), call.to, call.size, site)
        self._is_written(call.to)

    def _copy(self, call, site):
        clock = self._issue(call.stream)
        self._touch("read", call.stream, clock, call.source, call.size, site)
        self._touch("write", call.stream, clock, call.to, call.size, site)
        if self._written.get(self._block(call.source), True) is False:
            self.races.append(Race("a copy of what nothing has written", f"{call.source:#x}", site))
        self._is_written(call.to)

    def _pinned(self, call, site):
        self._ranges[call.to] = call.to + call.size

    def _unpinned(self, call, site):
        """Its memory goes, and nothing may be under way there."""
        stop = self._ranges.pop(call.to, call.to)
        self._touch("write", _HOST, self._seen, call.to, stop - call.to, site)

    def _block(self, address):
        """The block of the device that `address` is in."""
        at = bisect_right(self._blocks, address)
        return self._blocks[at - 1] if at and address < self._ends[self._blocks[at - 1]] else None

    def _is_written(self, address):
        if (block := self._block(address)) is not None:
            self._written[block] = True

    def _touch(self, kind, stream, clock, start, size, site):
        if not size:
            return
        stop = start + size
        access = Access(kind, start, stop, stream, clock[stream], site)
        for page in range(start >> _PAGE_BITS, (stop - 1 >> _PAGE_BITS) + 1):
            kept = []
            for other in self._accesses[page]:
                is_before = other.before(clock)
                if other.start < stop and start < other.stop and "write" in (kind, other.kind) and not is_before:
                    self.races.append(Race(f"{other.kind} and {kind} of {start:#x}", other.site, site))
                # What comes after this access comes after the other one too.
                is_within = start <= other.start and other.stop <= stop and kind in ("write", other.kind)
                if not (is_before and is_within):
                    kept.append(other)
            self._accesses[page] = [*kept, access]
