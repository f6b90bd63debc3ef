"""`StepRecorder`: records what each operator does to memory and to the clock, while the step runs.

`Graphs` releases the autograd graphs of the step node by node instead of by recursion.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memscale.core import MemscaleError
from memscale.hardware import Direction, Work, knows_copies
from memscale.simulation.dispatch.live_storages import LiveStorages
from memscale.simulation.dispatch.operators import CallEffect, Operator
from memscale.simulation.dispatch.tape import Tape
from memscale.simulation.dispatch.trace_builder import Course, StorageRecord
from memscale.simulation.kernels.shapes import results_of
from memscale.simulation.process.process_state import EVERY, StepCollections
from memscale.simulation.rules.recurrences import DROPOUT_STATES
from memscale.simulation.rules.rule import PLAIN, Result, in_order
from memscale.simulation.schedule.clock import Clock
from memscale.simulation.trace import OpCall


class _Root:
    """An object that lives as long as its node, since nodes have no weak references."""


class Graphs:
    """Holds the nodes that ran while their graph exists, and then releases them in the order they ran in.

    Since torch 2.13 a node that Python has seen releases the next node inside its own destructor: a chain of ten
    thousand nodes, of a recurrence over a long sequence, would overflow the stack.
    """

    def __init__(self) -> None:
        # By backward: the root of the first node, which holds the others, and the nodes after it.
        self._ran: dict[int, tuple[weakref.ref[_Root], deque[Any]]] = {}
        self.gone: list[weakref.ref[_Root]] = []  # the roots of graphs that the step has released

    def runs(self, node: Any, backward: int) -> None:
        """Notes that `node`, another than the last one, runs in backward number `backward`."""
        if (ran := self._ran.get(backward)) is not None:
            ran[1].append(node)
            return
        node.metadata[_Root] = root = _Root()
        self._ran[backward] = weakref.ref(root, self.gone.append), deque()

    def let_go(self) -> None:
        """Releases the nodes of graphs that the step has released."""
        if not self.gone:
            return
        self.gone.clear()
        for backward, (root, _) in [*self._ran.items()]:
            if root() is None:
                self._drop(backward)

    def end(self) -> None:
        """Releases all nodes: a failed step released none, and left_behind would search all they hold."""
        for backward in [*self._ran]:
            self._drop(backward)

    def _drop(self, backward: int) -> None:
        _, after = self._ran.pop(backward)
        while after:
            after.popleft()


def place_of(error: Exception) -> str:
    """Returns the notes on an error in parentheses, such as " (in aten::mm of layers.3)"; "" without notes."""
    notes = getattr(error, "__notes__", ())
    return f" ({'; '.join(notes)})" if notes else ""


class StepRecorder:
    """A recorder of operators, and of the storages that they make, in a `TraceBuilder`.

    Args:
        storages: the live storages.
        clock: the clock that each operator advances.

    Attributes:
        modules: the paths of the modules that are running, innermost last.
        course: the progress of the step.
        settled: whether the next step runs like this one, as far as the regions know.
        graphs: the graphs of the backwards that ran.
        made_as: the original numbers of autograd nodes that were renumbered.
        first_of_node: the index of the first operator of the autograd node whose backward runs, or ran last.
        collections: the garbage collections of the step.
        traces: whether a compiler is tracing a module, which takes no time of the step.
        tape: receives the calls of the step; None records none.
        measured: the measured seconds of the operators of the step, in order; None takes those of the rates.
    """

    def __init__(self, storages: LiveStorages, clock: Clock) -> None:
        self.modules: list[str] = []
        self.course = Course()
        self.settled = True
        self._storages = storages
        self._builder = storages.builder
        self._clock = clock
        # Library handles are per thread: the caller's, and autograd's for the device.
        self._workspaces: set[tuple[str, bool]] = set()
        self.collections = StepCollections(storages.wait, storages.settle)
        # The first autograd node, by sequence number, of each run of nodes of one module, and the module's path.
        self._first_nodes: list[int] = []
        self._node_paths: list[str] = []
        self._next_node = torch._C._autograd._get_sequence_nr()  # the first node without a module
        self.made_as: dict[int, int] = {}
        self._node: int | None = None  # the sequence number of the node whose backward runs or ran last
        self.graphs = Graphs()
        self.first_of_node = 0
        self.traces = False
        self.tape: Tape | None = None
        self.measured: Sequence[float] | None = None

    def calls(self, kind: str) -> None:
        """Adds a call of the host, of a kind of `HostSeconds`."""
        if not self.traces:
            self._clock.calls(kind)

    def path(self) -> str:
        """Returns the path of the running module; in backward, of the module whose forward made the autograd node."""
        if self.modules:
            return self.modules[-1]
        node = torch._C._current_autograd_node()
        return "" if node is None else self._path_of(node._sequence_nr())

    def _path_of(self, node: int) -> str:
        """Returns the path of the module that made autograd node number `node`; "" if no module of the step made it."""
        node = self.made_as.get(node, node)
        place = bisect_right(self._first_nodes, node)
        return self._node_paths[place - 1] if place and node < self._next_node else ""

    def place(self, error: Exception, operator: str = "") -> None:
        """Notes on `error`, as `add_note` does, the operator and the module that raise it; the innermost place stays.

        The errors of memscale say it in their message.
        """
        if not isinstance(error, MemscaleError) and not hasattr(error, "__notes__"):
            error.__notes__ = [f"in {' of '.join(filter(None, (operator, self.path() or 'the step')))}"]

    def enter(
        self,
        operator: Operator,
        result: Any,
        effect: CallEffect,
        known: bool = False,
        *,
        way: Direction | None = None,
        is_new: bool = False,
    ) -> Any:
        """Records the operator, its scratch memory and its new storages.

        `way` is the direction of a copy between the device and host memory. `is_new` means: the result is one tensor
        over a storage of its own.
        """
        if self.graphs.gone:
            self.graphs.let_go()
        task = torch._C._current_graph_task_id()
        in_backward = task != -1
        running = torch._C._current_autograd_node() if in_backward else None
        number = -1 if running is None else running._sequence_nr()
        modules = self.modules
        path = modules[-1] if modules else "" if running is None else self._path_of(number)
        # The first operator that sees a node has made it, whether recorded or not (views, recomputes, an
        # autograd.Function), together with earlier unseen nodes; an operator without a node sees the node of an
        # operator before it.
        following = torch._C._autograd._get_sequence_nr()
        if following > self._next_node:
            if not self._node_paths or self._node_paths[-1] != path:
                self._first_nodes.append(self._next_node)
                self._node_paths.append(path)
            self._next_node = following
        storages, work, program = self._storages, effect.work, effect.program
        if is_new:
            new = [(result.untyped_storage(), result)]
        elif not (new := self._new(operator, result)) and not (work.flops or work.nbytes) and program == PLAIN:
            self.calls("view")
            return result
        builder, clock, records = self._builder, self._clock, torch.is_grad_enabled()
        at = len(builder.ops)
        if running is not None and number != self._node:
            self._node, self.first_of_node = number, at
            self.graphs.runs(running, task)
        phase = self.course.phase(builder.ops, in_backward=in_backward, in_module=bool(modules), records=records)
        seconds: float | None
        if way is not None and knows_copies(clock.hardware):
            seconds = clock.across(way, work.nbytes // 2)
        elif storages.offloaded and not storages.counts:  # the host of a card computes, from host tensors
            seconds = clock.host_operator(work.nbytes)
        else:
            cost: Work | float = effect.cost
            if self.measured is not None and (place := at - builder.steps[-1][1]) < len(self.measured):
                cost = self.measured[place]
            by_autograd = in_backward and not (records or modules)
            kind = "backward" if by_autograd else "operator" if records else "plain"
            seconds = clock.operator(cost, kind, effect.listed)
        # tuple.__new__ takes half the time of calling the class, which is a fiftieth of a simulation.
        call = (operator.name, path, phase, work.flops, work.nbytes, work.dtype, seconds)
        builder.ops.append(tuple.__new__(OpCall, call))
        if at % EVERY == 0:
            self.collections.collect()
        if program == PLAIN and not effect.workspaces:
            self._take(operator, result, new, at, path, known)
            if self.tape is not None:
                self.tape.ends(operator.op, at, result)
            return result
        # Dropout states are allocated before the kernel, once per card; a handle is per thread, and it and its
        # workspaces are allocated after the result.
        workspaces = effect.workspaces
        is_shared = bool(workspaces) and DROPOUT_STATES in workspaces
        if is_shared:
            self._leave(workspaces, at, in_backward=False)
        scratch: list[int] = []  # the kernel's storages besides its results
        for nbytes in program:
            if isinstance(nbytes, Result):
                part = result[nbytes.place]
                self._take(operator, result, [each for each in new if each[1] is part], at, path, known)
            elif nbytes > 0:
                scratch.append(builder.birth(StorageRecord(nbytes, at, "workspace", path=path)))
            elif nbytes < 0:
                last = next(number for number in reversed(scratch) if builder.records[number].nbytes == -nbytes)
                scratch.remove(last)
                builder.death(last)
            elif new:
                self._take(operator, result, new, at, path, known)
        if workspaces and not is_shared:
            self._leave(workspaces, at, in_backward=in_backward)
        for number in reversed(scratch):
            builder.death(number)
        if self.tape is not None:
            self.tape.ends(operator.op, at, result)
        return result

    def _new(self, operator: Operator, result: Any) -> list[tuple[torch.UntypedStorage, torch.Tensor]]:
        """Returns the storages that an operator made, each with a tensor over it, in the order of their allocation."""
        results, live = results_of(result), self._storages.live
        if operator.order and len(results) > 1:
            results = in_order(operator.order, results)
        return [
            (storage, tensor)
            for tensor in results
            if (storage := tensor.untyped_storage())._cdata not in live and not tensor.is_meta
        ]

    def _leave(self, workspaces: Mapping[str, int], at: int, *, in_backward: bool) -> None:
        """Records the workspaces of operator `at` that are new in this thread."""
        for library, nbytes in workspaces.items():
            if (library, in_backward) not in self._workspaces:
                self._workspaces.add((library, in_backward))
                self._builder.birth(StorageRecord(nbytes, at, "workspace", path=library))

    def _take(
        self,
        operator: Operator,
        result: Any,
        new: list[tuple[torch.UntypedStorage, torch.Tensor]],
        at: int,
        path: str,
        known: bool,
    ) -> None:
        """Records the storages that operator `at` returns."""
        storages = self._storages
        if not operator.on_host:
            for storage, tensor in new:
                if storage._cdata not in storages.live:
                    storages.enter(storage, tensor, at, "", path, known)
            return
        results, before = results_of(result), storages.offloaded
        on_host = {id(results[number]) for number in operator.on_host if number < len(results)}
        for storage, tensor in new:
            if storage._cdata not in storages.live:
                storages.offloaded = before or id(tensor) in on_host
                storages.enter(storage, tensor, at, "", path, known)
        storages.offloaded = before
