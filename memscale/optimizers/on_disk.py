"""States on disk alone: read before the step of their parameter, written after it, three of them under way."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch

from memscale.core import RuntimeUnavailable, device_type, simulating
from memscale.optimizers.on_host import Below, laid_out
from memscale.optimizers.parts import Group, PartedOptimizer, StepPart, copied, in_turn
from memscale.runtime import Runtime, runtime_for
from memscale.runtime.backends import Buffer, Event
from memscale.runtime.engine import Engine
from memscale.runtime.storage import PAGE_BYTES, page_aligned_memory

_KEPT_BYTES = 2**28  # of memory, from one step to the next: what is new costs a tenth of what the disk takes
AHEAD = 2  # parameters whose states are being read while another one steps, and as many being written


class _Room:
    """Where the states of one parameter are on disk."""

    __slots__ = ("buffer", "engine", "likes")

    def __init__(self, engine: Engine, buffer: Buffer, likes: dict[str, torch.Tensor]) -> None:
        self.engine = engine
        self.buffer = buffer
        self.likes = likes  # by the state's name, a tensor without memory

    def states(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The states that the bytes in `memory` are."""
        found, start = {}, 0
        for key, like in self.likes.items():
            found[key] = laid_out(memory[start : start + like.nbytes], like)
            start += _in_pages(like.nbytes)
        return found

    def free(self) -> None:
        """Give the disk back, after the copies that are under way."""
        self.engine.count_live("disk", -self.buffer.nbytes)
        self.engine.backend.free(self.buffer, after=[])


class OnDisk(StepPart):
    """Keeps the states of a parameter on disk but while it steps.

    Args:
        runtime: the disk; None is the process's own.
        least_bytes: states of fewer bytes stay.
        below: memory to read into for parameters of an accelerator.
    """

    writes_offloaded: ClassVar[bool] = True
    places_states: ClassVar[bool] = True
    hands_on: ClassVar[bool] = True

    def __init__(
        self, optimizer: PartedOptimizer, inner: StepPart, *, runtime: Runtime | None, least_bytes: int, below: Below
    ) -> None:
        super().__init__(optimizer, inner)
        self._runtime, self._least_bytes, self._below = runtime, least_bytes, below
        self._rooms: dict[int, _Room] = {}  # by the id of the parameter
        self._parameters: dict[int, torch.Tensor] = {}
        self._orders: dict[int, list[str]] = {}  # of the states, as the optimizer made them
        self._there: dict[int, torch.Tensor] = {}  # the bytes of those that are in memory
        self._views: dict[int, dict[str, torch.Tensor]] = {}  # and those themselves
        self._moving: dict[int, Event] = {}  # what they wait for
        self._written: deque[int] = deque()
        self._whole: dict[int, torch.Tensor] = {}  # the memory that those bytes are the first of
        self._spare: list[torch.Tensor] = []  # memory of this step that others can have
        self._kept: list[torch.Tensor] = []  # and of the step before
        self._last: int | None = None  # to have stepped in this step
        self._after: dict[int, int] = {}  # which parameter stepped after which
        weakref.finalize(self, _free_all, self._rooms).atexit = False

    def attend(self, parameters: list[torch.Tensor]) -> None:
        self._below.check(parameters, self.optimizer)
        for key in list(self._moving):  # of a step that an exception ended
            self._wait(key)
        self._parameters = {id(parameter): parameter for parameter in parameters}
        for key in [key for key in self._rooms if key not in self._parameters]:
            self._rooms.pop(key).free()
        if not parameters:
            self._kept.clear()
        for parameter in parameters:
            if any(self._is_large(value) for value in self.optimizer.state.get(parameter, {}).values()):
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
                self._ask(later)
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
        for key in list(self._moving):  # read for a parameter that had no gradient this time
            self._wait(key)
        self._there.clear()
        self._views.clear()
        self._whole.clear()
        if not simulating():  # what is simulated has no memory that others can have
            self._kept += self._spare
            while sum(map(len, self._kept)) > _KEPT_BYTES:
                self._kept.pop(0)
        self._spare.clear()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        state: Any = self.optimizer.state
        before = {parameter: state.get(parameter) for parameter in self._parameters.values()}
        try:
            for key in self._rooms:
                self._arrive(self._parameters[key])
                if not simulating():
                    self._part(self._parameters[key])
            yield
        finally:
            for parameter, small in before.items():
                if small is not None:
                    state[parameter] = small
            self._there.clear()  # those who have the states keep it
            self._views.clear()
            self._whole.clear()

    def _part(self, parameter: torch.Tensor) -> None:
        """Give the states of `parameter` storages of their own over the same memory: `torch.save` asks for that."""
        states, views = self.optimizer.state[parameter], self._views.get(id(parameter), {})
        for name, view in views.items():
            flat = view.as_strided((view.numel(),), (1,)).view(torch.uint8)
            states[name] = laid_out(torch.from_numpy(flat.numpy()), view)

    # ------------------------------------------------------------------------------------------------- out and back

    def _following(self, parameter: torch.Tensor, rest: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters that will step next: those of this call, or else those that did last time."""
        if rest:
            return rest[:AHEAD]
        found: list[torch.Tensor] = []
        key = id(parameter)
        while len(found) < AHEAD and (following := self._after.get(key)) in self._parameters:
            assert following is not None
            found.append(self._parameters[following])
            key = following
        return found

    def _ask(self, parameter: torch.Tensor) -> None:
        """Begin to read the states of `parameter`, if they are not there."""
        key = id(parameter)
        room = self._room_of(key)
        if room is None or key in self._there:
            return
        memory = self._there[key] = self._memory(room, parameter)
        self._moving[key] = room.engine.backend.copy(room.buffer, memory, "in", after=[])

    def _arrive(self, parameter: torch.Tensor) -> None:
        """Give `parameter` its states."""
        key = id(parameter)
        room = self._room_of(key)
        if room is None:
            return
        self._ask(parameter)
        self._wait(key)
        views = self._views[key] = room.states(self._there[key])
        found = {**self.optimizer.state[parameter], **views}
        names = [*self._orders[key], *(name for name in found if name not in self._orders[key])]
        self.optimizer.state[parameter] = {name: found[name] for name in names}

    def _leave(self, parameter: torch.Tensor) -> None:
        """Begin to write the states of `parameter`, which it does not have from here on."""
        optimizer = self.optimizer
        states = optimizer.state.get(parameter, {})
        large = {name: value for name, value in states.items() if self._is_large(value)}
        if not large:
            return
        key, room = id(parameter), self._room(parameter, large)
        if key not in self._there:
            self._there[key] = self._memory(room, parameter)
        memory, views = self._there[key], self._views.pop(key, {})
        for name, there in room.states(memory).items():
            if views.get(name) is not large[name]:  # it is new, or the step made another one
                there.copy_(large[name].detach())
        self._moving[key] = room.engine.backend.copy(memory, room.buffer, "out", after=[])
        self._written.append(key)
        small = {name: value for name, value in states.items() if name not in large}
        self._orders[key] = list(states)
        if key in optimizer._shared:  # whoever else has these keeps them
            optimizer._shared.discard(key)
            small = copied(small, device="cpu")
        optimizer.state[parameter] = small

    def _finish_writing(self, most: int) -> None:
        """Wait until at most so many are being written, and free the memory of the others."""
        while len(self._written) > most:
            key = self._written[0]
            self._wait(key)
            self._written.popleft()
            if key in self._there and key not in self._written:
                del self._there[key]
                if (whole := self._whole.pop(key, None)) is not None:
                    self._spare.append(whole)

    def _wait(self, key: int) -> None:
        """Let the copy of these states end."""
        if (event := self._moving.get(key)) is None:
            return
        engine = self._rooms[key].engine
        engine.backend.synchronize(event)
        if (memory := self._there.get(key)) is not None:
            engine.used_by_host(memory)
        error = event.error()
        del self._moving[key]
        if error is not None:
            raise RuntimeUnavailable(
                f"{self._below.title}: the disk failed with {type(error).__name__}: {error}; load the last "
                "checkpoint, with states on another disk or tier"
            ) from error

    # -------------------------------------------------------------------------------------------------------- rooms

    def _is_large(self, value: Any) -> bool:
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return is_plain and value.nbytes >= self._least_bytes

    def _room_of(self, key: int) -> _Room | None:
        """Where these states are; in a simulation a room of its engine, for the real ones are the caller's states."""
        room = self._rooms.get(key)
        if room is not None and simulating() and room.engine is not self._engine():
            room = self._rooms[key] = self._new_room(room.likes)
        return room

    def _room(self, parameter: torch.Tensor, large: dict[str, torch.Tensor]) -> _Room:
        room = self._room_of(id(parameter))
        likes = {key: torch.empty_like(value, device="meta") for key, value in large.items()}
        if room is not None:
            if {key: _kind(like) for key, like in room.likes.items()} == {k: _kind(like) for k, like in likes.items()}:
                return room
            self._rooms.pop(id(parameter)).free()
            for known in (self._there, self._views, self._whole):
                known.pop(id(parameter), None)
        room = self._rooms[id(parameter)] = self._new_room(likes)
        return room

    def _new_room(self, likes: dict[str, torch.Tensor]) -> _Room:
        engine = self._engine()
        nbytes = sum(_in_pages(like.nbytes) for like in likes.values())
        buffer = engine.backend.allocate(nbytes, "disk")
        if buffer is None:
            raise self._below.full(nbytes)
        engine.count_live("disk", buffer.nbytes)
        return _Room(engine, buffer, likes)

    def _engine(self) -> Engine:
        return runtime_for(self._runtime).engine(torch.empty(0))

    def _memory(self, room: _Room, parameter: torch.Tensor) -> torch.Tensor:
        nbytes = room.buffer.nbytes
        if device_type(parameter) != "cpu":
            return self._below.room(nbytes, parameter, "auto")
        spares = [self._spare] if simulating() else [self._spare, self._kept]
        fit = min((each for spare in spares for each in spare if len(each) >= nbytes), key=len, default=None)
        if fit is None:
            for spare in spares:
                del spare[:1]  # too small: with the new one there are no more than before
            fit = torch.empty(nbytes, dtype=torch.uint8) if simulating() else page_aligned_memory(nbytes)
        else:
            for spare in spares:
                spare[:] = [each for each in spare if each is not fit]
        self._whole[id(parameter)] = fit
        return fit[:nbytes]


def _kind(like: torch.Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return like.dtype, like.shape, like.stride()


def _free_all(rooms: dict[int, _Room]) -> None:
    for room in rooms.values():
        room.free()


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
