"""`HostParameters`: loads host parameters to the device while a region runs, and again for its backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence

import torch

from memscale.core import version
from memscale.runtime.backends.protocol import Event
from memscale.runtime.engine.entry import Layout
from memscale.runtime.engine.loader import LoadState
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.engine.prefetch import MOST_HINTS, Prefetch
from memscale.runtime.parameters.gradients import Gradients
from memscale.runtime.parameters.host_parameter import (
    NEVER,
    Group,
    HostParameter,
    Residency,
    Saved,
    host_parameter_of,
    is_used,
)
from memscale.runtime.parameters.mapped import MappedTensors, shaped
from memscale.runtime.parameters.movable import is_movable


class HostParameters:
    """Moves the host parameters of one engine.

    Args:
        engine: the engine that copies, and whose passes this object follows.
        by_storage: the table in which each host parameter is registered, by the address of its storage.
    """

    def __init__(self, engine: Engine, by_storage: dict[int, HostParameter]) -> None:
        self.engine = engine
        self._memory = self.new_memory()
        self.gradients = Gradients(engine, self._memory)
        self._by_storage = by_storage
        self._loader = engine.new_loader()
        self._before: dict[Group, Group] = {}  # for each group, the group that ran before it in the forward
        self._backward: Prefetch[Group] = Prefetch(engine.depth, guess=self._before.get)
        self._forward: Prefetch[Group] = Prefetch(engine.depth, repeats=False)
        self._last: Group | None = None
        self._went_back: set[Group] = set()
        self._sequence = 0
        self._movers: weakref.WeakValueDictionary[int, HostParameter] = weakref.WeakValueDictionary()
        self._reading: dict[HostParameter, Event] = {}
        self._awaited: set[HostParameter] = set()  # loaded for a region that is expected to run soon in this forward
        engine.followers.add(self)

    def new_memory(self) -> MappedTensors:
        """Returns an allocator of the engine's tiers, as CPU tensors."""
        return MappedTensors(self.engine)

    def is_movable(self, parameter: torch.Tensor) -> bool:
        return is_movable(parameter)

    # ---------------------------------------------------------------------------------- moving parameters to a tier

    def place(self, parameter: torch.Tensor, tier: str, like: torch.Tensor) -> HostParameter | None:
        """Moves `parameter` to `tier`, or to the next tier below that has room; returns None if it has to stay.

        The parameter keeps its values and its version counter. It stays if something else refers to its memory, so that
        moving it would free nothing, or if no tier has room.
        """
        engine = self.engine
        # The parameter is used outside inference mode too, where an inference tensor could not be trained.
        with engine.lock, torch.inference_mode(False), torch.no_grad():
            if (host := host_parameter_of(parameter, self._by_storage)) is not None:  # another thread has moved it
                return host
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
            host = mapped.host = HostParameter(self, parameter, tier, mapped.buffer, like, data)
            key = data.untyped_storage()._cdata
            # Registered now: after the storage is freed, another one may get the same address.
            weakref.finalize(data.untyped_storage(), self._by_storage.pop, key, None).atexit = False
            self._movers[host.number] = self._by_storage[key] = host
            # Last, in one statement: an interruption before it leaves the parameter unchanged.
            parameter.grad, parameter.data, parameter.grad = None, data, gradient
            return host

    def end(self, host: HostParameter) -> list[Event]:
        """Forgets a host parameter that nothing refers to; returns the events of copies that may still read its bytes.

        The engine's lock is held.
        """
        self._let_go(host)
        host.buffer = None
        self._movers.pop(host.number, None)  # otherwise the recorded order of its region would load it ahead
        self._awaited.discard(host)
        reading = self._reading.pop(host, None)  # the compute stream has waited for it, this thread has not
        return [] if reading is None else [reading]

    # --------------------------------------------------------------------------------------- to the device and back

    def enter(self, residency: Residency, hosts: Sequence[HostParameter]) -> list[torch.Tensor]:
        """Returns the parameters on the device, for a region that runs now, until ``exit(residency)``.

        `exit` has to be called even if this function raises.
        """
        engine, group = self.engine, tuple([host.number for host in hosts])
        with engine.lock:
            in_backward = engine.follow_backward()  # true for a recompute
            residency.is_first = any(host.loaded == NEVER for host in hosts)
            self._trim(residency)
            if in_backward:
                self._trim_backward(group)
            is_next = not in_backward and self._begin(group)
            try:
                for host in hosts:
                    host.group = group
                    # Bytes that an earlier forward left on the device may be out of date without a change of version.
                    self._ask(host, 0.0, anew=not (in_backward or host in self._awaited))
                    self._awaited.discard(host)
            except BaseException:  # for example out of memory after half of the parameters
                for host in hosts:
                    self._let_go(host)
                raise
            residency.begin(hosts)
            if in_backward:
                self.requested_in_backward(group)
            elif is_next:
                self._load_forward()
            # Detached, because a region may change a parameter in place, which PyTorch refuses for views. Like the
            # parameter they are no inference tensors: PyTorch chooses kernels by that property.
            with torch.inference_mode(False):
                tensors = [host.layout.of(self._loader.arrived(host)).detach() for host in hosts]
            for host, tensor in zip(hosts, tensors, strict=True):
                residency.loaded[tensor.untyped_storage()._cdata] = host
            engine.transfers.pump()
        engine.go_on()
        return tensors

    def lag(self, sequence: int) -> int:
        """Returns the autograd sequence number for a node that waits for a gradient: that of the previous region.

        `sequence` is the number of the present region's first node. Autograd runs ready nodes in descending order, so
        the node waits only once the backward of the previous region is through.
        """
        before, self._sequence = self._sequence, sequence
        return min(before, sequence)

    def exit(self, residency: Residency, *, failed: bool = False) -> None:
        """Called when the region has run: frees its parameters on the device, unless backward needs them first."""
        in_backward = torch._C._current_graph_task_id() != -1
        with self.engine.lock:
            # In one step: after an interruption no parameter is taken for used, and so for up to date.
            residency.end()
            hosts = residency.hosts
            group = hosts[0].group if hosts else ()
            stay = (
                torch.is_grad_enabled() and not in_backward and self.engine.depth > 0 and self._backward.first == group
            )
            over = [host for host in hosts if not is_used(host)]
            for host in over:
                self._bring_changes(host)
            for host in [] if stay and not failed else over:
                self._let_go(host)
            if failed:  # the forward is over, and the next one may begin with this region
                self._forward.begin()
                self.forget_awaited()
            # From here on the caller may change a parameter, even without a change of version.
            self._finish_reading(hosts)
            if not failed:
                self._trim(residency)
            self.engine.transfers.pump()
        self.engine.go_on()

    def _trim(self, residency: Residency) -> None:
        """Returns cached device memory around the first run of a region.

        The memory that parameters occupied before they moved to a tier is cached in pieces too small for anything
        larger (12.6 GiB of a Llama 8B, whose loss takes another 13.7 GiB), and the pieces of one region would end up
        next to an activation that stays, unless the next region gets new ones. Fixed slots outside the allocator
        reserve more (19.4 GiB instead of 18.4 at a peak of 16.4), because the loss cannot use them.
        """
        if residency.is_first:
            self.engine.backend.trim()

    def _trim_backward(self, group: Group) -> None:
        """Returns cached device memory before the first backward of a region, if another backward reserved more.

        In that case the cached pieces do not fit: a Llama 8B with a tiled head would reserve 10.7 GiB at a peak of 8.5.
        If the loss has left enough memory for all regions, as whole logits do, the cache is kept.
        """
        if group not in self._went_back:
            self._went_back.add(group)
            self.engine.backend.trim(if_grown=True)

    def _bring_changes(self, host: HostParameter) -> None:
        """Copies a region's in-place changes of its parameters back, such as those of an embedding with `max_norm`."""
        parameter, base = host.parameter(), host.base
        if parameter is None or base is None or (changes := host.changes()) == 0:
            return
        before = version(parameter)
        with torch.no_grad():
            parameter.copy_(host.layout.of(base))
        torch._C._autograd._unsafe_set_version_counter((parameter,), (before + changes,))
        host.loaded = (before + changes, version(base))

    # ---------------------------------------------------------------------------------- saved tensors and gradients

    def save(self, host: HostParameter, tensor: torch.Tensor | None = None) -> Saved:
        """Returns what autograd saves for the parameter on the device, or for `tensor`, a view of it there."""
        with self.engine.lock:
            self.engine.transfers.pump()
            return Saved(host, host.layout if tensor is None else Layout.from_tensor(tensor))

    def fetch(self, saved: Saved) -> torch.Tensor:
        """Returns the tensor behind `saved`, on the device.

        Raises:
            CorrectnessError: the parameter was changed in place since it was saved.
        """
        host, engine = saved.host, self.engine
        with engine.lock:
            in_backward = engine.follow_backward()  # first: a backward that raises has to end as well
            saved.check()
            if in_backward:
                self._trim_backward(host.group)
            if host.base is None:
                self._load(host)
            if in_backward:
                self.requested_in_backward(host.group)
            tensor = saved.layout.of(self._loader.arrived(host))
            if in_backward:
                host.fetched.add(id(saved))
            if not in_backward or host.is_fetched():
                self._let_go(host)
            engine.transfers.pump()
        return engine.hand_out(tensor)

    def drop(self, host: HostParameter) -> None:
        """Called when a `Saved` of `host` is dropped; this may happen inside the engine's own code."""
        self.engine.finalized.add(host, self._close)

    def _close(self, host: HostParameter) -> None:
        if host.is_fetched():
            self._let_go(host)

    def send(self, host: HostParameter, gradient: torch.Tensor) -> torch.Tensor:
        return self.gradients.send(host.parameter(), host.tier, gradient)

    def received(self, gradient: torch.Tensor) -> None:
        self.gradients.received(gradient)

    # ------------------------------------------------------------------------------------------------ loading ahead

    def _ask(self, host: HostParameter, seconds: float, *, anew: bool = False) -> None:
        now = host.version()
        if host.state is LoadState.BACK and (anew or host.loaded[0] != now):  # loaded ahead, and possibly changed since
            self._let_go(host)
        if host.state is LoadState.OFFLOADED:
            self._load(host, seconds)

    def _load(self, host: HostParameter, seconds: float = 0.0) -> None:
        started = functools.partial(self._copied, host)
        self._loader.load(host, started=started, seconds=seconds, group=host.group)

    def _let_go(self, host: HostParameter) -> None:
        if not is_used(host):
            self._loader.let_go(host)

    def _begin(self, group: Group) -> bool:
        """Records that a region runs in the forward; returns whether it is another region than the last one."""
        if self._last is not None and self._last != group:
            if len(self._before) >= MOST_HINTS:
                self._before.clear()
            self._before[group] = self._last
        self._last = group
        is_next = self._forward.requested(group, at=self.engine.backend.record())
        # A region that runs twice in a row may also be the first one of a new forward.
        if not is_next or self._forward.first == group:
            self.forget_awaited()
        return is_next

    def forget_awaited(self) -> None:
        """Drops what a finished forward has loaded and not used: the parameters may change before the next request."""
        for host in self._awaited:
            self._let_go(host)
        self._finish_reading(self._awaited)
        self._awaited.clear()

    def _load_forward(self) -> None:
        for later, seconds in self._forward.upcoming():
            self._ask_all(later, seconds, saved=False)

    def requested_in_backward(self, group: Group) -> None:
        """Requests all of `group`, of which backward needs one now, and the groups that are expected next."""
        if self._backward.requested(group, at=self.engine.backend.record()):
            self._ask_all(group, 0.0, saved=True)
        for later, seconds in self._backward.upcoming():
            self._ask_all(later, seconds, saved=True)

    def _ask_all(self, group: Group, seconds: float, *, saved: bool) -> None:
        for number in group:
            host = self._movers.get(number)
            if host is None or (saved and not host.alive):
                continue
            try:
                self._ask(host, seconds, anew=not (saved or host in self._awaited))
            except torch.OutOfMemoryError:  # loaded when needed, when it may fit
                return
            if not saved:
                self._awaited.add(host)

    def _copied(self, host: HostParameter, event: Event) -> None:
        # Copy times are not given to `Prefetch`: with a smaller depth than in the simulation, the loaded parameters
        # would occupy other places, and the loss could need one more segment.
        self._reading[host] = event

    # -------------------------------------------------------------------------------------- the interface of `Follower`

    def begin_backward(self) -> None:
        self._finish_copies()  # the previous backward may have ended with an exception
        self._backward.begin()
        self.forget_awaited()

    def end_backward(self) -> None:
        """Frees what was loaded and not fetched. From here on the CPU may change any parameter."""
        for host in list(self._loader.back):
            assert isinstance(host, HostParameter)
            self._let_go(host)
        self._finish_copies()

    def settle(self) -> None:
        self.forget_awaited()
        self._finish_copies()

    def _finish_copies(self) -> None:
        self.gradients.arrive()
        self._finish_reading(list(self._reading))

    def _finish_reading(self, hosts: Iterable[HostParameter]) -> None:
        """Waits for the copies that read `hosts`, so that the CPU may change these parameters."""
        for host in hosts:
            if (event := self._reading.get(host)) is not None:
                self.engine.transfers.synchronize(event)
                del self._reading[host]
