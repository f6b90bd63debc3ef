"""Parameters that live on another tier: on the device while a region runs, and again while its backward does.

A parameter at *home* is an ordinary CPU tensor, the same `nn.Parameter` object as before over memory of another tier.
An optimizer, a `state_dict` or a printout work on it as on any other. Its bytes on the device are those of an `Entry`
that is always away and may be loaded any number of times; its gradient goes where it lives.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from memscale._errors import TransformError
from memscale._simulating import simulating
from memscale.runtime._ahead import MOST_HINTS, Ahead
from memscale.runtime._entry import Entry, Handle, Layout, Record, State, changed_error, version
from memscale.runtime._movable import is_movable
from memscale.runtime._protocol import Event
from memscale.runtime._rooms import shaped

if TYPE_CHECKING:
    from memscale.runtime._engine import Engine

# What a region asks for at once: the numbers of its homes.
Group = tuple[int, ...]
_numbers = itertools.count()
# By the storage of the parameter. Not the engines' own: a parameter has one home, whichever runtime's.
_at_home: dict[int, Home] = {}


class Home:
    """Where a parameter lives."""

    __slots__ = ("__weakref__", "address", "entry", "group", "layout", "loaded", "number", "parameter", "was_compared")

    def __init__(self, parameter: torch.Tensor, entry: Entry, layout: Layout, data: torch.Tensor) -> None:
        self.number = next(_numbers)
        self.parameter = weakref.ref(parameter)
        self.entry = entry
        self.layout = layout
        self.address = data.untyped_storage().data_ptr()
        self.group: Group = (self.number,)
        self.was_compared = False
        self.loaded = (-1, -1)  # the versions of the parameter and of its bytes on the device, when these were loaded

    @property
    def device(self) -> torch.device:
        """The device that it comes to."""
        assert self.entry.like is not None
        return self.entry.like.device

    def version(self) -> int:
        """The version counter of the parameter."""
        parameter = self.parameter()
        return -1 if parameter is None else version(parameter)

    def forget_changes(self) -> None:
        """Leave the parameter as it was before a region changed it on the device."""
        assert self.entry.base is not None
        self.loaded = (self.loaded[0], version(self.entry.base))


class HomeRecord(Record):
    """A parameter, or a view of one, that autograd saved while it was on the device."""

    __slots__ = ("_contents", "_home")

    def __init__(self, home: Home, contents: torch.Tensor, layout: Layout, version: int) -> None:
        super().__init__(contents, version)
        self.alias = None
        self.layout = layout
        self._home = home
        self._contents = contents  # autograd would keep the parameter's memory too, should it get another one

    def check(self) -> None:
        """See `Record.check`."""
        assert self.layout is not None
        if self._home.parameter() is not None and (now := self._home.version()) != self.version:
            raise changed_error(self.layout.dtype, self.layout.size, now, self.version)


def home_of(parameter: torch.Tensor) -> Home | None:
    """Where `parameter` lives, if it is not where it was made."""
    storage = parameter.untyped_storage()
    home = _registry().get(storage._cdata)
    if home is None or home.parameter() is not parameter:
        return None
    # `share_memory_()` gives a storage other memory, and leaves it the same object.
    return home if storage.data_ptr() == home.address else None


class Visit:
    """One run of a region: what it has on the device, also by the storage there."""

    __slots__ = ("homes", "loaded")

    def __init__(self) -> None:
        self.homes: Sequence[Home] = ()
        self.loaded: dict[int, Home] = {}


class Homes:
    """The parameters that one engine moves."""

    def __init__(self, engine: Engine) -> None:
        # Weakly: what a dropped runtime holds, a file among it, must not wait for the garbage collector.
        self._owner = weakref.ref(engine)
        self._before: dict[Group, Group] = {}  # the order of the forward, backwards
        self.ahead: Ahead[Group] = Ahead(engine.depth, guess=self._before.get)
        self._forward: Ahead[Group] = Ahead(engine.depth, repeats=False)
        self._last: Group | None = None
        self._sequence = 0
        self._homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
        self._visits: dict[Visit, None] = {}  # of the regions that run now
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
        with engine.lock:
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
            with torch.no_grad():
                data.copy_(parameter)
                gradient = None if parameter.grad is None else parameter.grad.to(data.device)
            entry = Entry(engine, data.untyped_storage()._cdata, tier, parameter.nbytes)
            entry.state, entry.buffer, entry.like = State.AWAY, room.buffer, like.new_empty(0, dtype=torch.uint8)
            layout = Layout(parameter.dtype, parameter.size(), parameter.stride(), 0, False, False)
            home = entry.home = room.home = Home(parameter, entry, layout, data)
            registry = _registry()
            # At once: another storage may get the address next.
            weakref.finalize(data.untyped_storage(), registry.pop, entry.key, None).atexit = False
            self._homes[home.number] = registry[entry.key] = home
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
            visit.homes = homes
            self._visits[visit] = None
            if in_backward:
                self._note_backward(group)
            elif is_next:
                self._load_forward()
            # Detached, since a region may change what it is given in place, which PyTorch refuses for a view.
            tensors = [home.layout.of(engine.arrived(home.entry)).detach() for home in homes]
            for home, tensor in zip(homes, tensors, strict=True):
                visit.loaded[tensor.untyped_storage()._cdata] = home
        return tensors

    def lag(self, sequence: int) -> int:
        """The place in the order of backward for a node that waits for a gradient: when the region before is through.

        `sequence` is that of the present region's own first node, by which autograd orders what is ready to run.
        """
        before, self._sequence = self._sequence, sequence
        return min(before, sequence)

    def is_used(self, home: Home | None) -> bool:
        """Whether a running region has it on the device. The engine's lock is held."""
        return home is not None and any(home in visit.homes for visit in self._visits)

    def leave(self, visit: Visit, *, failed: bool = False) -> None:
        """The region has run. Its parameters leave the device, unless backward asks for them first of all.

        Raises:
            TransformError: it has changed one of them in a way that would be lost.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        with self._engine.lock:
            # In one step, so that none of them passes for used, and so for up to date, whatever stops this.
            self._visits.pop(visit, None)
            homes = visit.homes
            group = homes[0].group if homes else ()
            stay = torch.is_grad_enabled() and not in_backward and self._engine.depth > 0 and self.ahead.first == group
            lost = [] if failed else [home for home in homes if self._was_changed_unseen(home)]
            over = [home for home in homes if not self.is_used(home)]
            for home in over:
                self._bring_changes(home)
            for home in [] if stay and not failed else over:
                self._engine.let_go(home.entry)
            if failed:  # the forward, if it was one, is over: the next one may begin with this very region
                self._forward.begin()
                self._forget_awaited()
            # The caller may change a parameter from here on, also in ways that no version counter sees.
            self._finish_reading(homes)
        self._engine.leftovers.collect()
        for home in lost:
            raise TransformError(
                f"the region of offload(what='params') changes a parameter, {list(home.layout.size)}, through .data "
                "or another view that autograd does not know, and that is lost; make the change under torch.no_grad()"
            )

    def handle_on(self, tensor: torch.Tensor) -> Handle | None:
        """A handle on `tensor` if it is a parameter on the device, or a view of one. The engine's lock is held."""
        key = tensor.untyped_storage()._cdata
        home = next((visit.loaded[key] for visit in self._visits if key in visit.loaded), None)
        if home is None or home.parameter() is None:
            return None
        layout = Layout(
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return self._new_handle(home, layout)

    def handle(self, home: Home) -> Handle:
        """A handle on a parameter that is on the device. The engine's lock is held."""
        return self._new_handle(home, home.layout)

    def _new_handle(self, home: Home, layout: Layout) -> Handle:
        entry, parameter = home.entry, home.parameter()
        assert entry.base is not None
        assert parameter is not None
        changes = version(entry.base) - home.loaded[1]  # which come home when the region leaves
        record = HomeRecord(home, parameter.detach(), layout, version(parameter) + changes)
        return Handle(entry, record)

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

    def _was_changed_unseen(self, home: Home) -> bool:
        """Whether the region has changed a parameter where no version counter sees it. Asked on its first run only."""
        parameter, base = home.parameter(), home.entry.base
        if home.was_compared or parameter is None or base is None or simulating() is not None:
            return False
        home.was_compared = True
        if version(base) != home.loaded[1]:  # a change that is seen comes home
            return False
        with torch.no_grad():
            there, here = home.layout.of(base).cpu(), parameter.detach()
            return not (torch.equal(there, here) or bool(((there == here) | (there.isnan() & here.isnan())).all()))

    # ------------------------------------------------------------------------------------------------ loading ahead

    def _ask(self, home: Home, seconds: float, *, anew: bool = False) -> None:
        entry, now = home.entry, home.version()
        if entry.state is State.BACK and (anew or home.loaded[0] != now):  # loaded ahead, and changed since
            self._engine.let_go(entry)
        if entry.state is State.AWAY:
            self._engine.load(entry, seconds=seconds)

    def load_ahead(self, home: Home) -> None:
        """Backward asks for `home`, and soon for the rest of its group, and for the groups that come after."""
        self._note_backward(home.group)

    def _begin(self, group: Group) -> bool:
        """A region runs, possibly the first of a forward; whether it is another one than the last."""
        if self._last is not None and self._last != group:
            if len(self._before) >= MOST_HINTS:
                self._before.clear()
            self._before[group] = self._last
        self._last = group
        is_next = self._forward.asked(group, at=self._engine.backend.record("compute"))
        # One that runs twice in a row may as well begin a new forward, after one that ended right behind it.
        if not is_next or self._forward.first == group:
            self._forget_awaited()
        return is_next

    def _forget_awaited(self) -> None:
        """A forward is over: what it asked for and did not use may be changed before anybody asks for it again."""
        for home in self._awaited:
            self._engine.let_go(home.entry)
        self._finish_reading(self._awaited)
        self._awaited.clear()

    def _load_forward(self) -> None:
        for later, seconds in self._forward.upcoming():
            self._ask_all(later, seconds, saved=False)

    def _note_backward(self, group: Group) -> None:
        if self.ahead.asked(group, at=self._engine.backend.record("compute")):
            self._ask_all(group, 0.0, saved=True)
        for later, seconds in self.ahead.upcoming():
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
        (self.ahead if in_backward else self._forward).copied(event)
        self._reading[home] = event

    def begin_backward(self) -> None:
        """The forward is over. The engine's lock is held."""
        self.ahead.begin()
        self._forget_awaited()

    def end_backward(self) -> None:
        """The CPU may change any parameter from here on. The engine's lock is held."""
        self._finish_reading(list(self._reading))

    def _finish_reading(self, homes: Iterable[Home]) -> None:
        """Wait until the CPU may change these parameters."""
        for home in homes:
            if (event := self._reading.get(home)) is not None:
                self._engine.backend.synchronize(event)
                del self._reading[home]


def _registry() -> dict[int, Home]:
    step = simulating()
    return _at_home if step is None else step.homes
