"""The live storages of a simulated step: each storage's record in the trace, from its first use until it dies.

`InPlaceSums` finds the sums and products that PyTorch makes in place where no dispatch mode is active.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from memscale.core import OpOverload
from memscale.simulation.dispatch.trace_builder import GIVEN, StorageRecord, Sum, TraceBuilder
from memscale.simulation.kernels.cuda_fused import below
from memscale.simulation.kernels.kernels import linear
from memscale.simulation.trace import Phase

# Known values are computed up to these sizes: index arithmetic and routing stay well below, activations well above.
LARGEST_KNOWN = 1 << 20
_LARGEST_KNOWN_FLOATS = 1 << 14


class LiveStorages:
    """The live storages of a simulation.

    Args:
        builder: the trace builder that records births and deaths.
        residents: address of a storage object from before the step -> (category, path).
        has_own_memory: whether the device has memory of its own besides a CPU's.
        stream: returns the number of the current stream; 0 is the step's main stream.

    Attributes:
        given: the addresses of storages from before the step that are stand-ins for other tensors.
        live: address of the storage object -> number of the record, for each live storage.
    """

    def __init__(
        self,
        builder: TraceBuilder,
        residents: dict[int, tuple[str, str]],
        *,
        has_own_memory: bool = False,
        stream: Callable[[], int] = lambda: 0,
    ) -> None:
        self.builder = builder
        self._current_stream = stream
        self._streams = {0: 0}  # the number of a stream in the trace, by first use
        self.has_own_memory = has_own_memory
        self.offloaded = False  # whether new storages are on another memory tier
        self.counts = False  # whether an operator is of single numbers, whose time on a CPU is that of the call
        self._residents = residents
        self.given: frozenset[int] = frozenset()
        self._entered_offloaded: set[int] = set()  # addresses of storages that `enter_offloaded` recorded
        self.live: dict[int, int] = {}  # address of the storage object -> number of its record
        self._sizes: dict[int, int] = {}  # address -> bytes, of storages that were resized
        self._deaths: dict[int, _Death] = {}
        self._waits = 0  # the thread that collects garbage, whose deaths are deferred
        self._waiting: list[int] = []  # numbers of dead storages whose deaths are not recorded yet
        self._untouched: list[tuple[torch.Tensor, torch.Tensor]] = []  # (the caller's real tensor, its copy)

    def record(self, tensor: torch.Tensor) -> StorageRecord:
        """Returns the record of the storage under `tensor`; a new storage is recorded as from before the step."""
        return self.builder.records[self.number(tensor)]

    def of_arguments(self, tensors: list[torch.Tensor]) -> list[StorageRecord]:
        """Returns the records of an operator's arguments; set `offloaded` if the host computes its results."""
        live, known = self.live, self.builder.records
        records, some_offloaded = [], False
        for tensor in tensors:
            number = live.get(tensor.untyped_storage()._cdata)
            record = known[self.number(tensor) if number is None else number]
            records.append(record)
            some_offloaded = some_offloaded or record.offloaded
        # Next to an accelerator, the CPU computes from offloaded tensors, and its results are offloaded too.
        self.offloaded = some_offloaded and self.has_own_memory and all(map(_may_be_offloaded, records))
        self.counts = not (self.offloaded and any(record.shape for record in records))
        return records

    def number(self, tensor: torch.Tensor) -> int:
        """Returns the number in the trace of the record of the storage under `tensor`."""
        storage = tensor.untyped_storage()
        number = self.live.get(storage._cdata)
        if number is None:
            category, path = self._residents.get(storage._cdata, ("other", ""))
            known = category != "parameter" and not tensor.requires_grad
            number = self.enter(storage, tensor, -1, category, path, known)
            if category == "input" or storage._cdata in self.given:
                self.builder.records[number].guess = GIVEN
            if known and is_small(tensor):
                self._untouched.append((tensor.detach(), tensor.detach().clone()))
        return number

    def enter(
        self, storage: torch.UntypedStorage, tensor: torch.Tensor, op: int, category: str, path: str, known: bool
    ) -> int:
        """Records that operator `op` made `storage`, with `tensor` over it."""
        offloaded = self.offloaded
        nbytes = 0 if offloaded else storage.nbytes()
        shape, dtype = tuple(tensor.shape), _name_of(tensor.dtype)
        record = StorageRecord(nbytes, op, category, shape, dtype, path, known, "", offloaded)
        if self._current_stream():
            record.stream = self._stream()
        number = self.builder.birth(record)
        key = storage._cdata
        self.live[key] = number
        self._deaths[key] = _Death(storage, self._died)
        self._deaths[key].key = key
        return number

    def enter_offloaded(self, tensor: torch.Tensor) -> None:
        """Records a new storage of a parameter or a gradient on another memory tier."""
        before, self.offloaded = self.offloaded, True
        self.enter(tensor.untyped_storage(), tensor, len(self.builder.ops) - 1, "", "", False)
        self._entered_offloaded.add(tensor.untyped_storage()._cdata)
        self.offloaded = before

    def put_together(self, tensors: Sequence[torch.Tensor], nbytes: int) -> None:
        """Records that the contents of `tensors` moved to one new storage of `nbytes`; their own storages take 0."""
        first = self.record(tensors[0])
        self.builder.birth(dataclasses.replace(first, nbytes=nbytes, shape=(nbytes // tensors[0].itemsize,)))
        for tensor in tensors:
            number = self.number(tensor)
            empty = dataclasses.replace(self.builder.records[number], nbytes=0)
            self.live[tensor.untyped_storage()._cdata] = self.builder.birth(empty)
            self.builder.death(number)

    def mark_offloaded(self, tensor: torch.Tensor) -> None:
        """Records that a storage from before the step is on another memory tier."""
        record = self.record(tensor)
        record.nbytes, record.offloaded = 0, True

    def _stream(self) -> int:
        return self._streams.setdefault(self._current_stream(), len(self._streams))

    def gone(self, storage: torch.UntypedStorage) -> None:
        """Records the death of `storage`, which the simulation alone still holds."""
        if (death := self._deaths.get(storage._cdata)) is not None:
            self._died(death)

    def _died(self, death: _Death) -> None:
        key = death.key
        self._deaths.pop(key, None)
        if self._sizes:
            self._sizes.pop(key, None)
        number = self.live.pop(key, None)
        if number is None:
            return
        if self._waits and self._waits == threading.get_ident():
            self._waiting.append(number)
        else:
            self._count_out(number)

    def wait(self, waits: bool) -> None:
        """Defers deaths in this thread until `settle` is called, or ends the deferral."""
        self._waits = threading.get_ident() if waits else 0

    def settle(self) -> None:
        """Records the deferred deaths."""
        waiting, self._waiting = self._waiting, []
        for number in sorted(waiting):
            self._count_out(number)

    def _count_out(self, number: int) -> None:
        self.builder.death(number)
        self.builder.records[number].later = None

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """Records that `storage` now has `nbytes` bytes, a new record at another address, and returns it."""
        number = self.live.get(storage._cdata)
        if number is None:
            return storage
        old = self.builder.records[number]
        fresh = StorageRecord(nbytes, len(self.builder.ops) - 1, old.category, old.shape, old.dtype, old.path, False)
        fresh.stream = self._stream()
        self.live[storage._cdata] = self.builder.birth(fresh)
        self.builder.death(number)
        self._sizes[storage._cdata] = nbytes
        return storage

    def size(self, storage: torch.UntypedStorage) -> int:
        """Returns the bytes of `storage` after its last resize."""
        return self._sizes.get(storage._cdata, storage.nbytes()) if self._sizes else storage.nbytes()

    def moved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> None:
        """Records that `tensor`, which grew, has a new storage, and that `storage` is free."""
        old = self.builder.records[self.live[storage._cdata]]
        self.enter(tensor.untyped_storage(), tensor, len(self.builder.ops) - 1, old.category, old.path, False)
        self.gone(storage)

    def mark(self, tensor: torch.Tensor, category: str, path: str = "") -> None:
        """Sets the category of the storage under `tensor`."""
        record = self.record(tensor)
        if record.category in ("", "other"):
            record.category = category
            record.path = path or record.path

    def is_offloaded(self, tensor: torch.Tensor) -> bool:
        """Whether the storage under `tensor` is on another memory tier."""
        number = self.live.get(tensor.untyped_storage()._cdata)
        return number is not None and self.builder.records[number].offloaded

    def made(self) -> Iterator[tuple[weakref.ref[torch.UntypedStorage], StorageRecord]]:
        """Yields a weak reference to each live storage that the simulation made, with its record."""
        for key, number in self.live.items():
            record, storage = self.builder.records[number], self._deaths[key]()
            if storage is not None and (record.op >= 0 or key in self.given) and key not in self._entered_offloaded:
                yield weakref.ref(storage), record

    def end(self) -> None:
        """Stops watching, and undoes what real computation did to the caller's tensors."""
        self._deaths.clear()  # weak references with callbacks form cycles, which would keep tensors
        with torch.no_grad():
            for tensor, before in self._untouched:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)
        self._untouched.clear()


class _Death(weakref.ref[torch.UntypedStorage]):
    """A weak reference whose callback finds the address of the dead storage in `key`, without a closure for each."""

    __slots__ = ("key",)
    key: int


def is_small(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is small enough to be computed for real where its values are known."""
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (_LARGEST_KNOWN_FLOATS if is_number else LARGEST_KNOWN)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _may_be_offloaded(record: StorageRecord) -> bool:
    """Whether the storage is offloaded, or may be on both devices: a scalar such as a step count, or a constant."""
    return record.offloaded or not record.shape or (record.op < 0 and record.category == "other")


aten = torch.ops.aten

# The formula of this derivative multiplies and subtracts in place, except into its first operand, a tensor of others.
# Source: ``binary_cross_entropy_with_logits_backward`` in FunctionsManual.cpp.
_FORMULAS = {"BinaryCrossEntropyWithLogitsBackward0"}
_ZEROS = {"aten::zeros", "aten::new_zeros", "aten::zeros_like"}
# The frame of an operator that Python calls, as a dispatch mode does when it redispatches.
_CALLED = type(aten.add.Tensor).__call__.__code__


class InPlaceSums:
    """A detector of a step's in-place sums, which `TraceBuilder.add_in_place` later makes happen in place.

    Args:
        storages: the live storages of the step.
    """

    def __init__(self, storages: LiveStorages) -> None:
        self._storages = storages
        self._builder = storages.builder
        self._sum: Sum | None = None  # the last candidate

    def maybe_in_place(
        self, op: OpOverload, operands: list[torch.Tensor], total: torch.Tensor, first_of_node: int
    ) -> None:
        """Notes a sum that PyTorch makes in place where no mode is active: the autograd engine's, or attention's.

        `first_of_node` is the index of the first operator of the running autograd node.
        """
        self._sum = None
        if op is aten.mul.Tensor or op is aten.sub.Tensor:
            if torch.is_grad_enabled():
                return
            node = torch._C._current_autograd_node()
            if node is None or node.name() not in _FORMULAS:
                return
            if total.numel() == operands[0].numel() and self._is_of_backward(operands[0]):
                self._builder.sums.append(replace(self._noted(operands[0], total), always=True))
            return
        frame: Any = sys._getframe(1)
        within = frame.f_code.co_filename
        while frame.f_code.co_filename == within:  # skip the dispatch mode's frames up to the caller of the sum
            frame = frame.f_back
        if (
            by_autocast := frame.f_code is _CALLED
            and frame.f_back is not None
            and frame.f_back.f_code is below.__code__
        ):
            frame = frame.f_back
        # A mode above the simulation's is active in a real step too: it watches the writes of a region's first run.
        if len(operands) < 2 or frame.f_code is _CALLED:
            return
        self._sum = self._noted(operands[0], total)
        # The engine adds where two gradients of one value meet; a backward in Python and users add out of place.
        caller = frame.f_code
        if caller is linear.__code__ or (by_autocast and frame.f_locals["op"] is aten.linear.default):
            self._builder.sums.append(self._sum)  # `linear` adds a bias to its own product in place
            return
        by_engine = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        if not by_engine or caller.co_name != "_engine_run_backward":
            return
        # The engine adds into the first gradient only if that is dense and unshared; a view shares its base's storage.
        if operands[0]._base is not None or not aten.is_non_overlapping_and_dense(operands[0]):
            return
        born = self._storages.record(operands[0]).op
        if op is aten.add.Tensor:
            # The engine adds a gradient of this node to one from another node, or to another gradient of this node for
            # the same value. Any other sum of tensors that the node has made is a part of the node's formula.
            is_in_place = born < first_of_node or _gives_twice(torch._C._current_autograd_node())
        else:
            # A formula writes in place into zeros that it has made, and never into a gradient (`index_put`, `scatter`).
            is_in_place = born >= first_of_node and self._builder.ops[born].name in _ZEROS
        if is_in_place:
            self._builder.sums.append(self._sum)

    def _is_of_backward(self, tensor: torch.Tensor) -> bool:
        born = self._storages.record(tensor).op
        return born >= 0 and self._builder.ops[born].phase is Phase.BACKWARD

    def _noted(self, first: torch.Tensor, total: torch.Tensor) -> Sum:
        operand, number = map(self._storages.number, (first, total))
        born = len(self._builder.events) - 1
        while self._builder.events[born] != number + 1:  # scratch memory dies after the result is born
            born -= 1
        return Sum(born, operand, number)

    def mask_added_in_place(self, scores: torch.Tensor) -> None:
        """Notes that the last sum was attention's, of `scores` and mask: a safe softmax follows no other sum."""
        if self._sum is not None and self._sum.total == self._storages.number(scores):
            self._builder.sums.append(self._sum)


def _gives_twice(node: Any) -> bool:
    """Whether two of the gradients that `node` returns belong to one value."""
    return node is not None and len(set(node.next_functions)) < len(node.next_functions)
