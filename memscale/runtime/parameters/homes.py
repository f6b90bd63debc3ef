"""Parameters that live on another tier: on the device while a region runs, and again while its backward does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence

import torch

from memscale.core import version
from memscale.runtime.backends.protocol import Event
from memscale.runtime.engine.ahead import MOST_HINTS, Ahead
from memscale.runtime.engine.engine import Engine
from memscale.runtime.engine.entry import Layout
from memscale.runtime.engine.loader import State
from memscale.runtime.parameters.gradients import Gradients
from memscale.runtime.parameters.home import NEVER, Group, Home, Saved, Visit, home_of, is_used
from memscale.runtime.parameters.mapped import MappedTensors, shaped
from memscale.runtime.parameters.movable import is_movable


class Homes:
    """The parameters that one engine moves.

    Args:
        engine: what copies, and whose passes are followed.
        at_home: where each home is noted, by the storage of its parameter.
    """

    def __init__(self, engine: Engine, at_home: dict[int, Home]) -> None:
        self.engine = engine
        self._memory = self.new_memory()
        self.gradients = Gradients(engine, self._memory)
        self._at_home = at_home
        self._loader = engine.new_loader()
        self._before: dict[Group, Group] = {}  # the order of the forward, backwards
        self._backward: Ahead[Group] = Ahead(engine.depth, guess=self._before.get)
        self._forward: Ahead[Group] = Ahead(engine.depth, repeats=False)
        self._last: Group | None = None
        self._went_back: set[Group] = set()
        self._sequence = 0
        self._homes: weakref.WeakValueDictionary[int, Home] = weakref.WeakValueDictionary()
        self._reading: dict[Home, Event] = {}
        self._awaited: set[Home] = set()  # on their way for a region that is expected to run soon in this forward
        engine.followers.add(self)

    def new_memory(self) -> MappedTensors:
        """Memory of the engine's tiers, as CPU tensors."""
        return MappedTensors(self.engine)

    def is_movable(self, parameter: torch.Tensor) -> bool:
        return is_movable(parameter)

    # ---------------------------------------------------------------------------------------------------- placing

    def place(self, parameter: torch.Tensor, tier: str, like: torch.Tensor) -> Home | None:
        """Give `parameter` a home on `tier`, or the next below with room; `None` where it has to stay.

        Its bytes are equal afterwards, and its version counter is the same. It stays where something else refers to
        its memory, which moving it would not free, and where no tier has room.
        """
        engine = self.engine
        # The parameter is used after the inference mode that it may be placed in, and would be no parameter then.
        with engine.lock, torch.inference_mode(False), torch.no_grad():
            if (home := home_of(parameter, self._at_home)) is not None:  # another thread was first
                return home
            if not self.is_movable(parameter):
                return None
            found = self._memory.take(parameter.nbytes, tier)
            if found is None:
                engine.warn_of(parameter.nbytes)
                return None
            mapped, contents = found
            data = shaped(contents, parameter)
            data.copy_(parameter)
            gradient = None if parameter.grad is None else parameter.grad.to(data.device)
            like = like.new_empty(0, dtype=torch.uint8)
            home = mapped.home = Home(self, parameter, tier, mapped.buffer, like, data)
            key = data.untyped_storage()._cdata
            # At once: another storage may get the address next.
            weakref.finalize(data.untyped_storage(), self._at_home.pop, key, None).atexit = False
            self._homes[home.number] = self._at_home[key] = home
            # Last, and in one go: what was interrupted on the way has left the parameter as it was.
            parameter.grad, parameter.data, parameter.grad = None, data, gradient
            return home

    def end(self, home: Home) -> list[Event]:
        """Forget a home that nothing refers to any more; what may still read its bytes. The engine's lock is held."""
        self._let_go(home)
        home.buffer = None
        self._homes.pop(home.number, None)  # what was learned of its region would have it loaded ahead
        self._awaited.discard(home)
        reading = self._reading.pop(home, None)  # the compute stream has waited for it, this thread has not
        return [] if reading is None else [reading]

    # --------------------------------------------------------------------------------------- to the device and back

    def enter(self, visit: Visit, homes: Sequence[Home]) -> list[torch.Tensor]:
        """The parameters on the device, for a region that runs now, until ``exit(visit)``.

        That must follow, also where this raises.
        """
        engine, group = self.engine, tuple([home.number for home in homes])
        with engine.lock:
            in_backward = engine.follow_backward()  # a region that runs again
            visit.is_first = any(home.loaded == NEVER for home in homes)
            self._trim(visit)
            if in_backward:
                self._trim_backward(group)
            is_next = not in_backward and self._begin(group)
            try:
                for home in homes:
                    home.group = group
                    # What an earlier forward left there may be out of date in ways that no version counter sees.
                    self._ask(home, 0.0, anew=not (in_backward or home in self._awaited))
                    self._awaited.discard(home)
            except BaseException:  # out of memory, say, with half of them there
                for home in homes:
                    self._let_go(home)
                raise
            visit.begin(homes)
            if in_backward:
                self.asked_in_backward(group)
            elif is_next:
                self._load_forward()
            # Detached, since a region may change what it is given in place, which PyTorch refuses for a view. As the
            # parameter, none of inference mode: PyTorch chooses kernels by what such a tensor's views would not say.
            with torch.inference_mode(False):
                tensors = [home.layout.of(self._loader.arrived(home)).detach() for home in homes]
            for home, tensor in zip(homes, tensors, strict=True):
                visit.loaded[tensor.untyped_storage()._cdata] = home
            engine.transfers.pump()
        engine.go_on()
        return tensors

    def lag(self, sequence: int) -> int:
        """The place in the order of backward for a node that waits for a gradient: when the region before is through.

        `sequence` is that of the present region's own first node, by which autograd orders what is ready to run.
        """
        before, self._sequence = self._sequence, sequence
        return min(before, sequence)

    def exit(self, visit: Visit, *, failed: bool = False) -> None:
        """The region has run. Its parameters leave the device, unless backward asks for them first of all."""
        in_backward = torch._C._current_graph_task_id() != -1
        with self.engine.lock:
            # In one step, so that none of them passes for used, and so for up to date, whatever stops this.
            visit.end()
            homes = visit.homes
            group = homes[0].group if homes else ()
            stay = (
                torch.is_grad_enabled() and not in_backward and self.engine.depth > 0 and self._backward.first == group
            )
            over = [home for home in homes if not is_used(home)]
            for home in over:
                self._bring_changes(home)
            for home in [] if stay and not failed else over:
                self._let_go(home)
            if failed:  # the forward, if it was one, is over: the next one may begin with this very region
                self._forward.begin()
                self.forget_awaited()
            # The caller may change a parameter from here on, also in ways that no version counter sees.
            self._finish_reading(homes)
            if not failed:
                self._trim(visit)
            self.engine.transfers.pump()
        self.engine.go_on()

    def _trim(self, visit: Visit) -> None:
        """Around the first run of a region, give the device back what its allocator only caches.

        What parameters left there when they moved home is in pieces that nothing larger fits in: 12.6 GiB of a Llama
        8B, next to which its loss takes 13.7 GiB more. And the pieces of one region end up next to an activation that
        stays, unless the next region gets its own. Kept apart from the allocator, as a slab of slots, the loads would
        cost more: the loss could not use them (19.4 GiB reserved in place of 18.4, at a peak of 16.4).
        """
        if visit.is_first:
            self.engine.backend.trim()

    def _trim_backward(self, group: Group) -> None:
        """The same before the first backward of a region, if that of another one took more of the device.

        Then what is cached is in pieces that do not fit: else a Llama 8B with a tiled head reserves 10.7 GiB at a peak
        of 8.5. Where the loss has left enough for all regions, as whole logits do, it is not to go.
        """
        if group not in self._went_back:
            self._went_back.add(group)
            self.engine.backend.trim(if_grown=True)

    def _bring_changes(self, home: Home) -> None:
        """A region may change its parameters in place, as an embedding with `max_norm` does."""
        parameter, base = home.parameter(), home.base
        if parameter is None or base is None or (changes := home.changes()) == 0:
            return
        before = version(parameter)
        with torch.no_grad():
            parameter.copy_(home.layout.of(base))
        torch._C._autograd._unsafe_set_version_counter((parameter,), (before + changes,))
        home.loaded = (before + changes, version(base))

    # ------------------------------------------------------------------------------- what autograd keeps and sends

    def save(self, home: Home, tensor: torch.Tensor | None = None) -> Saved:
        """What autograd keeps of the parameter, which is on the device, or of `tensor`, a view of it there."""
        with self.engine.lock:
            self.engine.transfers.pump()
            return Saved(home, home.layout if tensor is None else Layout.from_tensor(tensor))

    def fetch(self, saved: Saved) -> torch.Tensor:
        """What `save` was given, on the device.

        Raises:
            CorrectnessError: the parameter was changed in place since.
        """
        home, engine = saved.home, self.engine
        with engine.lock:
            in_backward = engine.follow_backward()  # first of all: a backward that raises is one too
            saved.check()
            if in_backward:
                self._trim_backward(home.group)
            if home.base is None:
                self._load(home)
            if in_backward:
                self.asked_in_backward(home.group)
            tensor = saved.layout.of(self._loader.arrived(home))
            if in_backward:
                home.asked.add(id(saved))
            if not in_backward or home.is_asked():
                self._let_go(home)
            engine.transfers.pump()
        return engine.hand_out(tensor)

    def drop(self, home: Home) -> None:
        """Called when a `Saved` of `home` goes. May happen at any moment, inside the engine's own code too."""
        self.engine.finalized.add(home, self._close)

    def _close(self, home: Home) -> None:
        if home.is_asked():
            self._let_go(home)

    def send(self, home: Home, gradient: torch.Tensor) -> torch.Tensor:
        return self.gradients.send(home.parameter(), home.tier, gradient)

    def received(self, gradient: torch.Tensor) -> None:
        self.gradients.received(gradient)

    # ------------------------------------------------------------------------------------------------ loading ahead

    def _ask(self, home: Home, seconds: float, *, anew: bool = False) -> None:
        now = home.version()
        if home.state is State.BACK and (anew or home.loaded[0] != now):  # loaded ahead, and changed since
            self._let_go(home)
        if home.state is State.AWAY:
            self._load(home, seconds)

    def _load(self, home: Home, seconds: float = 0.0) -> None:
        started = functools.partial(self._copied, home)
        self._loader.load(home, started=started, seconds=seconds, group=home.group)

    def _let_go(self, home: Home) -> None:
        if not is_used(home):
            self._loader.let_go(home)

    def _begin(self, group: Group) -> bool:
        """A region runs, possibly the first of a forward; whether it is another one than the last."""
        if self._last is not None and self._last != group:
            if len(self._before) >= MOST_HINTS:
                self._before.clear()
            self._before[group] = self._last
        self._last = group
        is_next = self._forward.asked(group, at=self.engine.backend.record())
        # One that runs twice in a row may as well begin a new forward, after one that ended right behind it.
        if not is_next or self._forward.first == group:
            self.forget_awaited()
        return is_next

    def forget_awaited(self) -> None:
        """A forward is over: what it asked for and did not use may be changed before anybody asks for it again."""
        for home in self._awaited:
            self._let_go(home)
        self._finish_reading(self._awaited)
        self._awaited.clear()

    def _load_forward(self) -> None:
        for later, seconds in self._forward.upcoming():
            self._ask_all(later, seconds, saved=False)

    def asked_in_backward(self, group: Group) -> None:
        """Backward asks for one of `group`, and soon for the rest of it, and for the groups that come after."""
        if self._backward.asked(group, at=self.engine.backend.record()):
            self._ask_all(group, 0.0, saved=True)
        for later, seconds in self._backward.upcoming():
            self._ask_all(later, seconds, saved=True)

    def _ask_all(self, group: Group, seconds: float, *, saved: bool) -> None:
        for number in group:
            home = self._homes.get(number)
            if home is None or (saved and not home.alive):
                continue
            try:
                self._ask(home, seconds, anew=not (saved or home in self._awaited))
            except torch.OutOfMemoryError:  # it may well fit once it is needed
                return
            if not saved:
                self._awaited.add(home)

    def _copied(self, home: Home, event: Event) -> None:
        # Neither order is told: with fewer regions ahead than a simulation has, its slots are others, and what the loss
        # needs next to them may take a segment more.
        self._reading[home] = event

    # ------------------------------------------------------------------------------- what a `Follower` is told

    def begin_backward(self) -> None:
        self._come_home()  # after a backward that an exception ended
        self._backward.begin()
        self.forget_awaited()

    def end_backward(self) -> None:
        """See `Follower.end_backward`. What was loaded and not asked for goes; the CPU may change any parameter."""
        for home in list(self._loader.back):
            assert isinstance(home, Home)
            self._let_go(home)
        self._come_home()

    def settle(self) -> None:
        self.forget_awaited()
        self._come_home()

    def _come_home(self) -> None:
        self.gradients.arrive()
        self._finish_reading(list(self._reading))

    def _finish_reading(self, homes: Iterable[Home]) -> None:
        """Wait until the CPU may change these parameters."""
        for home in homes:
            if (event := self._reading.get(home)) is not None:
                self.engine.transfers.synchronize(event)
                del self._reading[home]
