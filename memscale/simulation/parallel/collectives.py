"""Collectives in a simulated step: nothing is sent, and every other rank is assumed to act as this rank does.

`SimulatedStreams` are the streams and events of the simulated device, in the interface that FSDP2 calls.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from memscale.core import ConfigError
from memscale.hardware import COLLECTIVES, assumed_links, span
from memscale.simulation.kernels.shapes import results_of
from memscale.simulation.schedule.clock import Clock

#: The namespace of the operators that `torch.distributed` calls for its process groups.
NAMESPACE = "c10d"
#: The operators that wait for the result of a functional collective and return that result.
WAITS = {"_c10d_functional::wait_tensor", "c10d_functional::wait_tensor"}
#: The operator that wraps the result of a functional collective in a tensor that waits at its first use.
WRAP = "_c10d_functional::_wrap_tensor_autograd"
_WRITES_NOTHING = {"c10d::barrier", "c10d::monitored_barrier_", "c10d::send"}
_PUT_TOGETHER = ("all-gather", "reduce-scatter")
_SUM = 0  # ReduceOp.SUM, as an argument of an operator
_ENGINE = "_engine_run_backward"  # the Python function of torch that calls the autograd engine


class Collective(NamedTuple):
    """A call of a collective.

    Attributes:
        written: the tensors that the collective writes.
        given: the tensors that the collective reads; equal to `written` for a collective in place.
        factor: the number of ranks for a sum, since every rank is assumed to have this rank's values; else 1.
    """

    written: list[torch.Tensor]
    given: list[torch.Tensor]
    factor: int

    def compute(self) -> None:
        """Writes the result of the collective for ranks that all have this rank's values."""
        for at, tensor in enumerate(self.written):
            source = self.given[min(at, len(self.given) - 1)].flatten()
            times = -(-tensor.numel() // max(1, source.numel()))
            tensor.copy_(source.repeat(times)[: tensor.numel()].view(tensor.shape) * self.factor)


def collective(op: Any, args: Any) -> Collective:
    """Returns the call of an operator of `NAMESPACE`.

    Raises:
        ConfigError: the operator receives data that only another process has computed.
    """
    name = op.name()
    if name.startswith("c10d::recv"):
        raise ConfigError(
            f"the step calls {name}, which receives data that another process has computed, as in a pipeline; profile "
            "the module of one stage alone, with its input as the batch"
        )
    written = [] if name in _WRITES_NOTHING else results_of(args[0])
    given = results_of(args[1]) if len(args) > 1 else []
    return Collective(written, given or written, _factor(args))


def scratch_bytes(op: Any, args: Any, call: Collective) -> int:
    """Returns the scratch bytes of a collective beyond its tensors.

    Gloo copies all shards of an all-gather or a reduce-scatter into one buffer of its own; NCCL needs none.
    """
    group = _objects(args).get("ProcessGroup")
    if kind_of(op.name()) not in _PUT_TOGETHER or group is None or not dist.is_gloo_available():
        return 0
    group = dist.ProcessGroup.unbox(group)
    return _whole(call.given, call.written) if dist.get_backend(group) == dist.Backend.GLOO else 0


def _factor(args: Any) -> int:
    objects = _objects(args)
    if "ReduceOp" not in objects or objects["ReduceOp"].op() != _SUM:
        return 1
    return dist.ProcessGroup.unbox(objects["ProcessGroup"]).size()


def _objects(args: Any) -> dict[str, Any]:
    """Returns the arguments that are C++ objects, by the name of their class."""
    given: list[Any] = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
    return {arg._type().name(): arg for arg in given}


class Works:
    """The `Work` objects that collectives return, and the ends of the collectives on the clock of the step.

    Args:
        clock: the clock of the step.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._names: dict[str, None] = {}
        self._ranks: dict[str, tuple[int, ...]] = {}  # by the name of the process group
        # C++ keeps a work but not its Python object; without references here, C++ would wait for ever.
        self._of_reducer: list[_Work] = []
        self._started: set[_Work] = set()
        self._to_come: dict[int, int] = {}  # ends of functional collectives, by the address of the returned storage
        self._backward = -1  # the graph task id of the backward pass whose end waits for `_unawaited`
        self._unawaited: list[int] = []  # collectives that this backward pass has started and not waited for

    def returned(self, op: Any, args: Any, call: Collective) -> Any:
        """Returns the result of this call of `op`: its tensors, and a work where its schema returns one."""
        mark = self._sent(op.name(), _objects(args).get("ProcessGroup"), _whole(call.given, call.written))
        work = self._work(call.written, mark)
        returned = [args[0] if "Tensor" in str(value.type) else work for value in op._schema.returns]
        return returned[0] if len(returned) == 1 else tuple(returned)

    def sent(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Records a functional collective, whose `result` is complete after a wait."""
        group = kwargs.get("group_name", args[-1])
        if isinstance(group, str):
            distributed: Any = dist.distributed_c10d
            group = distributed._resolve_process_group(group)
        results = results_of(result)
        mark = self._sent(op.name(), group, _whole(results_of(args[0]), results))
        if mark is not None:
            for tensor in results:
                self._to_come[tensor.untyped_storage()._cdata] = mark

    def awaited(self, tensor: torch.Tensor) -> None:
        """Waits for the functional collective that returned `tensor`."""
        mark = self._to_come.pop(tensor.untyped_storage()._cdata, None)
        if mark is not None:
            self._clock.wait(mark, self._clock.stream)

    def notes(self) -> list[str]:
        """Returns notes about the step's collectives: assumed link speeds, and memory of NCCL that is not counted."""
        hardware = self._clock.hardware
        spans = (span(ranks, hardware) for ranks in self._ranks.values())
        notes = list(dict.fromkeys(filter(None, (assumed_links(each, hardware) for each in spans))))
        notes = notes if self._clock.timed and hardware.flops_per_second else []
        if self._names and hardware.device_type != "cpu":
            notes.append(
                f"NCCL allocates memory of its own for the collectives ({', '.join(self._names)}), which the step's "
                "bytes leave out"
            )
        return notes

    def _sent(self, name: str, group: Any, nbytes: int) -> int | None:
        self._names[name] = None
        if group is None:
            return None
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        ranks = self._ranks.get(group.group_name)
        if ranks is None:
            ranks = self._ranks[group.group_name] = tuple(dist.get_process_group_ranks(group))
        return self._clock.collective(kind_of(name), group.group_name, ranks, nbytes)

    def _work(self, written: list[torch.Tensor], mark: int | None) -> Any:
        if torch._C._current_graph_task_id() == -1 or not _from_engine():
            self._of_reducer.clear()
            # Weak references: C++ may wait for a work that Python has dropped, and must not keep its tensors alive.
            results = [weakref.ref(tensor) for tensor in written]
            work = _Work(results, over=partial(self._over, mark), taken=partial(self._await_at_end, mark))
            self._started.add(work)
        else:
            # DDP's reducer reads a bucket's result from the future of the work, which a fake work lacks.
            work = _Work(written)
            self._of_reducer.append(work)
            self._await_at_end(mark)
        return work.boxed()

    def _over(self, mark: int | None, work: _Work) -> None:
        self._started.discard(work)
        if mark is not None:
            self._clock.wait(mark, self._clock.stream)

    def _await_at_end(self, mark: int | None) -> None:
        """Makes the end of the current backward pass wait for `mark`, of DDP's reducer or of a communication hook."""
        backward = torch._C._current_graph_task_id()
        if mark is None or backward == -1:
            return
        self._unawaited.append(mark)
        if self._backward != backward:
            # DDP's reducer queues a callback for the end of the backward pass, where it waits for all buckets.
            self._backward = backward
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._backward_over)

    def _backward_over(self) -> None:
        self._backward = -1
        for mark in self._unawaited:
            self._clock.wait(mark, 0)
        self._unawaited.clear()


def kind_of(name: str) -> str:
    """Returns the member of `COLLECTIVES` that an operator belongs to; the last one where no name matches.

    >>> kind_of("c10d::_allgather_base_"), kind_of("_c10d_functional::reduce_scatter_tensor")
    ('all-gather', 'reduce-scatter')
    """
    plain = name.rpartition("::")[2].replace("_", "")
    return next((kind for kind in COLLECTIVES if plain.startswith(kind.replace("-", ""))), COLLECTIVES[-1])


def _whole(given: list[torch.Tensor], returned: list[torch.Tensor]) -> int:
    """Returns the bytes of the larger side of a collective: the gathered tensor, or the tensor to be scattered."""
    return max(sum(tensor.nbytes for tensor in side) for side in (given, returned))


def _from_engine() -> bool:
    """Whether the autograd engine's C++ calls (DDP's reducer does), rather than a hook in Python."""
    frame = sys._getframe(1)
    inside = frame.f_globals["__name__"].rpartition(".")[0].rpartition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame = frame.f_back
    return frame.f_code.co_name == _ENGINE


class _Work(dist.Work):
    """The work of a simulated collective.

    Args:
        results: the tensors that the collective writes, or weak references to these tensors.
        over: called by `wait`.
        taken: called by `get_future`, since a caller may wait for the future instead.
    """

    def __init__(
        self,
        results: Sequence[torch.Tensor | weakref.ref[torch.Tensor]],
        over: Callable[[_Work], None] | None = None,
        taken: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._results = results
        self._over = over
        self._taken = taken

    def wait(self, *_: Any) -> bool:
        if self._over is not None:
            self._over(self)
        return True

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result([each() if isinstance(each, weakref.ref) else each for each in self._results])
        self._results = ()  # else the work would keep a bucket alive after the reducer has dropped the bucket
        if self._taken is not None:
            self._taken()
        return future


class SimulatedEvent:
    """A point in a simulated stream, as ``torch.cuda.Event``."""

    def __init__(self, clock: Clock, *_: Any, **__: Any) -> None:
        self._clock = clock
        self.mark: int | None = None

    def record(self, stream: SimulatedStream | None = None) -> None:
        self.mark = self._clock.point(self._clock.stream if stream is None else stream.side)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        if self.mark is not None:
            self._clock.wait(self.mark, self._clock.stream if stream is None else stream.side)

    def query(self) -> bool:
        return self.mark is None or self._clock.end_of(self.mark) <= self._clock.now

    def synchronize(self) -> None:
        if self.mark is not None:
            self._clock.hold_up(self.mark)


class SimulatedStream:
    """A simulated stream, as ``torch.cuda.Stream``: stream number `side` of the clock."""

    def __init__(self, clock: Clock, side: int) -> None:
        self._clock = clock
        self.side = side

    def wait_stream(self, other: SimulatedStream) -> None:
        self._clock.wait(self._clock.point(other.side), self.side)

    def wait_event(self, event: Any) -> None:
        if isinstance(event, SimulatedEvent):  # a real event was recorded before the simulation, and is complete
            event.wait(self)

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = SimulatedEvent(self._clock) if event is None else event
        event.record(self)
        return event


class SimulatedStreams:
    """The part of a device module (such as ``torch.cuda``) that FSDP2 uses: its streams and events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count(1)
        self._current = SimulatedStream(clock, 0)
        self.Event = partial(SimulatedEvent, clock)

    def Stream(self, priority: int = 0) -> SimulatedStream:
        return SimulatedStream(self._clock, next(self._numbers))

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self._current

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        before, side = self._current, self._clock.stream
        self._current = stream
        self._clock.switch(stream.side)
        try:
            yield
        finally:
            self._current = before
            self._clock.switch(side)
