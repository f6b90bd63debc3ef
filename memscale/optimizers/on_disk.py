"""`OnDisk`: states on disk only, read before their parameter steps and written afterwards, pipelined."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from memscale.core import RuntimeUnavailable, device_type, simulating
from memscale.optimizers.on_host import Below, is_large, laid_out
from memscale.optimizers.step_parts import Group, PartedOptimizer, StepPart, in_turn
from memscale.runtime.backends import Buffer, Event
from memscale.runtime.engine import Engine
from memscale.runtime.storage import PAGE_BYTES, page_aligned_memory

_KEPT_BYTES = 2**28  # memory kept from one step to the next; new memory costs a tenth of the disk's time
AHEAD = 2  # how many parameters' states are being read while another one steps, and as many being written


class _Stored:
    """The large states of one parameter: on disk, and in memory while the parameter steps.

    Attributes:
        buffer: the bytes on disk, allocated by `engine`.
        likes: for each state's name a meta tensor with its shape and type.
        order: the names of all states of the parameter, in the optimizer's order.
        rest: the optimizer's dictionary of the other states while these are on disk. Another dictionary in its place is
            the caller's, with new states.
        memory: the bytes of the states while these are in memory or being copied, else None. A part of `whole`, which
            can serve another parameter afterwards.
        views: the state tensors over `memory` that the optimizer has.
        moving: the copy in flight.
    """

    # Slots, so that a search through the optimizer's attributes for tensors does not find `likes`.
    __slots__ = ("buffer", "engine", "likes", "memory", "moving", "order", "rest", "views", "whole")

    def __init__(self, engine: Engine, buffer: Buffer, likes: dict[str, torch.Tensor]) -> None:
        self.engine, self.buffer, self.likes = engine, buffer, likes
        self.order: list[str] = []
        self.rest: dict[str, Any] = {}
        self.memory: torch.Tensor | None = None
        self.whole: torch.Tensor | None = None
        self.views: dict[str, torch.Tensor] = {}
        self.moving: Event | None = None

    def states(self) -> dict[str, torch.Tensor]:
        """Returns the state tensors over the bytes in memory."""
        assert self.memory is not None, "the caller has taken memory before"
        found, start = {}, 0
        for key, like in self.likes.items():
            found[key] = laid_out(self.memory[start : start + like.nbytes], like)
            start += _in_pages(like.nbytes)
        return found

    def forget(self) -> None:
        """Drops the references to the memory; state tensors over it keep it alive."""
        self.memory = self.whole = None
        self.views = {}

    def free(self) -> None:
        """Frees the bytes on disk, after the copies in flight."""
        self.engine.count_live("disk", -self.buffer.nbytes)
        self.engine.backend.free(self.buffer, after=[])


class OnDisk(StepPart):
    """Keeps the states of each parameter on disk, and in memory only while the parameter steps.

    Args:
        below: the tiers; allocates the memory that states of an accelerator's parameters are read into.
    """

    writes_offloaded: ClassVar[bool] = True
    places_states: ClassVar[bool] = True

    def __init__(self, how: Any, optimizer: PartedOptimizer, inner: StepPart, below: Below) -> None:
        super().__init__(how, optimizer, inner)
        self._below = below
        self._by_id: dict[int, torch.Tensor] = {}  # the parameters, by their ids
        self._stored: dict[int, _Stored] = {}  # by the id of the parameter
        self._written: deque[_Stored] = deque()  # states being written, oldest first
        self._spare: list[torch.Tensor] = []  # memory that became free in this step
        self._kept: list[torch.Tensor] = []  # memory that became free in earlier steps
        self._last: int | None = None  # the id of the parameter that stepped last in this step
        self._after: dict[int, int] = {}  # for each parameter's id, the id of the one that stepped after it
        weakref.finalize(self, _free_all, self._stored).atexit = False

    def attend(self, parameters: list[torch.Tensor]) -> None:
        super().attend(parameters)
        self._below.check(parameters, self.optimizer)
        for stored in self._stored.values():  # an exception may have ended a step with copies in flight
            self._wait(stored)
        self._by_id = {id(parameter): parameter for parameter in parameters}
        for key in [key for key in self._stored if key not in self._by_id]:
            self._stored.pop(key).free()
        if not parameters:
            self._kept.clear()
        for parameter in parameters:
            if any(is_large(value) for value in self.optimizer.state.get(parameter, {}).values()):
                self._arrive(parameter)  # beside a state that the caller has assigned
                self._leave(parameter)
                self._finish_writing(AHEAD)
        self._end()

    def advance(self, group: Group) -> None:
        parameters = group["params"]
        for position, now in enumerate(in_turn(group, ([parameter] for parameter in parameters))):
            parameter = parameters[position]
            self.inner.ask(parameters[position : position + 1 + AHEAD])
            self._arrive(parameter)
            for later in self._following(parameter, parameters[position + 1 :]):
                self._read(later)
            self.inner.advance(now)
            self._leave(parameter)
            self._finish_writing(AHEAD)
            if self._last is not None:
                self._after[self._last] = id(parameter)
            self._last = id(parameter)

    def after_step(self) -> None:
        self._end()

    def _end(self) -> None:
        self._last = None
        self._finish_writing(0)
        for stored in self._stored.values():  # states may have been read for a parameter that had no gradient this time
            self._wait(stored)
            stored.forget()
        if not simulating():  # simulated tensors have no memory that another parameter could reuse
            self._kept += self._spare
            while sum(map(len, self._kept)) > _KEPT_BYTES:
                self._kept.pop(0)
        self._spare.clear()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        state: Any = self.optimizer.state
        before = {parameter: state.get(parameter) for parameter in self.parameters}
        try:
            for key in list(self._stored):
                self._arrive(self._by_id[key])
                if not simulating() and key in self._stored:
                    self._part(self._by_id[key])
            yield
        finally:
            for parameter, small in before.items():
                if small is not None:
                    state[parameter] = small
            for stored in self._stored.values():
                stored.forget()

    def _part(self, parameter: torch.Tensor) -> None:
        """Gives the states of `parameter` storages of their own over the same memory, as `torch.save` needs."""
        states = self.optimizer.state[parameter]
        for name, view in self._stored[id(parameter)].views.items():
            if states[name] is not view:
                continue
            flat = view.as_strided((view.numel(),), (1,)).view(torch.uint8)
            states[name] = laid_out(torch.from_numpy(flat.numpy()), view)

    # ---------------------------------------------------------------------------------------------- writing and reading

    def _following(self, parameter: torch.Tensor, rest: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the parameters that will step next: those of this call, else those that followed in the last step."""
        if rest:
            return rest[:AHEAD]
        found: list[torch.Tensor] = []
        key = id(parameter)
        while len(found) < AHEAD and (following := self._after.get(key)) in self._by_id:
            assert following is not None
            found.append(self._by_id[following])
            key = following
        return found

    def _read(self, parameter: torch.Tensor) -> _Stored | None:
        """Begins to read the states of `parameter`, if they are on disk only."""
        stored = self._stored_of(id(parameter))
        if stored is not None and stored.memory is None:
            memory = self._take_memory(stored, parameter)
            stored.moving = stored.engine.backend.copy(stored.buffer, memory, "in", after=[])
        return stored

    def _arrive(self, parameter: torch.Tensor) -> None:
        """Puts the states of `parameter` into the optimizer's `state`."""
        if (stored := self._read(parameter)) is None:
            return
        self._wait(stored)
        stored.views = stored.states()
        found = {**stored.views, **self.optimizer.state[parameter]}  # a state that the caller has assigned counts
        names = dict.fromkeys([*stored.order, *found])
        self.optimizer.state[parameter] = {name: found[name] for name in names}

    def _leave(self, parameter: torch.Tensor) -> None:
        """Begins to write the states of `parameter`, and removes them from the optimizer's `state`."""
        optimizer = self.optimizer
        states = optimizer.state.get(parameter, {})
        large = {name: value for name, value in states.items() if is_large(value)}
        if not large:
            return
        stored = self._stored_for(parameter, large)
        memory = self._take_memory(stored, parameter) if stored.memory is None else stored.memory
        for name, kept in stored.states().items():
            if stored.views.get(name) is not large[name]:  # the state is new, or the step has replaced it
                kept.copy_(large[name].detach())
        stored.views = {}
        stored.moving = stored.engine.backend.copy(memory, stored.buffer, "out", after=[])
        self._written.append(stored)
        stored.order = list(states)
        optimizer.state[parameter] = {name: value for name, value in states.items() if name not in large}
        optimizer._part_states([parameter])
        stored.rest = optimizer.state[parameter]

    def _finish_writing(self, most: int) -> None:
        """Waits until at most `most` states are being written, and frees the memory of the others."""
        while len(self._written) > most:
            stored = self._written[0]
            self._wait(stored)
            self._written.popleft()
            if stored not in self._written:
                if stored.whole is not None:
                    self._spare.append(stored.whole)
                stored.forget()

    def _wait(self, stored: _Stored) -> None:
        """Waits for the copy of these states."""
        if (event := stored.moving) is None:
            return
        stored.engine.backend.synchronize(event)
        if stored.memory is not None:
            stored.engine.used_by_host(stored.memory)
        error, stored.moving = event.error(), None
        if error is not None:
            raise RuntimeUnavailable(
                f"{self._below.title}: the disk failed with {type(error).__name__}: {error}; load the last "
                "checkpoint, with states on another disk or tier"
            ) from error

    # ------------------------------------------------------------------------------------------------------- memory

    def _stored_of(self, key: int) -> _Stored | None:
        """Returns where these states are; a simulation gets a buffer of its own, as the real one holds real states.

        A parameter whose entry in the optimizer's `state` is gone or another dictionary, after ``state.clear()``,
        ``state[parameter] = {}`` or a `state_dict` without it, begins with what that dictionary holds.
        """
        stored = self._stored.get(key)
        if stored is not None and not stored.views and not simulating() and self._is_replaced(stored, key):
            self._stored.pop(key).free()
            return None
        if stored is not None and simulating() and stored.engine is not self._engine():
            order, rest = stored.order, stored.rest
            stored = self._stored[key] = self._new_room(stored.likes)
            stored.order, stored.rest = order, rest
        return stored

    def _is_replaced(self, stored: _Stored, key: int) -> bool:
        if self.optimizer.state.get(self._by_id[key]) is not stored.rest:
            return True
        return any(name not in stored.rest for name in stored.order if name not in stored.likes)  # `.clear()`

    def _stored_for(self, parameter: torch.Tensor, large: dict[str, torch.Tensor]) -> _Stored:
        """Returns the buffer for states like `large`; a buffer for states of other shapes or types is freed first."""
        stored = self._stored_of(id(parameter))
        likes = {key: torch.empty_like(value, device="meta") for key, value in large.items()}
        if stored is not None:
            if _kinds(stored.likes) == _kinds(likes):
                return stored
            self._stored.pop(id(parameter)).free()
        stored = self._stored[id(parameter)] = self._new_room(likes)
        return stored

    def _new_room(self, likes: dict[str, torch.Tensor]) -> _Stored:
        engine = self._engine()
        nbytes = sum(_in_pages(like.nbytes) for like in likes.values())
        buffer = engine.backend.allocate(nbytes, "disk")
        if buffer is None:
            raise self._below.full(nbytes)
        engine.count_live("disk", buffer.nbytes)
        return _Stored(engine, buffer, likes)

    def _engine(self) -> Engine:
        return self._below.runtime.engine(torch.empty(0))

    def _take_memory(self, stored: _Stored, parameter: torch.Tensor) -> torch.Tensor:
        nbytes = stored.buffer.nbytes
        if device_type(parameter) != "cpu":
            stored.memory = self._below.room(nbytes, parameter, "auto")
            return stored.memory
        spares = [self._spare] if simulating() else [self._spare, self._kept]
        fit = min((each for spare in spares for each in spare if len(each) >= nbytes), key=len, default=None)
        for spare in spares:
            if fit is None:
                del spare[:1]  # too small to serve; dropping it keeps the total from growing with the new one
            else:
                spare[:] = [each for each in spare if each is not fit]
        if fit is None:
            fit = torch.empty(nbytes, dtype=torch.uint8) if simulating() else page_aligned_memory(nbytes)
        stored.whole, stored.memory = fit, fit[:nbytes]
        return stored.memory


def _kinds(likes: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, tuple[int, ...]]]:
    return {key: (like.dtype, like.shape, like.stride()) for key, like in likes.items()}


def _free_all(stored: dict[int, _Stored]) -> None:
    for each in stored.values():
        each.free()


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
