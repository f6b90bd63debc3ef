"""`offload(what="params")`: a region whose parameters live on another tier and are loaded to the device for each use.

While the region runs, a tensor on the device takes the place of each parameter. In the autograd graph this tensor is
the result of two nodes: the one on the device copies the gradient to the parameter's tier; the one on the CPU waits for
the copy and passes the gradient to the parameter. Autograd saves a handle, which loads the tensor again for backward.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memscale.algebra import Placing
from memscale.core import CorrectnessError, TransformError, changed_error, internals, pytrees, version
from memscale.regions import (
    PATIENCE_SECONDS,
    Attributes,
    Captures,
    Note,
    Origin,
    Streams,
    functorch_state,
    is_stand_in,
    moved,
    never_compiled,
    origin_of,
    read,
    refused,
    stand_for,
    uncompiled,
    unrecorded,
    write,
)
from memscale.runtime import HostParameter, Residency, Runtime, hooks_here, host_parameter_of, is_traced, runtime_for
from memscale.transforms.offload.saving import StreamedHooks, saving_by

_table_lock = threading.Lock()
_locks: Any = WeakTensorKeyDictionary()  # for each parameter, a lock held by the thread that uses it


class Streamed(Placing):
    """A function whose parameters live on another tier.

    Attributes:
        watched: the train/eval flags of its modules with which it has run.
        spreads: whether it was seen to use several streams.
    """

    def __init__(self, fn: Callable[..., Any], how: Any) -> None:
        super().__init__(fn, how)
        self.watched: set[tuple[bool, ...]] = set()
        self.spreads = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        why = "offload(what='params') brings the region's parameters to the device while it runs"
        return uncompiled(_eager, why, self, args, kwargs)

    def place(self, parameters: Sequence[torch.Tensor], device: torch.device) -> list[HostParameter]:
        """Moves those of `parameters` to the tier that may leave `device`; returns all host parameters among them."""
        runtime = runtime_for(self.runtime)
        like = torch.empty(0, dtype=torch.uint8, device=device)
        least = self._least_bytes(runtime)
        staying = set(map(id, self.resident or ()))
        hosts = []
        for parameter in parameters:
            host = host_parameter_of(parameter, runtime.by_storage)
            may_leave = host is None and parameter.nbytes >= least and id(parameter) not in staying
            if may_leave and (mover := runtime.mover(like)).is_movable(parameter):
                runtime.warn_of_tier(mover.engine, self.how.tier)
                before = weakref.ref(parameter.untyped_storage())
                host = mover.place(parameter, self.how.tier, like)
                moved(parameter, before)
            if host is not None:
                hosts.append(host)
        return hosts

    def why_none_leaves(self, parameters: Sequence[torch.Tensor]) -> str | None:
        least = self._least_bytes(runtime_for(self.runtime))
        largest = max((parameter.nbytes for parameter in parameters), default=0)
        if largest >= least:
            return None
        return (
            f"{self.how!r} leaves every parameter on the device: the largest has {largest} bytes, and min_bytes is "
            f"{least}; pass offload(what='params', min_bytes=...), or leave it out"
        )

    def _least_bytes(self, runtime: Runtime) -> int:
        return runtime.config.min_bytes if self.how.min_bytes is None else self.how.min_bytes

    def find(self, captures: Captures, device: torch.device) -> tuple[list[HostParameter], list[torch.Tensor]]:
        """Returns the captured host parameters, and other captured parameters that are on another device."""
        own = {id(tensor): tensor for _, _, tensor in captures.tensors if type(tensor) is nn.Parameter}
        # In a region under `torch.func` an outer recompute has made them arguments; a trace would hold device tensors.
        if functorch_state.active() or functorch_state.inside_region() or is_traced():
            own = {}
        hosts = [host for host in self.place(list(own.values()), device) if host.device == device]
        found = {id(host.parameter()) for host in hosts}
        if untitled := {id(host.parameter()): host for host in hosts if not host.title}:
            for position, key, tensor in captures.tensors:
                if id(tensor) in untitled:
                    untitled[id(tensor)].title = captures.describe(position, key)
        members = {id(module._parameters) for module in captures.modules}
        strays = {
            id(tensor): tensor
            for position, _, tensor in captures.tensors
            if id(captures.slots[position]) in members and id(tensor) not in found and tensor.device != device
        }
        return hosts, list(strays.values())


def _eager(self: Streamed, args: Any, kwargs: Any) -> Any:
    captures = Captures(self.fn)
    device = _device(captures, pytrees.tensors((args, kwargs)))
    if device is None:
        return self.fn(*args, **kwargs)
    with ExitStack() as stack:
        if not _lock_parameters(stack, captures, self.how):
            captures = Captures(self.fn)
        with unrecorded():
            hosts, strays = self.find(captures, device)
        if not hosts and self.resident is None:
            self.resident = ()
            own = [tensor for _, _, tensor in captures.tensors if type(tensor) is nn.Parameter]
            if (why := self.why_none_leaves(own)) is not None:
                runtime_for(self.runtime).warn(why)
        streams = Streams([device] if hosts else [])
        stand_ins = stack.enter_context(_on_device(hosts))
        # A transform of `torch.func` refuses hooks, and keeps its residuals itself.
        if hosts and torch.is_grad_enabled() and not functorch_state.active() and not functorch_state.inside_region():
            hooks = hooks_here(self.runtime, self.how.tier, None, functools.partial(StreamedHooks, streams))
            stack.enter_context(saving_by(hooks, self.how))
        on_device = list(stand_ins.values())
        stack.callback(on_device.clear)  # before the parameters leave, so that their memory is freed then
        stack.callback(streams.lend, on_device)  # other streams may have used them, even if the region failed
        stand_ins |= {id(stray): stray.to(device) for stray in strays}
        stack.enter_context(_standing_in(captures, stand_ins))
        # The same in a simulation: under a dispatch mode PyTorch adds the attention mask out of place, as on a card.
        watch = bool(hosts) and captures.flags not in self.watched
        why = "is lost; make the change in place under torch.no_grad()"
        with (
            refused(on_device, lambda index: str(origin_of(on_device[index]).host), self.how, why, watch=watch),
            streams.watching() if watch or self.spreads else nullcontext(),
            _GradientsWatch(self.how) if watch and torch.is_grad_enabled() else nullcontext(),
        ):
            result = self.fn(*args, **kwargs)
        self.spreads = self.spreads or streams.are_several
        self.watched.add(captures.flags)
        return result


def _lock_parameters(stack: ExitStack, captures: Captures, how: object) -> bool:
    """Makes other threads wait that run a streamed region with parameters of `captures`, until `stack` ends.

    All threads find the device tensor of a parameter in the same place. A second thread would compute with a tensor
    that belongs to another stream, and store it as the parameter afterwards.

    Returns:
        Whether `captures` is still valid: False if it contains device tensors of another thread, which are gone by now.

    Raises:
        CorrectnessError: the other thread's region did not end within a minute.
    """
    is_valid, wanted = True, {}
    for _, _, tensor in captures.tensors:
        parameter: torch.Tensor | None = tensor
        if is_stand_in(tensor):
            origin = origin_of(tensor)
            parameter = origin.host.parameter() if isinstance(origin, _OnDevice) else None
        if type(parameter) is nn.Parameter:
            lock = wanted[id(parameter)] = _lock_of(parameter)
            is_valid = is_valid and (parameter is tensor or lock._is_owned())  # type: ignore[attr-defined]
    for _, lock in sorted(wanted.items()):  # the same order in all threads, to prevent deadlocks
        if not lock.acquire(timeout=PATIENCE_SECONDS):
            raise CorrectnessError(
                f"the region of {how!r} waited a minute for a parameter that another thread's region has on the "
                "device; run the two one after the other, or give each thread a model of its own"
            )
        stack.callback(lock.release)
    return is_valid


def _lock_of(parameter: nn.Parameter) -> threading.RLock:
    with _table_lock:
        lock: threading.RLock | None = _locks.get(parameter)
        if lock is None:
            lock = _locks[parameter] = threading.RLock()
        return lock


class _OnDevice(Origin):
    """The origin of a tensor on the device: its host parameter, with the version it had."""

    __slots__ = ("host", "version")

    def __init__(self, host: HostParameter, version: int) -> None:
        self.host = host
        self.version = version

    def note(self, stand_in: torch.Tensor) -> Note:
        parameter = self.host.parameter()
        assert parameter is not None, "the region holds the parameter"
        return _HostNote(self.host, parameter.detach(), self.version, stand_in.requires_grad)


@dataclasses.dataclass(frozen=True, eq=False)
class _HostNote(Note):
    """The origin of a host parameter's device tensor, which a checkpoint keeps in its place."""

    host: HostParameter
    contents: torch.Tensor  # keeps the memory alive; the module may have another parameter by then
    version: int
    requires_grad: bool

    @contextmanager
    def bring_back(self, notes: Sequence[_HostNote]) -> Iterator[dict[_HostNote, torch.Tensor]]:
        """Loads the parameters of `notes` to the device for the body; see `Note.bring_back`.

        Raises:
            CorrectnessError: a parameter was changed in place since.
        """
        for note in notes:
            if (now := note.host.version()) not in (-1, note.version):
                raise changed_error(str(note.host), now, note.version)
        with ExitStack() as stack:
            arrived = dict(_enter(stack, list({note.host: None for note in notes})))
            stand_ins = {note: arrived[note.host].requires_grad_(note.requires_grad) for note in notes}
            arrived.clear()
            yield stand_ins
            stand_ins.clear()


@contextmanager
def _on_device(hosts: Sequence[HostParameter]) -> Iterator[dict[int, torch.Tensor]]:
    """Yields the device tensor of each parameter, by the parameter's id, for as long as the region runs."""
    stand_ins: dict[int, torch.Tensor] = {}
    trained: list[tuple[HostParameter, torch.Tensor, Any]] = []
    sequence = None
    with ExitStack() as stack:
        for host, tensor in _enter(stack, hosts):
            parameter = host.parameter()
            assert parameter is not None, "the region holds the parameter"
            if torch.is_grad_enabled() and parameter.requires_grad:
                received = _Receive.apply(parameter, host)  # type: ignore[no-untyped-call]
                if sequence is None:
                    sequence = host.mover.lag(received.grad_fn._sequence_nr())
                received.grad_fn._set_sequence_nr(sequence)
                tensor = _Stream.apply(received, host, [tensor])  # type: ignore[no-untyped-call]
                trained.append((host, tensor, tensor.grad_fn))
            else:
                parameter.detach()  # records a use of the parameter, whose version a checkpoint around then checks
                tensor.requires_grad_(parameter.requires_grad)
            stand_for(_OnDevice(host, version(parameter)), tensor)
            stand_ins[id(parameter)] = tensor
            del tensor  # frees the device memory when the region ends
        try:
            yield stand_ins
        finally:
            changed = [(host, tensor) for host, tensor, node in trained if tensor.grad_fn is not node]
            for host, _ in changed:
                host.forget_changes()
        for host, _ in changed:
            raise CorrectnessError(
                f"a leaf Variable that requires grad is being used in an in-place operation: {host} which the region "
                "of offload(what='params') changes; do so under torch.no_grad(), or change a clone"
            )
        for host in hosts:
            if host.version() not in (-1, host.loaded[0]):
                raise CorrectnessError(
                    f"{host} was changed on its tier while a region of offload(what='params') had it on the device, as "
                    "by an optimizer that steps inside the region; step outside of the region"
                )
        stand_ins.clear()
        trained.clear()


def _enter(stack: ExitStack, hosts: Sequence[HostParameter]) -> Iterator[tuple[HostParameter, torch.Tensor]]:
    """Yields the host parameters `hosts` with their tensors on the device, which are freed when `stack` ends."""
    for mover in {id(host.mover): host.mover for host in hosts}.values():
        mine = [host for host in hosts if host.mover is mover]
        residency = Residency()
        stack.push(functools.partial(_exit, mover, residency))  # before `enter`, which may fail halfway
        with unrecorded():
            tensors = mover.enter(residency, mine)
        yield from zip(mine, tensors, strict=True)


def _exit(mover: Any, residency: Residency, kind: Any, *_: Any) -> None:
    with unrecorded():
        mover.exit(residency, failed=kind is not None)


_T: Any = torch.Tensor
_ASKS_THE_PARAMETER = {_T.grad.__get__, _T.grad.__set__, _T.requires_grad.__set__, _T.requires_grad_}


class _GradientsWatch(TorchFunctionMode):
    """Raises `TransformError` if a region reads or sets on a device tensor what only its parameter has."""

    def __init__(self, how: object) -> None:
        super().__init__()
        self._how = how

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKS_THE_PARAMETER and is_stand_in(args[0]) and isinstance(origin := origin_of(args[0]), _OnDevice):
            raise TransformError(
                f"the region of {self._how!r} reads or sets .grad, or requires_grad, of {origin.host} which it has on "
                "the device in place of the parameter that has them (as zero_grad() and an optimizer do); do so "
                "outside of the region"
            )
        return func(*args, **(kwargs or {}))


class _Receive(torch.autograd.Function):
    """The node on the CPU, through which the gradient reaches the parameter after its copy."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, host: HostParameter) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.host = host
        return parameter.detach()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is not None:
            ctx.host.mover.received(gradient)
        return gradient, None


class _Stream(torch.autograd.Function):
    """The node on the device, whose backward copies the gradient to the parameter's tier."""

    @staticmethod
    def forward(ctx: Any, by_storage: torch.Tensor, host: HostParameter, arrived: list[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.host_parameter_on_device = host
        return arrived.pop()

    @staticmethod
    @never_compiled
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is not None:
            host = ctx.host_parameter_on_device
            gradient = host.mover.send(host, gradient)
        return gradient, None, None


@contextmanager
def _standing_in(captures: Captures, stand_ins: dict[int, torch.Tensor]) -> Iterator[None]:
    """Within the body, `stand_ins` replace the tensors with these ids in all places of `captures`."""
    before: list[tuple[Any, Any]] = []
    try:
        for slot, content in zip(captures.slots, captures.contents, strict=True):
            items = list(content.items() if isinstance(content, dict) else enumerate(content))
            found = [(key, stand_ins[id(value)]) for key, value in items if id(value) in stand_ins]
            if found:
                before.append((slot, [(key, content[key]) for key, _ in found]))
                _put(slot, found)
        yield
    finally:
        for slot, entries in before:
            _put(slot, entries)
        for slot, content in zip(captures.slots, captures.contents, strict=True):
            if isinstance(slot, Attributes):
                _put_back_new(slot, content)


def _put_back_new(slot: Attributes, before: Any) -> None:
    """Replaces device tensors that the region has stored, as an LSTM does in a list of weights, by their parameters."""
    for key, value in read(slot).items():  # type: ignore[union-attr]
        if value is before.get(key):
            continue
        if isinstance(value, torch.Tensor) and is_stand_in(value):
            slot.mapping[key] = _parameter_of(value)
        elif isinstance(value, (list, dict)):
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            for position, item in items:
                if isinstance(item, torch.Tensor) and is_stand_in(item):
                    value[position] = _parameter_of(item)


def _parameter_of(stand_in: torch.Tensor) -> torch.Tensor:
    parameter: torch.Tensor | None = origin_of(stand_in).host.parameter()
    return stand_in if parameter is None else parameter


def _put(slot: Any, entries: Sequence[tuple[Any, Any]]) -> None:
    """Sets `entries` in `slot`, and leaves the other entries of `slot` unchanged."""
    if isinstance(slot, dict):
        slot.update(entries)
        return
    content = read(slot)
    for key, value in entries:
        content[key] = value
    write(slot, content)


def _device(captures: Captures, arguments: Sequence[torch.Tensor]) -> torch.device | None:
    """Returns the device of the arguments, else of the captured tensors; None for tensors without values."""
    tensors = [*arguments, *[tensor for _, _, tensor in captures.tensors]]
    if any(isinstance(tensor, internals.FakeTensor) or tensor.is_meta for tensor in tensors):
        return None
    return next((tensor.device for tensor in tensors if not tensor.is_cpu), torch.device("cpu"))
