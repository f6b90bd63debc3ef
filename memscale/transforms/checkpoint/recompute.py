"""`checkpoint` under plain autograd: saved tensors become placeholders that know how to come back.

While a region runs, autograd hands every tensor that it would save to `_Frame.pack`, which keeps a `_Placeholder`
instead. The first placeholder that backward needs runs the region again, with the same inputs and in the same
environment, and stops as soon as the last tensor that is still wanted has been seen. The graph that autograd walks
is the ordinary one, so captured tensors, double backward, partial gradients and hooks work as without checkpoint.

Stopping early is the idea of `torch.utils.checkpoint` (non-reentrant). What differs: the recompute runs in the
region's own past (`Snapshot`), and all that is kept is let go as soon as no later backward can ask for it.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from memscale.core import CorrectnessError, changed_error, described, internals, simulating
from memscale.regions import (
    ArgumentSpec,
    Captures,
    RegionEffects,
    Replay,
    SharedCaptures,
    Snapshot,
    Streams,
    in_recompute,
    memory_of,
    never_compiled,
    recomputing,
    restore,
    unrecorded,
    wait_for_recomputes,
)
from memscale.transforms.checkpoint.inputs import Inputs, refuse_backward_behind
from memscale.transforms.checkpoint.selective import Misaligned, Recorder, Replayer

_autograd = internals.autograd
# Makes a recorder of a region with these inputs.
Record = Callable[[list[torch.Tensor]], Recorder]
_Found = tuple[torch.Tensor, int]  # a recomputed tensor, and the version at which it was saved
_Seen = tuple[torch.Size, torch.dtype, int]  # of a tensor that the run saved: its version
_MOST_WATCHED = 16  # runs of a region, each with other flags or arguments of another kind
_reruns = [0]  # of this process; two threads at once may count as one


def recomputed_regions() -> int:
    """How many regions backward passes of this process have run again, apart from simulated ones."""
    return _reruns[0]


class Memory:
    """What a region has learned about itself from earlier runs, by the train/eval flags of its modules.

    Attributes:
        looked: in which modes (whether any module trains) it has run.
        changes: whether it was seen to change something in place, beside the running statistics of norms.
    """

    def __init__(self) -> None:
        self.effects: dict[Any, RegionEffects] = {}
        # In which nothing was learned from a run that made a tensor: the next may be the first to change it in place.
        self.made: set[Any] = set()
        self.looked: tuple[bool, ...] = ()
        self.changes = False
        self._captures: Captures | None = None
        self._fn: Any = None

    def effects_in(self, mode: Any) -> RegionEffects | None:
        """What the region does in `mode`; `None` if the next run is to be watched."""
        known = self.effects.get(mode)
        if known is None and len(self.effects) >= _MOST_WATCHED:  # in each call it is given something else
            return RegionEffects.of_all(self.effects.values())
        return known

    def learn(self, mode: Any, effects: RegionEffects, *, made_tensors: bool) -> None:
        """Remember what a watched run did; of one that made a tensor the next may be the first to change that."""
        if not made_tensors or mode in self.made or len(self.made) >= _MOST_WATCHED:
            self.effects[mode] = effects
        else:
            self.made.add(mode)

    def captures_of(self, fn: Callable[..., Any]) -> Captures:
        """What `fn` depends on, read again only where it is not as it was in the last call."""
        captures = self._captures
        if captures is None or self._fn is not fn or not captures.is_current:
            captures = Captures(fn, follows=True).seal()
            if not in_recompute():
                self._captures, self._fn = None, fn
                if captures.may_last:
                    # The module's own dictionary leads to this, and the module has to go without the collector.
                    self._captures = copy.copy(captures)
                    self._captures.weaken(functools.partial(_forget_captures, weakref.ref(self)))
        return captures

    def __reduce__(self) -> Any:
        return (Memory, ())  # a copy of the region learns anew: what it changes may differ there


def _forget_captures(memory: weakref.ref[Memory], _: object) -> None:
    if (alive := memory()) is not None:
        alive._captures = None


def run(fn: Callable[..., Any], record: Record | None, memory: Memory, args: Any, kwargs: Any) -> Any:
    """``fn(*args, **kwargs)``, keeping for backward only its inputs and what a recorder made by `record` keeps."""
    frame = _Frame(fn, record, memory, args, kwargs)
    _autograd._push_saved_tensors_default_hooks(frame.pack, _unpack)
    try:
        if frame.is_observed:
            with frame.watching(), frame.recorder or nullcontext():
                result = fn(*args, **kwargs)
        else:
            result = fn(*args, **kwargs)
    finally:
        _autograd._pop_saved_tensors_default_hooks()
    frame.conclude()
    return result


class _Placeholder:
    """Stands in autograd's graph for a tensor that was not saved. `found` is there between recompute and use."""

    __slots__ = ("__weakref__", "found", "frame", "index")

    def __init__(self, frame: _Frame, index: int) -> None:
        self.frame = frame
        self.index = index
        self.found: _Found | None = None


@recomputing
@never_compiled
def _unpack(placeholder: _Placeholder) -> torch.Tensor:
    found = placeholder.found
    if found is None:
        found = placeholder.frame.recompute(placeholder)
    if placeholder.frame.past is not None and _keeps_graph():
        # Another backward may follow. It recomputes again, so that this one frees each tensor once it is used.
        placeholder.found = None
    tensor, expected = found
    if placeholder.frame.streams.are_several:
        placeholder.frame.streams.lend_to_current(tensor)
    if tensor._version != expected:  # autograd does not check what comes from hooks
        what = f"saved tensor {placeholder.index} of a checkpointed region"
        raise changed_error(described(what, tensor.dtype, _shape(tensor)), tensor._version, expected)
    return tensor


def _keeps_graph() -> bool:
    return torch._C._current_graph_task_id() == -1 or _autograd._get_current_graph_task_keep_graph()


def _shape(tensor: torch.Tensor) -> torch.Size:
    if tensor.is_nested and tensor.layout is torch.strided:  # which has none, as each of its parts has its own
        return torch.Size([tensor.size(0)])
    return tensor.shape


class _Stop(BaseException):
    """Ends a recompute. Not an `Exception`, for a region's own ``except Exception`` must not swallow it."""


class _Past(NamedTuple):
    """What a recompute needs of the run. It is let go after a backward that keeps no graph."""

    fn: Callable[..., Any]
    call: ArgumentSpec
    inputs: Inputs
    snapshot: Snapshot


class _Frame:
    """One run of a region: its past, and the placeholders that autograd holds for it.

    Attributes:
        past: what a recompute needs, while another recompute may come.
        is_observed: whether somebody looks at the operators of the run.
        recorder: of the values that a policy keeps, or `None`.
        streams: the streams that the run used.
    """

    __slots__ = (
        "_concluded",
        "_memory",
        "_mode",
        "_placeholders",
        "_seen",
        "_trained",
        "is_observed",
        "past",
        "recorder",
        "streams",
    )

    def __init__(self, fn: Callable[..., Any], record: Record | None, memory: Memory, args: Any, kwargs: Any) -> None:
        wait_for_recomputes()
        captures = memory.captures_of(fn)
        try:
            call = ArgumentSpec(args, kwargs, captures)
        except SharedCaptures:
            captures = Captures(fn, follows=True)
            call = ArgumentSpec(args, kwargs, captures)
            captures.seal()
        tensors = call.take_tensors()  # `Inputs` decides what holds them
        self._memory = memory
        kinds = [(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors[: call.direct]]
        self._mode: Any = (captures.flags(), len(tensors), *kinds)
        snapshot = Snapshot(captures, tensors, memory.effects_in(self._mode))
        self.past: _Past | None = _Past(fn, call, Inputs(tensors, captures), snapshot)
        self.streams = Streams(snapshot.environment.devices)
        self._placeholders: list[weakref.ref[_Placeholder]] = []
        self._seen: list[_Seen] = []
        self._trained: list[bool] = []  # whether each of these requires a gradient
        self._concluded = False
        self.recorder = record and record(tensors)
        self.is_observed = record is not None or snapshot.is_watched

    def watching(self) -> AbstractContextManager[Any]:
        assert self.past is not None
        return self.past.snapshot.watching()

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> _Placeholder:
        """Called by autograd with each tensor that it would save."""
        seen = self._seen
        placeholder = _Placeholder(self, len(seen))
        self._placeholders.append(weakref.ref(placeholder))
        seen.append((_shape(tensor) if tensor.is_nested else tensor.shape, tensor.dtype, tensor._version))
        self._trained.append(tensor.requires_grad)
        if self.streams.are_seen:
            self.streams.see(tensor)
        if self.recorder is not None:
            self.recorder.mark()
        return placeholder

    def conclude(self) -> None:
        """After the run: learn what it changed, and keep the old values of arguments that it changed."""
        assert self.past is not None
        _, _, inputs, snapshot = self.past
        versions = snapshot.argument_versions
        try:
            effects = snapshot.conclude()
        except CorrectnessError:
            self._memory.effects.clear()  # the next call copies everything, and learns anew
            raise
        if effects is not None:
            self._memory.learn(self._mode, effects, made_tensors=snapshot.made_tensors())
            if (training := any(self._mode[0])) not in self._memory.looked:
                self._memory.looked = (*self._memory.looked, training)
            self._memory.changes = self._memory.changes or snapshot.changes_beyond_norms(effects)
        if self.recorder is not None:
            self.recorder.conclude(snapshot.environment.moved)
        inputs.seal(versions)
        if snapshot.groups():
            for index, old_value in snapshot.take_replaced().items():
                inputs.replace(index, old_value)
        self._concluded = True

    def recompute(self, wanted: _Placeholder) -> _Found:
        """Run the region again, giving every placeholder that is still alive its tensor; returns that of `wanted`.

        Raises:
            CorrectnessError: the recompute saved other tensors than the run, or what it depends on was changed.
        """
        if self.past is None:
            raise CorrectnessError(
                "a checkpointed region was already released: backward went through it without retain_graph. "
                "Specify retain_graph=True in every backward but the last"
            )
        in_backward, keeps_graph = torch._C._current_graph_task_id() != -1, _keeps_graph()
        alive = [reference() for reference in self._placeholders]
        # Out of backward somebody looks at one saved tensor from outside: nothing else will be asked for.
        live = alive if in_backward else [placeholder if placeholder is wanted else None for placeholder in alive]
        last = in_backward and self._concluded and not keeps_graph
        if in_backward and not self._concluded:
            self.past.inputs.cut()
        try:
            # Where a policy's results may turn out to be of other calls, the first rerun is not the last one.
            found = self._rerun(self.past, live, last=last and self.recorder is None)
        except Misaligned:
            self.recorder = None
            found = self._rerun(self.past, live, last=last)
        if not simulating():
            _reruns[0] += 1
        # Not before: what a rerun that failed has found must not be used, and would only take memory.
        for placeholder in live:
            if placeholder is not None:
                placeholder.found = found[placeholder.index]
        if in_backward and keeps_graph:
            torch.autograd.Variable._execution_engine.queue_callback(_AtTheEnd(self._forget))
        elif last:
            # Every tensor that is left to ask for has its value now; the inputs are not needed any more.
            self.past = self.recorder = None
        return found[wanted.index]

    def _rerun(self, past: _Past, live: list[_Placeholder | None], *, last: bool) -> dict[int, _Found]:
        """Run the region again up to the last tensor that is wanted, and return those that are."""
        refused: dict[int, str] = {}  # what to say of inputs that were changed since, by their memory
        fresh: list[torch.Tensor] = []
        undo: list[Callable[[], Any]] = []
        try:
            streams = self.streams.enter(undo)
            found = self._values(past, refused, fresh)
            rerun = _Rerun(self._seen, self._trained, live, fresh, streams)
            with Replay(past.snapshot, last=last, refused=refused, fresh=fresh, made=rerun.made) as shared:
                values = [value for _, value in sorted((found | shared).items())] if shared else [*found.values()]
                self._run_again(past, rerun, found, values)
            self.streams = streams
        finally:
            for step in reversed(undo):
                step()
        rerun.check()
        return rerun.found

    def _run_again(
        self, past: _Past, rerun: _Rerun, found: dict[int, torch.Tensor], values: list[torch.Tensor]
    ) -> None:
        """Call the function with `values` for the tensors, until it has saved the last tensor that is wanted."""
        objects: list[Any] = []
        is_graded = torch.is_grad_enabled()
        run = past.snapshot.environment.context.copy().run
        # A cache has many tensors, so only a watched run asks for all that no backward of the region's own goes behind.
        every, direct = past.snapshot.is_watched, past.call.direct
        handles = refuse_backward_behind([each for index, each in found.items() if every or index < direct])
        try:
            args, kwargs = past.call.rebuild(values, objects)
            torch._C._set_grad_enabled(True)
            _autograd._push_saved_tensors_default_hooks(rerun.pack, _as_it_is)
            try:
                recorder = self.recorder if self._concluded else None
                if self._concluded and recorder is None:
                    run(past.fn, *args, **kwargs)
                else:
                    # A region that asks for gradients itself (forces are those of an energy) is recomputed amid its
                    # run. That is no part of the run, and must not count as such where operators are numbered.
                    with unrecorded() if recorder is None else recorder.replayer(values) as rerun.replayer:
                        run(past.fn, *args, **kwargs)
            except _Stop:
                pass
            except BaseException:
                rerun.streams.meet()
                raise
            finally:
                _autograd._pop_saved_tensors_default_hooks()
        finally:
            torch._C._set_grad_enabled(is_graded)
            for handle in handles:
                handle.remove()
            restore(objects)

    def _values(self, past: _Past, refused: dict[int, str], fresh: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tensors that the region received: themselves, or copies of what it changes in place.

        One behind an object that was changed in place since goes into `refused`, for the region may not need it: the
        next layer may have written into a cache that all of them are given. Copies go into `fresh`.
        """
        groups = past.snapshot.groups()
        several = [group.names for group in groups if group.argument is None]  # of these, names may be arguments
        by_snapshot = {name for names in several for name in names if isinstance(name, int)}
        return past.inputs.again(by_snapshot, past.snapshot.replaced(), past.call.owner, refused, fresh)

    def _forget(self) -> None:
        for reference in self._placeholders:
            if (placeholder := reference()) is not None:
                placeholder.found = None


class _AtTheEnd:
    """A callback of a backward that acts when the backward lets go of it: autograd calls none if the backward fails."""

    __slots__ = ("_action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        self._action()


@recomputing
@never_compiled
def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _end(seen: list[_Seen], trained: list[bool], last: int) -> int:
    """With which saved tensor a recompute may stop whose last one that is wanted is `last`.

    Autograd saves the inputs of an operator before its kernel runs, and the kernel of `rrelu` fills one of them. Any
    two in a row that look like those two wait for the next operator that saves something.
    """
    for first in range(max(last - 1, 0), min(last + 1, len(seen) - 1)):
        (shape, dtype, _), (*like, _) = seen[first : first + 2]
        if [shape, dtype] == like and dtype.is_floating_point and trained[first] != trained[first + 1]:
            return first + 2
    return last


_JAGGED = (
    ". To PyTorch each jagged tensor is of another length than all others that were not made of its offsets; make the "
    "offsets outside the region, and the tensor by torch.nested.nested_tensor_from_jagged(values, offsets)"
)


class _Rerun:
    """Receives the tensors that a recompute saves, and checks them against those of the run."""

    def __init__(
        self,
        seen: list[_Seen],
        trained: list[bool],
        live: list[_Placeholder | None],
        fresh: list[torch.Tensor],
        streams: Streams,
    ) -> None:
        self._seen = seen
        self._live = live
        self.streams = streams
        self._fresh = fresh  # tensors whose version counters mean nothing
        self._of_fresh: set[int] | None = None  # their storages
        self.made: set[int] = set()  # and others
        self._last = len(live) - 1
        while live[self._last] is None:
            self._last -= 1
        self._end = _end(seen, trained, self._last)
        self._count = 0
        self.replayer: Replayer | None = None
        self.found: dict[int, _Found] = {}

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self._count
        self._count = index + 1
        if self.streams.are_seen:
            self.streams.see(tensor)
        if index <= self._last:
            now = (_shape(tensor) if tensor.is_nested else tensor.shape, tensor.dtype, tensor._version)
            if now != self._seen[index]:
                self._check(index, tensor, now)
        # Also where nobody waits for it: an operator's own result would hold the operator, and that the result, a
        # circle that no collection sees, for half of it is C++ (RWKV left 15 MB of 110 at each step).
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if index <= self._last and self._live[index] is not None:
            self.found[index] = tensor, tensor._version
        if index == self._end:
            self.streams.meet()  # before what the run has made goes out of use
            raise _Stop
        return tensor

    def _check(self, index: int, tensor: torch.Tensor, now: _Seen) -> None:
        """Raise `CorrectnessError` if a saved tensor is another one than the run saved, or was changed since."""
        shape, dtype, expected = self._seen[index]
        if now[0] != shape or now[1] != dtype:
            plain = all(type(size) is int for size in shape)
            raise CorrectnessError(
                f"the recompute differs from the run: saved tensor {index} of the region was "
                f"{dtype}{list(shape)} and is now {now[1]}{list(now[0])}. A checkpointed region must "
                f"do the same at every run with the same inputs{'' if plain else _JAGGED}"
            )
        if not self._is_fresh(tensor):
            raise changed_error(
                described(f"saved tensor {index} of a checkpointed region", dtype, shape),
                now[2],
                expected,
                "The region reads a tensor from outside that was changed between forward and backward; pass it as "
                "an argument, or change it after backward",
            )

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        if self._of_fresh is None:
            self._of_fresh = {memory_of(fresh) for fresh in self._fresh}
        memory = memory_of(tensor)
        return memory in self._of_fresh or memory in self.made

    def check(self) -> None:
        """Raise `CorrectnessError` if the recompute ended before it had saved all that the run had saved."""
        if self._count <= self._last:
            raise CorrectnessError(
                f"the recompute differs from the run: it saved {self._count} tensors where the run had saved at least "
                f"{self._last + 1}. A checkpointed region must do the same at every run with the same inputs; look "
                "for a condition on something that changed in between"
            )
