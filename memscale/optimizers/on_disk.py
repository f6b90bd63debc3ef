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


class _Stored:
    """The large states of one parameter: on disk, and meanwhile in memory.

    Attributes:
        buffer: the room on disk, of `engine`.
        likes: by the state's name, a tensor without memory.
        order: the names of all states of the parameter, as the optimizer made them.
        memory: the bytes of the states, while these are in memory or on their way; part of `whole`, which can serve
            another parameter afterwards. None while the states are on disk alone.
        views: the states that the optimizer has over `memory`.
        moving: the copy that is under way.
    """

    # Slots, so that a search for the tensors of an optimizer does not find `likes`.
    __slots__ = ("buffer", "engine", "likes", "memory", "moving", "order", "views", "whole")

    def __init__(self, engine: Engine, buffer: Buffer, likes: dict[str, torch.Tensor]) -> None:
        self.engine, self.buffer, self.likes = engine, buffer, likes
        self.order: list[str] = []
        self.memory: torch.Tensor | None = None
        self.whole: torch.Tensor | None = None
        self.views: dict[str, torch.Tensor] = {}
        self.moving: Event | None = None

    def states(self) -> dict[str, torch.Tensor]:
        """The states that the bytes in memory are."""
        assert self.memory is not None, "it was taken before"
        found, start = {}, 0
        for key, like in self.likes.items():
            found[key] = laid_out(self.memory[start : start + like.nbytes], like)
            start += _in_pages(like.nbytes)
        return found

    def forget(self) -> None:
        """Leave the memory to those who have states over it."""
        self.memory = self.whole = None
        self.views = {}

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

    def __init__(
        self, optimizer: PartedOptimizer, inner: StepPart, *, runtime: Runtime | None, least_bytes: int, below: Below
    ) -> None:
        super().__init__(optimizer, inner)
        self._runtime, self._least_bytes, self._below = runtime, least_bytes, below
        self._parameters: dict[int, torch.Tensor] = {}
        self._stored: dict[int, _Stored] = {}  # by the id of the parameter
        self._written: deque[_Stored] = deque()  # being written, in turn
        self._spare: list[torch.Tensor] = []  # memory of this step that others can have
        self._kept: list[torch.Tensor] = []  # and of the step before
        self._last: int | None = None  # to have stepped in this step
        self._after: dict[int, int] = {}  # which parameter stepped after which
        weakref.finalize(self, _free_all, self._stored).atexit = False

    def attend(self, parameters: list[torch.Tensor]) -> None:
        self._below.check(parameters, self.optimizer)
        for stored in self._stored.values():  # of a step that an exception ended
            self._wait(stored)
        self._parameters = {id(parameter): parameter for parameter in parameters}
        for key in [key for key in self._stored if key not in self._parameters]:
            self._stored.pop(key).free()
        if not parameters:
            self._kept.clear()
        for parameter in parameters:
            if any(self._is_large(value) for value in self.optimizer.state.get(parameter, {}).values()):
                self._leave(parameter)
                self._finish_writing(AHEAD)
        self._end()

    def ask(self, parameters: list[torch.Tensor]) -> bool:
        return self.inner.ask(parameters)

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
        for stored in self._stored.values():  # read for a parameter that had no gradient this time
            self._wait(stored)
            stored.forget()
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
            for key in self._stored:
                self._arrive(self._parameters[key])
                if not simulating():
                    self._part(self._parameters[key])
            yield
        finally:
            for parameter, small in before.items():
                if small is not None:
                    state[parameter] = small
            for stored in self._stored.values():
                stored.forget()

    def _part(self, parameter: torch.Tensor) -> None:
        """Give the states of `parameter` storages of their own over the same memory: `torch.save` asks for that."""
        states = self.optimizer.state[parameter]
        for name, view in self._stored[id(parameter)].views.items():
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

    def _read(self, parameter: torch.Tensor) -> _Stored | None:
        """Begin to read the states of `parameter`, if they are on disk and not there."""
        stored = self._stored_of(id(parameter))
        if stored is not None and stored.memory is None:
            memory = self._take_memory(stored, parameter)
            stored.moving = stored.engine.backend.copy(stored.buffer, memory, "in", after=[])
        return stored

    def _arrive(self, parameter: torch.Tensor) -> None:
        """Give `parameter` its states."""
        if (stored := self._read(parameter)) is None:
            return
        self._wait(stored)
        stored.views = stored.states()
        found = {**self.optimizer.state[parameter], **stored.views}
        names = dict.fromkeys([*stored.order, *found])
        self.optimizer.state[parameter] = {name: found[name] for name in names}

    def _leave(self, parameter: torch.Tensor) -> None:
        """Begin to write the states of `parameter`, which it does not have from here on."""
        optimizer = self.optimizer
        states = optimizer.state.get(parameter, {})
        large = {name: value for name, value in states.items() if self._is_large(value)}
        if not large:
            return
        stored = self._stored_for(parameter, large)
        memory = self._take_memory(stored, parameter) if stored.memory is None else stored.memory
        for name, there in stored.states().items():
            if stored.views.get(name) is not large[name]:  # it is new, or the step made another one
                there.copy_(large[name].detach())
        stored.views = {}
        stored.moving = stored.engine.backend.copy(memory, stored.buffer, "out", after=[])
        self._written.append(stored)
        stored.order = list(states)
        small = {name: value for name, value in states.items() if name not in large}
        if id(parameter) in optimizer._shared:  # whoever else has these keeps them
            optimizer._shared.discard(id(parameter))
            small = copied(small, device="cpu")
        optimizer.state[parameter] = small

    def _finish_writing(self, most: int) -> None:
        """Wait until at most so many are being written, and free the memory of the others."""
        while len(self._written) > most:
            stored = self._written[0]
            self._wait(stored)
            self._written.popleft()
            if stored not in self._written:
                if stored.whole is not None:
                    self._spare.append(stored.whole)
                stored.forget()

    def _wait(self, stored: _Stored) -> None:
        """Let the copy of these states end."""
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

    # -------------------------------------------------------------------------------------------------------- rooms

    def _is_large(self, value: Any) -> bool:
        is_plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return is_plain and value.nbytes >= self._least_bytes

    def _stored_of(self, key: int) -> _Stored | None:
        """Where these states are; in a simulation room of its engine, for the real one has the caller's states."""
        stored = self._stored.get(key)
        if stored is not None and simulating() and stored.engine is not self._engine():
            order = stored.order
            stored = self._stored[key] = self._new_room(stored.likes)
            stored.order = order
        return stored

    def _stored_for(self, parameter: torch.Tensor, large: dict[str, torch.Tensor]) -> _Stored:
        """Room for states like these, which `parameter` has from here on."""
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
        return runtime_for(self._runtime).engine(torch.empty(0))

    def _take_memory(self, stored: _Stored, parameter: torch.Tensor) -> torch.Tensor:
        nbytes = stored.buffer.nbytes
        if device_type(parameter) != "cpu":
            stored.memory = self._below.room(nbytes, parameter, "auto")
            return stored.memory
        spares = [self._spare] if simulating() else [self._spare, self._kept]
        fit = min((each for spare in spares for each in spare if len(each) >= nbytes), key=len, default=None)
        for spare in spares:
            if fit is None:
                del spare[:1]  # too small: with the new one there are no more than before
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
