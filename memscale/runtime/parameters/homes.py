"""Parameters that live on another tier: on the device while a region runs, and again while its backward does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from memscale.core.versions import version
from memscale.runtime.backends.protocol import Event
from memscale.runtime.engine.ahead import MOST_HINTS, Ahead
from memscale.runtime.engine.entry import Entry, Layout, State
from memscale.runtime.parameters.home import Group, Home, Visit, home_of, is_used, registry
from memscale.runtime.parameters.movable import is_movable
from memscale.runtime.parameters.rooms import shaped

if TYPE_CHECKING:
    from memscale.runtime.engine.engine import Engine


class Homes:
    """The parameters that one engine moves."""

    def __init__(self, engine: Engine) -> None:
        # Weakly: what a dropped runtime holds, a file among it, must not wait for the garbage collector.
        self._owner = weakref.ref(engine)
        self._before: dict[Group, Group] = {}  # the order of the forward, backwards
        self._backward: Ahead[Group] = Ahead(engine.depth, guess=self._before.get)
        self._forward: Ahead[Group] = Ahead(engine.depth, repeats=False)
        self._last: Group | None = None
        self._sequence = 0
        self._homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
        self._reading: dict[Home, Event] = {}
        self._awaited: set[Home] = set()  # on their way for a region that is expected to run soon in this forward

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None, "its engine has them"
        return engine

    # ---------------------------------------------------------------------------------------------------- placing

    def place(self, parameter: torch.Tensor, tier: str, like: torch.Tensor) -> Home | None:
        """Give `parameter` a home on `tier`, or the next below with room; `None` where it has to stay.

        Its bytes are equal afterwards, and its version counter is the same. It stays where something else refers to
        its memory, which moving it would not free, and where no tier has room.
        """
        engine = self._engine
        # The parameter is used after the inference mode that it may be placed in, and would be no parameter then.
        with engine.lock, torch.inference_mode(False), torch.no_grad():
            if (home := home_of(parameter)) is not None:  # since the caller looked: another thread was first
                return home
            if not is_movable(parameter):
                return None
            found = engine.rooms.take(parameter.nbytes, tier)
            if found is None:
                engine.warn_of(parameter.nbytes)
                return None
            room, contents = found
            data = shaped(contents, parameter)
            data.copy_(parameter)
            gradient = None if parameter.grad is None else parameter.grad.to(data.device)
            entry = Entry(engine, data.untyped_storage()._cdata, tier, parameter.nbytes)
            entry.state, entry.buffer, entry.like = State.AWAY, room.buffer, like.new_empty(0, dtype=torch.uint8)
            layout = Layout(parameter.dtype, parameter.size(), parameter.stride(), 0, False, False)
            home = entry.home = room.home = Home(parameter, entry, layout, data)
            homes = registry()
            # At once: another storage may get the address next.
            weakref.finalize(data.untyped_storage(), homes.pop, entry.key, None).atexit = False
            self._homes[home.number] = homes[entry.key] = home
            # Last, and in one go: what was interrupted on the way has left the parameter as it was.
            parameter.grad, parameter.data, parameter.grad = None, data, gradient
            return home

    def end(self, home: Home) -> list[Event]:
        """Forget a home that nothing refers to any more; what may still read its bytes. The engine's lock is held."""
        entry = home.entry
        self._engine.let_go(entry)
        entry.home = entry.buffer = None
        self._awaited.discard(home)
        reading = self._reading.pop(home, None)  # the compute stream has waited for it, this thread has not
        return [] if reading is None else [reading]

    # --------------------------------------------------------------------------------------- to the device and back

    def enter(self, visit: Visit, homes: Sequence[Home]) -> list[torch.Tensor]:
        """The parameters on the device, for a region that runs now, until ``leave(visit)``.

        That must follow, also where this raises.
        """
        engine, group = self._engine, tuple([home.number for home in homes])
        with engine.lock:
            in_backward = engine.follow_backward()  # a region that runs again
            is_next = not in_backward and self._begin(group)
            try:
                for home in homes:
                    home.group = group
                    # What an earlier forward left there may be out of date in ways that no version counter sees.
                    self._ask(home, 0.0, anew=not (in_backward or home in self._awaited))
                    self._awaited.discard(home)
            except BaseException:  # out of memory, say, with half of them there
                for home in homes:
                    engine.let_go(home.entry)
                raise
            visit.begin(homes)
            if in_backward:
                self.asked_in_backward(group)
            elif is_next:
                self._load_forward()
            # Detached, since a region may change what it is given in place, which PyTorch refuses for a view.
            tensors = [home.layout.of(engine.arrived(home.entry)).detach() for home in homes]
            for home, tensor in zip(homes, tensors, strict=True):
                visit.loaded[tensor.untyped_storage()._cdata] = home
            engine.copies.pump()
        engine.go_on()
        return tensors

    def lag(self, sequence: int) -> int:
        """The place in the order of backward for a node that waits for a gradient: when the region before is through.

        `sequence` is that of the present region's own first node, by which autograd orders what is ready to run.
        """
        before, self._sequence = self._sequence, sequence
        return min(before, sequence)

    def leave(self, visit: Visit, *, failed: bool = False) -> None:
        """The region has run. Its parameters leave the device, unless backward asks for them first of all."""
        in_backward = torch._C._current_graph_task_id() != -1
        with self._engine.lock:
            # In one step, so that none of them passes for used, and so for up to date, whatever stops this.
            visit.end()
            homes = visit.homes
            group = homes[0].group if homes else ()
            stay = (
                torch.is_grad_enabled() and not in_backward and self._engine.depth > 0 and self._backward.first == group
            )
            over = [home for home in homes if not is_used(home)]
            for home in over:
                self._bring_changes(home)
            for home in [] if stay and not failed else over:
                self._engine.let_go(home.entry)
            if failed:  # the forward, if it was one, is over: the next one may begin with this very region
                self._forward.begin()
                self.forget_awaited()
            # The caller may change a parameter from here on, also in ways that no version counter sees.
            self._finish_reading(homes)
            self._engine.copies.pump()
        self._engine.go_on()

    def _bring_changes(self, home: Home) -> None:
        """A region may change its parameters in place, as an embedding with `max_norm` does."""
        parameter, base = home.parameter(), home.entry.base
        if parameter is None or base is None or (changes := version(base) - home.loaded[1]) == 0:
            return
        before = version(parameter)
        with torch.no_grad():
            parameter.copy_(home.layout.of(base))
        torch._C._autograd._unsafe_set_version_counter((parameter,), (before + changes,))
        home.loaded = (before + changes, version(base))

    # ------------------------------------------------------------------------------------------------ loading ahead

    def _ask(self, home: Home, seconds: float, *, anew: bool = False) -> None:
        entry, now = home.entry, home.version()
        if entry.state is State.BACK and (anew or home.loaded[0] != now):  # loaded ahead, and changed since
            self._engine.let_go(entry)
        if entry.state is State.AWAY:
            self._engine.load(entry, seconds=seconds)

    def _begin(self, group: Group) -> bool:
        """A region runs, possibly the first of a forward; whether it is another one than the last."""
        if self._last is not None and self._last != group:
            if len(self._before) >= MOST_HINTS:
                self._before.clear()
            self._before[group] = self._last
        self._last = group
        is_next = self._forward.asked(group, at=self._engine.backend.record())
        # One that runs twice in a row may as well begin a new forward, after one that ended right behind it.
        if not is_next or self._forward.first == group:
            self.forget_awaited()
        return is_next

    def forget_awaited(self) -> None:
        """A forward is over: what it asked for and did not use may be changed before anybody asks for it again."""
        for home in self._awaited:
            self._engine.let_go(home.entry)
        self._finish_reading(self._awaited)
        self._awaited.clear()

    def _load_forward(self) -> None:
        for later, seconds in self._forward.upcoming():
            self._ask_all(later, seconds, saved=False)

    def asked_in_backward(self, group: Group) -> None:
        """Backward asks for one of `group`, and soon for the rest of it, and for the groups that come after."""
        if self._backward.asked(group, at=self._engine.backend.record()):
            self._ask_all(group, 0.0, saved=True)
        for later, seconds in self._backward.upcoming():
            self._ask_all(later, seconds, saved=True)

    def _ask_all(self, group: Group, seconds: float, *, saved: bool) -> None:
        for number in group:
            home = self._homes.get(number)
            if home is None or (saved and not home.entry.live()):
                continue
            try:
                self._ask(home, seconds, anew=not (saved or home in self._awaited))
            except torch.OutOfMemoryError:  # it may well fit once it is needed
                return
            if not saved:
                self._awaited.add(home)

    def loading(self, home: Home, base: torch.Tensor) -> Callable[[Event], None]:
        """Its bytes are asked for anew, in `base`; the result is to be called when their copy has started."""
        home.loaded = (home.version(), version(base))
        return functools.partial(self._copied, home)

    def _copied(self, home: Home, event: Event) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        (self._backward if in_backward else self._forward).copied(event)
        self._reading[home] = event

    def begin_backward(self) -> None:
        """The forward is over. The engine's lock is held."""
        self._backward.begin()
        self.forget_awaited()

    def end_backward(self) -> None:
        """The CPU may change any parameter from here on. The engine's lock is held."""
        self._finish_reading(list(self._reading))

    def _finish_reading(self, homes: Iterable[Home]) -> None:
        """Wait until the CPU may change these parameters."""
        for home in homes:
            if (event := self._reading.get(home)) is not None:
                self._engine.copies.synchronize(event)
                del self._reading[home]
