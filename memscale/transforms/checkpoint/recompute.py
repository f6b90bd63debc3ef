"""`checkpoint` under plain autograd: autograd keeps placeholders instead of tensors, and a recompute fills them.

While a region runs, autograd hands every tensor that it would save to `_Frame.pack`, which returns a `_Placeholder`.
The first placeholder that backward unpacks runs the region again, with the same inputs and in the same environment.
The recompute stops at the last saved tensor that a live placeholder waits for. The graph that autograd walks is the
ordinary one, so captured tensors, double backward, partial gradients and hooks work as without checkpoint. A backward
with ``create_graph=True`` saves tensors too; of recomputed tensors it saves placeholders (`saved_again`).

Stopping early is the idea of `torch.utils.checkpoint` (non-reentrant). Two things differ here: a recompute sees the
state of the forward (`Snapshot`), and a frame drops its inputs as soon as no later backward can need them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from memscale.core import CorrectnessError, changed_error, described, internals, simulating
from memscale.regions import (
    ArgumentSpec,
    Captures,
    Replay,
    SharedCaptures,
    Snapshot,
    Streams,
    memory_of,
    never_compiled,
    recomputing,
    restore,
    unrecorded,
    wait_for_recomputes,
)
from memscale.transforms.checkpoint.inputs import Inputs, refuse_backward_behind
from memscale.transforms.checkpoint.learned_effects import LearnedEffects
from memscale.transforms.checkpoint.saved_again import save_again
from memscale.transforms.checkpoint.selective import Misaligned, Recorder, Replayer

_autograd = internals.autograd
# Makes the recorder of a policy for a run with the given inputs; `None` without a policy.
Record = Callable[[list[torch.Tensor]], Recorder] | None
_Found = tuple[torch.Tensor, int]  # a recomputed tensor, and the version at which it was saved
_Seen = tuple[torch.Size, torch.dtype, int]  # shape, dtype and version of a tensor that the run saved
_reruns = [0]  # the number in this process; two threads that count at once may add one


def recomputed_regions() -> int:
    """Returns how many regions the backward passes of this process have recomputed, simulated ones excluded."""
    return _reruns[0]


def run(fn: Callable[..., Any], record: Record, learned: LearnedEffects, args: Any, kwargs: Any) -> Any:
    """Returns ``fn(*args, **kwargs)``. Keeps only the inputs and the values that a policy's recorder saves."""
    frame = _Frame(fn, record, learned, args, kwargs)
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
    """Takes the place of a saved tensor in autograd's graph. `found` holds the tensor from a recompute to its use."""

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
        # Another backward may follow, and recomputes again, so this backward frees each tensor after its use.
        placeholder.found = None
    tensor, expected = found
    if placeholder.frame.streams.are_several:
        placeholder.frame.streams.lend_to_current(tensor)
    if tensor._version != expected:  # autograd checks no versions of tensors that hooks return
        what = f"saved tensor {placeholder.index} of a checkpointed region"
        raise changed_error(described(what, tensor.dtype, _shape(tensor)), tensor._version, expected)
    if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
        save_again(placeholder, tensor, _unpack)
    return tensor


def _keeps_graph() -> bool:
    return torch._C._current_graph_task_id() == -1 or _autograd._get_current_graph_task_keep_graph()


def _shape(tensor: torch.Tensor) -> torch.Size:
    if tensor.is_nested and tensor.layout is torch.strided:  # whose parts have shapes of their own
        return torch.Size([tensor.size(0)])
    return tensor.shape


class _Stop(BaseException):
    """Ends a recompute. A `BaseException`, since the region's own ``except Exception`` must not catch it."""


class _Past(NamedTuple):
    """The parts of a run that a recompute needs. A frame drops them after a backward that keeps no graph."""

    fn: Callable[..., Any]
    call: ArgumentSpec
    inputs: Inputs
    snapshot: Snapshot


class _Frame:
    """One run of a region: its past, and the placeholders that autograd holds for it.

    Attributes:
        past: what a recompute needs, while another recompute may come.
        is_observed: whether a dispatch mode watches the operators of the run.
        recorder: records the values that a policy saves; `None` without a policy.
        streams: the streams that the run used.
    """

    __slots__ = (
        "_concluded",
        "_learned",
        "_mode",
        "_placeholders",
        "_seen",
        "_trained",
        "is_observed",
        "past",
        "recorder",
        "streams",
    )

    def __init__(self, fn: Callable[..., Any], record: Record, learned: LearnedEffects, args: Any, kwargs: Any) -> None:
        wait_for_recomputes()
        captures = learned.captures_of(fn)
        try:
            call = ArgumentSpec(args, kwargs, captures)
        except SharedCaptures:
            captures = Captures(fn, follows=True)
            call = ArgumentSpec(args, kwargs, captures)
            captures.seal()
        tensors = call.take_tensors()  # `Inputs` decides what holds them
        self._learned = learned
        kinds = [(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors[: call.direct]]
        self._mode: Any = (captures.flags(), len(tensors), *kinds)
        snapshot = Snapshot(captures, tensors, learned.effects_in(self._mode))
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
        """Returns the placeholder for `tensor`, which autograd would save."""
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
        """Records the effects of the run at its end, and keeps the old values of arguments that the run changed."""
        assert self.past is not None
        _, _, inputs, snapshot = self.past
        versions = snapshot.argument_versions
        try:
            effects = snapshot.conclude()
        except CorrectnessError:
            self._learned.effects.clear()  # the next call copies everything, and learns anew
            raise
        if effects is not None:
            self._learned.learn(self._mode, effects, made_tensors=snapshot.made_tensors())
            if (training := any(self._mode[0])) not in self._learned.trained_in:
                self._learned.trained_in = (*self._learned.trained_in, training)
            self._learned.changes = self._learned.changes or snapshot.changes_beyond_norms(effects)
        if self.recorder is not None:
            self.recorder.conclude(snapshot.environment.moved)
        inputs.seal(versions)
        if snapshot.groups():
            for index, old_value in snapshot.take_replaced().items():
                inputs.replace(index, old_value)
        self._concluded = True

    def recompute(self, wanted: _Placeholder) -> _Found:
        """Runs the region again and fills every live placeholder. Returns the tensor of the placeholder `wanted`.

        Raises:
            CorrectnessError: the recompute saved other tensors than the run, or a tensor that the region depends on was
                changed in place since.
        """
        if self.past is None:
            raise CorrectnessError(
                "a checkpointed region was already released: backward went through it without retain_graph. "
                "Specify retain_graph=True in every backward but the last"
            )
        in_backward, keeps_graph = torch._C._current_graph_task_id() != -1, _keeps_graph()
        alive = [reference() for reference in self._placeholders]
        # Outside of a backward, code reads one saved tensor of the graph: no other placeholder will be unpacked.
        live = alive if in_backward else [placeholder if placeholder is wanted else None for placeholder in alive]
        last = in_backward and self._concluded and not keeps_graph
        if in_backward and not self._concluded:
            self.past.inputs.cut()
        try:
            # With a policy the first rerun may end as `Misaligned`, so it must leave the saved old values intact.
            found = self._rerun(self.past, live, last=last and self.recorder is None)
        except Misaligned:
            self.recorder = None
            found = self._rerun(self.past, live, last=last)
        if not simulating():
            _reruns[0] += 1
        # Placeholders are filled only after the rerun: the tensors of a rerun that failed must not be used.
        for placeholder in live:
            if placeholder is not None:
                placeholder.found = found[placeholder.index]
        if in_backward and keeps_graph:
            torch.autograd.Variable._execution_engine.queue_callback(_AtTheEnd(self._forget))
        elif last:
            # Every live placeholder has its tensor by now, so no recompute will need the inputs.
            self.past = self.recorder = None
        return found[wanted.index]

    def _rerun(self, past: _Past, live: list[_Placeholder | None], *, last: bool) -> dict[int, _Found]:
        """Runs the region again up to the last tensor that `live` waits for. Returns the tensors, by index."""
        refused: dict[int, str] = {}  # maps the storage of each input changed since to the message of the error
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
        """Calls the function with the tensors `values`, until the function has saved the last tensor to be found."""
        objects: list[Any] = []
        is_graded = torch.is_grad_enabled()
        run = past.snapshot.environment.context.copy().run
        # A cache of keys and values has hundreds of tensors, so only watched runs refuse backwards behind all of them.
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
                    # A region that computes gradients itself (forces from an energy) is recomputed during its run.
                    # The operators of such a recompute must not count as operators of the run.
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
        """Returns the tensor arguments for a rerun, by index: the tensors themselves, or copies of changed ones.

        Tensors that objects hold and that were changed in place since go into `refused`, since the region may not need
        them: the next layer may have written to a cache that all layers are given. Copies go into `fresh`.
        """
        groups = past.snapshot.groups()
        if not groups:
            return past.inputs.again((), {}, past.call.owner, refused, fresh)
        several = [group.names for group in groups if group.argument is None]  # a name may be that of an argument
        by_snapshot = {name for names in several for name in names if isinstance(name, int)}
        return past.inputs.again(by_snapshot, past.snapshot.replaced(), past.call.owner, refused, fresh)

    def _forget(self) -> None:
        for reference in self._placeholders:
            if (placeholder := reference()) is not None:
                placeholder.found = None


class _AtTheEnd:
    """A callback that acts when a backward drops it. Autograd drops callbacks also where the backward fails."""

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
    """Returns the index of the saved tensor at which a recompute stops whose last tensor to be found is `last`.

    Autograd saves the inputs of `rrelu` before its kernel, which fills one of them (the noise). For any two saved
    tensors in a row that look like these two, the recompute goes on to the next saved tensor.
    """
    for first in range(max(last - 1, 0), min(last + 1, len(seen) - 1)):
        if trained[first] != trained[first + 1]:
            (shape, dtype, _), (*like, _) = seen[first : first + 2]
            if [shape, dtype] == like and dtype.is_floating_point:
                return first + 2
    return last


_JAGGED = (
    ". To PyTorch each jagged tensor is of another length than all others that were not made of its offsets; make the "
    "offsets outside the region, and the tensor by torch.nested.nested_tensor_from_jagged(values, offsets)"
)


class _Rerun:
    """Receives the tensors that a recompute saves, and compares each with the one that the run saved."""

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
        self._fresh = fresh  # tensors whose version counters start anew
        self._of_fresh: set[int] | None = None  # the storages of `fresh`
        self.made: set[int] = set()  # storages that the rerun made, if only the rerun is under a dispatch mode
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
        # Detached also where no placeholder waits: an operator that saves its own result would otherwise be in a
        # reference cycle with the result. Half of the cycle is in C++, where Python's collector does not see it.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if index <= self._last and self._live[index] is not None:
            self.found[index] = tensor, tensor._version
        if index == self._end:
            self.streams.meet()  # before the tensors of the rerun are freed
            raise _Stop
        return tensor

    def _check(self, index: int, tensor: torch.Tensor, now: _Seen) -> None:
        """Raises `CorrectnessError` if a saved tensor differs from the run's, or was changed in place since."""
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
        learned = memory_of(tensor)
        return learned in self._of_fresh or learned in self.made

    def check(self) -> None:
        """Raises `CorrectnessError` if the recompute ended before it saved the last tensor to be found."""
        if self._count <= self._last:
            raise CorrectnessError(
                f"the recompute differs from the run: it saved {self._count} tensors where the run had saved at least "
                f"{self._last + 1}. A checkpointed region must do the same at every run with the same inputs; look "
                "for a condition on something that changed in between"
            )
