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

import operator
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from memscale.core import CorrectnessError, changed_error, described, internals, simulating
from memscale.regions import (
    ArgumentSpec,
    Captures,
    Environment,
    Replay,
    SharedCaptures,
    Snapshot,
    Streams,
    hooks_around,
    memory_of,
    never_compiled,
    recompute_lock,
    recomputing,
    restore,
    unrecorded,
    wait_for_recomputes,
)
from memscale.transforms.checkpoint.inputs import Inputs, plain_tensors, refuse_backward_behind
from memscale.transforms.checkpoint.learned_effects import LearnedEffects
from memscale.transforms.checkpoint.saved_again import save_again
from memscale.transforms.checkpoint.selective import Misaligned, Recorder, Replayer

_autograd = internals.autograd
_graph_task = internals.named("torch._C._current_graph_task_id")  # -1 outside of a backward
# Whether TorchScript optimizes, in this thread. In a region it does not, because its optimizer makes another graph for
# the second call of a function than for the first one, and the recompute would save other tensors than the run.
_optimizes = internals.named("torch._C._get_graph_executor_optimize")
_set_optimizes = internals.named("torch._C._set_graph_executor_optimize")
_kind_of = operator.attrgetter("dtype", "ndim", "requires_grad")  # of an argument
# A function that makes the recorder of a policy for a run with the given inputs; `None` without a policy.
Record = Callable[[list[torch.Tensor]], Recorder] | None
_Found = tuple[torch.Tensor, int]  # a recomputed tensor, and the version at which it was saved
_Seen = tuple[torch.Size, torch.dtype, int, bool]  # of a saved tensor: shape, dtype, version and `requires_grad`
_reruns = [0]  # of this process; two threads that count at once may add only 1


def recomputed_regions() -> int:
    """Returns how many regions the backward passes of this process have recomputed, simulated ones excluded."""
    return _reruns[0]


def run(fn: Callable[..., Any], record: Record, learned: LearnedEffects, args: Any, kwargs: Any) -> Any:
    """Returns ``fn(*args, **kwargs)``. Keeps only the inputs and the values that a policy's recorder saves."""
    frame = _Frame(fn, record, learned, args, kwargs)
    optimizes = _optimizes()
    _set_optimizes(False)
    _autograd._push_saved_tensors_default_hooks(frame.pack, _unpack)
    try:
        if frame.is_observed:
            with frame.snapshot.watching(), frame.recorder or nullcontext():
                result = fn(*args, **kwargs)
        else:
            result = fn(*args, **kwargs)
    finally:
        _autograd._pop_saved_tensors_default_hooks()
        _set_optimizes(optimizes)
    frame.conclude()
    return result


class _Placeholder:
    """Takes the place of a saved tensor in autograd's graph.

    Attributes:
        frame: the run that would have saved the tensor.
        index: the number of the tensor among those that the run would have saved.
        found: the tensor, from a recompute to its use.
    """

    __slots__ = ("__weakref__", "found", "frame", "index")

    frame: _Frame
    index: int
    found: _Found | None


@recomputing
@never_compiled
def _unpack(placeholder: _Placeholder) -> torch.Tensor:
    found, frame = placeholder.found, placeholder.frame
    if found is None:
        found = frame.recompute(placeholder)
    if not frame.is_released and _keeps_graph():
        # A later backward would recompute the tensors again, so this backward frees each tensor after its use.
        placeholder.found = None
    tensor, expected = found
    if frame.streams.are_several:
        frame.streams.lend_to_current(tensor)
    if tensor._version != expected:  # autograd checks no versions of tensors that hooks return
        what = f"saved tensor {placeholder.index} of a checkpointed region"
        size = torch.Size([tensor.size(0)]) if tensor.is_nested else tensor.shape
        raise changed_error(described(what, tensor.dtype, size), tensor._version, expected)
    if torch.is_grad_enabled() and _graph_task() != -1:
        save_again(placeholder, tensor, _unpack)
    return tensor


def _keeps_graph() -> bool:
    return _graph_task() == -1 or _autograd._get_current_graph_task_keep_graph()


_saved: Callable[[torch.Tensor], _Seen] = operator.attrgetter("shape", "dtype", "_version", "requires_grad")


def _saved_nested(tensor: torch.Tensor) -> _Seen:
    """Returns what `_saved` returns, for a nested tensor without a shape: the number of its parts is the shape."""
    return torch.Size([tensor.size(0)]), tensor.dtype, tensor._version, tensor.requires_grad


class _Stop(BaseException):
    """Ends a recompute. A `BaseException`, so that the region's own ``except Exception`` lets it pass."""


class _Frame:
    """One run of a region: the data that its recompute needs, and the placeholders that autograd holds.

    The arguments of most calls are tensors and constants, which the frame holds as they are. Other arguments, and
    arguments that saved-tensor hooks around the region keep, are in `call` and `inputs`.

    Attributes:
        snapshot: the state before the run.
        is_released: whether a backward that frees the graph has gone through the run; a recompute is impossible then.
        is_observed: whether a dispatch mode watches the operators of the run.
        recorder: records the values that a policy saves; `None` without a policy.
        streams: the streams that the run used.
    """

    def __init__(self, fn: Callable[..., Any], record: Record, learned: LearnedEffects, args: Any, kwargs: Any) -> None:
        wait_for_recomputes()
        captures = learned.captures_of(fn)
        hooks = hooks_around()
        tensors: list[torch.Tensor] = []
        direct = tensors
        self._call: ArgumentSpec | None = None
        self._inputs: Inputs | None = None
        is_plain = hooks is None and plain_tensors((*args, *kwargs.values()) if kwargs else args, tensors)
        if not is_plain:
            try:
                self._call = ArgumentSpec(args, kwargs, captures)
            except SharedCaptures:
                captures = Captures(fn, follows=True)
                self._call = ArgumentSpec(args, kwargs, captures)
                captures.seal()
            tensors = self._call.take_tensors()  # held by `Inputs`, directly or through hooks
            direct = tensors[: self._call.direct]
            self._inputs = Inputs(tensors, [tensor.requires_grad for tensor in tensors], captures, hooks)
            args = kwargs = None
        self._fn, self._args, self._kwargs = fn, args, kwargs
        self._learned = learned
        self._mode: Any = (captures.flags, len(tensors), *map(_kind_of, direct))
        effects = learned.effects.get(self._mode) or learned.effects_in(self._mode)
        self.snapshot = Snapshot(captures, tensors, effects, holds_arguments=is_plain)
        self.streams = Streams(self.snapshot.environment.devices)
        self._placeholders: list[weakref.ref[_Placeholder]] = []
        self._seen: list[_Seen] = []
        # From which saved tensor on the generators are read. Those of a simulated card do not move.
        self._marked_from = 0 if effects is None else effects.saved - 1 if effects.drew else sys.maxsize
        if simulating():
            self._marked_from = sys.maxsize
        self._concluded = self.is_released = False
        self.recorder = record and record(tensors)
        self.is_observed = record is not None or effects is None

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> _Placeholder:
        """Returns the placeholder for `tensor`, which autograd would save."""
        seen = self._seen
        placeholder = _Placeholder()
        placeholder.frame, placeholder.index, placeholder.found = self, len(seen), None
        self._placeholders.append(weakref.ref(placeholder))
        try:
            seen.append(_saved(tensor))
        except RuntimeError:
            seen.append(_saved_nested(tensor))
        if placeholder.index >= self._marked_from:
            self.snapshot.environment.mark(placeholder.index)
        streams = self.streams
        if streams.are_seen and not (
            tensor.get_device() == streams.index and streams.current(streams.index) == streams.handle
        ):
            streams.see(tensor)
        if self.recorder is not None:
            self.recorder.mark()
        return placeholder

    def conclude(self) -> None:
        """Records the effects of the run at its end, and keeps the old values of arguments that the run changed."""
        snapshot = self.snapshot
        try:
            effects = snapshot.conclude()
        except CorrectnessError:
            self._learned.effects.clear()  # the next run is watched, and copies all state
            raise
        if effects is not None:
            self._learned.learn(self._mode, effects._replace(saved=len(self._seen)), snapshot)
        if self.recorder is not None:
            self.recorder.conclude(snapshot.environment.moved)
        if self._inputs is not None:
            self._inputs.seal(snapshot.argument_versions)
        self._concluded = True
        if snapshot.kept and (replaced := snapshot.take_replaced()):
            inputs = self._general()[1]
            for index, old_value in replaced.items():
                inputs.replace(index, old_value)

    def _general(self) -> tuple[ArgumentSpec, Inputs]:
        """Returns the arguments in the form that can replace some of the tensors."""
        if self._call is None or self._inputs is None:
            snapshot = self.snapshot
            self._call = ArgumentSpec(self._args, self._kwargs, None)
            self._inputs = Inputs(self._call.take_tensors(), snapshot.arguments_trained, snapshot.captures, None)
            self._inputs.seal(snapshot.argument_versions)
        return self._call, self._inputs

    def recompute(self, wanted: _Placeholder) -> _Found:
        """Runs the region again and fills every live placeholder. Returns the tensor of the placeholder `wanted`.

        Raises:
            CorrectnessError: the recompute saved other tensors than the run, or a tensor that the region depends on was
                changed in place since.
        """
        if self.is_released:
            raise CorrectnessError(
                "a checkpointed region was already released: backward went through it without retain_graph. "
                "Specify retain_graph=True in every backward but the last"
            )
        in_backward = _graph_task() != -1
        keeps_graph = not in_backward or _autograd._get_current_graph_task_keep_graph()
        live = [reference() for reference in self._placeholders]
        if not in_backward:  # code reads one saved tensor of the graph: no other placeholder will be unpacked
            live = [placeholder if placeholder is wanted else None for placeholder in live]
        last = self._concluded and not keeps_graph
        if in_backward and not self._concluded:
            self._general()[1].cut()
        try:
            # With a policy the first rerun may end as `Misaligned`, so it must leave the saved old values intact.
            found = self._rerun(live, last=last and self.recorder is None)
        except Misaligned:
            self.recorder = None
            found = self._rerun(live, last=last)
        if not simulating():
            _reruns[0] += 1
        # Placeholders are filled only after the rerun: the tensors of a rerun that failed must not be used.
        for placeholder in live:
            if placeholder is not None:
                placeholder.found = found[placeholder.index]
        if in_backward and keeps_graph:
            torch.autograd.Variable._execution_engine.queue_callback(_AtTheEnd(self._forget))
        elif last:
            # Every live placeholder has its tensor by now: no further recompute needs the inputs.
            self.is_released = True
            self._args = self._kwargs = self._call = self._inputs = self.recorder = None
            del self._fn, self.snapshot
        return found[wanted.index]

    def _rerun(self, live: list[_Placeholder | None], *, last: bool) -> dict[int, _Found]:
        """Runs the region again up to the last tensor that `live` waits for. Returns the tensors, by index."""
        snapshot = self.snapshot
        refused: dict[int, str] = {}  # maps the storage of each input changed since to the message of the error
        fresh: list[torch.Tensor] = []
        undo: list[Callable[[], Any]] = []
        try:
            streams = self.streams.enter(undo) if self.streams.are_seen else self.streams
            is_plain = self._inputs is None and self._concluded and snapshot.are_arguments_unchanged()
            found = None if is_plain else self._values(refused, fresh)
            rerun = _Rerun(self._seen, live, fresh, streams, snapshot.environment)
            wait_for_recomputes()
            with (
                recompute_lock.lock,
                Replay(snapshot, last=last, refused=refused, fresh=fresh, made=rerun.made) as shared,
            ):
                if found is not None and shared:
                    found = dict(sorted((found | shared).items()))
                with torch.enable_grad():
                    self._run_again(rerun, found, shared)
            self.streams = streams
        finally:
            for step in reversed(undo):
                step()
        if rerun.count <= rerun.last:
            raise CorrectnessError(
                f"the recompute differs from the run: it saved {rerun.count} tensors where the run had saved at least "
                f"{rerun.last + 1}. A checkpointed region must do the same at every run with the same inputs; look "
                "for a condition on something that changed in between"
            )
        return rerun.found

    def _run_again(self, rerun: _Rerun, found: dict[int, torch.Tensor] | None, shared: dict[int, torch.Tensor]) -> None:
        """Calls the function until it has saved the last tensor to be found.

        Args:
            rerun: receives the tensors that the function saves.
            found: the tensors to pass as arguments, by index; `None` passes the arguments of the run.
            shared: the tensors in `found` that the function also reaches by other names.
        """
        snapshot, args, kwargs = self.snapshot, self._args, self._kwargs
        objects: list[Any] = []
        optimizes = _optimizes()
        values = snapshot.arguments if found is None else [*found.values()]
        handles: list[Any] = []
        try:
            own = values
            if found is not None:
                call = self._general()[0]
                # A cache of keys and values has hundreds of tensors: only watched runs put a hook on every tensor.
                every, direct = snapshot.is_watched, call.direct
                own = [each for index, each in found.items() if index not in shared and (every or index < direct)]
                args, kwargs = call.rebuild(values, objects)
            handles = refuse_backward_behind(own)
            _set_optimizes(False)
            _autograd._push_saved_tensors_default_hooks(rerun.pack, _as_it_is)
            run = snapshot.environment.context.copy().run
            try:
                recorder = self.recorder if self._concluded else None
                if self._concluded and recorder is None:
                    run(self._fn, *args, **kwargs)
                else:
                    # A region that computes gradients itself (forces from an energy) is recomputed during its run:
                    # `unrecorded` keeps the operators of that recompute out of the operators of the run.
                    with unrecorded() if recorder is None else recorder.replayer(values) as rerun.replayer:
                        run(self._fn, *args, **kwargs)
            except BaseException as error:
                # TorchScript's interpreter raises a `RuntimeError` in place of the `_Stop` that passes it.
                if not (isinstance(error, _Stop) or (isinstance(error, RuntimeError) and rerun.has_ended)):
                    rerun.streams.meet()
                    raise
            finally:
                _autograd._pop_saved_tensors_default_hooks()
        finally:
            _set_optimizes(optimizes)
            for handle in handles:
                handle.remove()
            if objects:
                restore(objects)

    def _values(self, refused: dict[int, str], fresh: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns the tensor arguments for a rerun, by index: the tensors themselves, or copies of changed ones.

        A tensor that an object holds, and that was changed in place since the run, goes into `refused` and raises no
        error yet, since the region may not read it: the next layer may have written to a cache that all layers share.
        Copies go into `fresh`.
        """
        call, inputs = self._general()
        groups = self.snapshot.groups()
        if not groups:
            return inputs.again((), {}, call.owner, refused, fresh)
        several = [group.names for group in groups if group.argument is None]  # a name may be that of an argument
        by_snapshot = {name for names in several for name in names if isinstance(name, int)}
        return inputs.again(by_snapshot, self.snapshot.replaced(), call.owner, refused, fresh)

    def _forget(self) -> None:
        for reference in self._placeholders:
            if (placeholder := reference()) is not None:
                placeholder.found = None


class _AtTheEnd:
    """A callback that runs its action when autograd drops it, at the end of a backward, failed backwards included."""

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


def _end(seen: list[_Seen], last: int) -> int:
    """Returns the index of the saved tensor at which a recompute stops; `last` is the last tensor that it must find.

    Autograd saves the two inputs of `rrelu` before its kernel runs, which fills one of the two (the noise). Where two
    consecutive saved tensors look like these inputs, the recompute goes on to the next saved tensor.
    """
    for first in range(max(last - 1, 0), min(last + 1, len(seen) - 1)):
        one, other = seen[first], seen[first + 1]
        if one[3] != other[3] and one[:2] == other[:2] and one[1].is_floating_point:
            return first + 2
    return last


_JAGGED = (
    ". PyTorch takes two jagged tensors for equally long only if both were made from the same offsets; make the "
    "offsets outside the region, and the tensor by torch.nested.nested_tensor_from_jagged(values, offsets)"
)


class _Rerun:
    """Receives the tensors that a recompute saves, and compares each with the tensor that the run saved."""

    def __init__(
        self,
        seen: list[_Seen],
        live: list[_Placeholder | None],
        fresh: list[torch.Tensor],
        streams: Streams,
        environment: Environment,
    ) -> None:
        self._seen = seen
        self._live = live
        self.streams = streams
        self._fresh = fresh  # tensors whose version counters start anew
        self._of_fresh: set[int] | None = None  # the storages of `fresh`
        self.made: set[int] = set()  # storages that the rerun made, if only the rerun is under a dispatch mode
        self.last = len(live) - 1
        while live[self.last] is None:
            self.last -= 1
        self._end = _end(seen, self.last)
        self._environment = environment
        self.count = 0
        self.has_ended = False  # whether every tensor is found that a placeholder waits for
        self.replayer: Replayer | None = None
        self.found: dict[int, _Found] = {}

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self.count
        self.count = index + 1
        streams = self.streams
        if streams.are_seen and not (
            tensor.get_device() == streams.index and streams.current(streams.index) == streams.handle
        ):
            streams.see(tensor)
        try:
            now: _Seen = _saved(tensor)
        except RuntimeError:
            now = _saved_nested(tensor)
        if index <= self.last and now != self._seen[index]:
            self._check(index, tensor, now)
        # Detached also where no placeholder waits: else an operator that saves its own result would be in a reference
        # cycle with the result. Half of that cycle is in C++, which Python's collector does not see.
        tensor = tensor.detach() if now[3] else tensor
        if index <= self.last and self._live[index] is not None:
            self.found[index] = tensor, now[2]
        if index == self._environment.marked:
            self._environment.check_draws()
        if index == self._end:
            if self.streams.are_several:
                self.streams.meet()  # before the tensors of the rerun are freed
            self.has_ended = True
            raise _Stop
        return tensor

    def _check(self, index: int, tensor: torch.Tensor, now: _Seen) -> None:
        """Raises `CorrectnessError` if a saved tensor differs from the run's, or was changed in place since."""
        shape, dtype, expected, _ = self._seen[index]
        if now[0] != shape or now[1] != dtype:
            plain = all(type(size) is int for size in shape)
            raise CorrectnessError(
                f"the recompute differs from the run: saved tensor {index} of the region was "
                f"{dtype}{list(shape)} and is now {now[1]}{list(now[0])}. A checkpointed region must "
                f"do the same at every run with the same inputs{'' if plain else _JAGGED}"
            )
        if now[2] != expected and not self._is_fresh(tensor):
            raise changed_error(
                described(f"saved tensor {index} of a checkpointed region", dtype, shape),
                now[2],
                expected,
                "The region reads a tensor from outside that was changed between forward and backward; pass the "
                "tensor as an argument, or change it after backward",
            )

    def _is_fresh(self, tensor: torch.Tensor) -> bool:
        if self._of_fresh is None:
            self._of_fresh = {memory_of(fresh) for fresh in self._fresh}
        learned = memory_of(tensor)
        return learned in self._of_fresh or learned in self.made
