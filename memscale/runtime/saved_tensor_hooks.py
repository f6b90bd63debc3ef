"""Saved-tensor hooks that give tensors to the offload engine, and all other tensors to the surrounding hooks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memscale.core import RuntimeUnavailable, TransformError, changed_error, check_tier, internals, version
from memscale.regions import PacksSeveral, dispatch_modes, hiding, hooks_around, never_compiled, recomputes, unrecorded
from memscale.runtime.engine.entry import Handle, kept_tensor
from memscale.runtime.engine.offload_engine import Engine
from memscale.runtime.parameters.host_parameter import Saved, any_is_running, host_parameter_on_device
from memscale.runtime.runtime import Runtime, runtime_for

_UNRECORDED = unrecorded()
_PLAIN = {torch.Tensor, torch.nn.Parameter, internals.FakeTensor}


def hooks_here(
    runtime: Runtime | None,
    tier: str,
    min_bytes: int | None,
    kind: Callable[[Runtime, str, int | None, Any, str], Hooks] | None = None,
    *,
    region: str = "",
) -> Hooks | None:
    """Returns hooks for a region that begins now; None in a trace, and in a checkpoint, which drops what is saved."""
    outer = hooks_around()
    if (outer is not None and recomputes(outer[1])) or is_traced():
        return None
    # Inside a region with host parameters, an inner region saves these parameters too.
    kind = kind or (HooksAmongHostParameters if any_is_running() else Hooks)
    return kind(runtime_for(runtime), tier, min_bytes, outer, region)


class Hooks(PacksSeveral):
    """The pack and unpack hooks of a region: called for each tensor that it saves, and for each that backward needs."""

    def __init__(self, runtime: Runtime, tier: str, min_bytes: int | None, outer: Any, region: str) -> None:
        check_tier("the tier of a policy's Move(...)", tier)
        self._runtime = runtime
        self._tier = tier
        self._min_bytes = runtime.config.min_bytes if min_bytes is None else min_bytes
        self._outer = outer  # the surrounding hooks, which get the tensors that do not move
        self._engines: dict[tuple[type, torch.device], Engine] = {}
        self._region = region
        self._small: dict[int, torch.Tensor] = {}  # one tensor per storage below `min_bytes`, by the storage's address

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns a handle if `tensor` may move, else the tensor with its version."""
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return self._pack_other(tensor)
        if _stays(tensor):
            return self.keep(tensor)
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < self._min_bytes or nbytes == 0:
            if nbytes:
                self._small[storage._cdata] = tensor
            return self.keep(tensor)
        hiding.depth += 1
        try:
            engine = self._engines.get((type(tensor), tensor.device)) or self._engine(tensor)
            if engine is None:
                return self.keep(tensor)
            return engine.stash(tensor, tier=self._tier, region=self._region, storage=storage)
        finally:
            hiding.depth -= 1

    def pack_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Packs several detached tensors; faster than `pack` for tensors that were packed before."""
        packed: list[Any] = [None] * len(tensors)
        moving: dict[Any, list[int]] = {}  # indices by (type, device), which select the engine
        least = max(self._min_bytes, 1)
        for index, tensor in enumerate(tensors):
            may_move = is_plain(tensor) and not tensor.is_nested and not tensor.is_quantized
            if may_move and tensor.untyped_storage().nbytes() >= least:
                moving.setdefault((type(tensor), tensor.device), []).append(index)
            else:
                packed[index] = self.pack(tensor.detach())
        for found in moving.values():
            with _UNRECORDED:
                given = [tensors[at] for at in found]
                if (engine := self._engine(given[0])) is None:
                    handles: list[Any] = [self.keep(tensor) for tensor in given]
                else:
                    handles = engine.stash_all(given, tier=self._tier, region=self._region)
            for index, handle in zip(found, handles, strict=True):
                packed[index] = handle
        return packed

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        """Returns the tensor behind what `pack` returned."""
        kind = type(packed)
        if kind is Handle:
            hiding.depth += 1
            try:
                return packed.record.entry.engine.fetch(packed)  # type: ignore[no-any-return]
            finally:
                hiding.depth -= 1
        if kind is tuple:
            tensor, expected = packed
            if version(tensor) != expected:
                raise changed_error(kept_tensor(tensor.dtype, tensor.size()), version(tensor), expected)
            return tensor  # type: ignore[no-any-return]
        if kind is Saved:
            with _UNRECORDED:
                return packed.host.mover.fetch(packed)  # type: ignore[no-any-return]
        return packed.unpack(self)  # type: ignore[no-any-return]

    def _engine(self, tensor: torch.Tensor) -> Engine | None:
        """Returns the engine for `tensor`, or None in a trace."""
        key = type(tensor), tensor.device
        engine = self._engines.get(key)
        if engine is None:
            if is_traced():
                return None
            engine = self._engines[key] = self._runtime.engine(tensor)
            self._runtime.warn_of_tier(engine, self._tier)
        return engine

    def leave(self) -> None:
        """Called at the end of the region, where its intermediate values have just been freed."""
        for engine in set(self._engines.values()):
            with _UNRECORDED:
                engine.look_again()
        small = list(self._small.values())
        self._small.clear()
        with _UNRECORDED, contextlib.suppress(RuntimeUnavailable):  # counting needs no backend
            for tensor in small:
                self._runtime.engine(tensor).left_small(self._region, tensor.untyped_storage().nbytes())

    def keep(self, tensor: torch.Tensor) -> Any:
        """Packs `tensor` without moving it."""
        if self._outer is not None:
            return _Outer(self._outer[1], self._outer[0](tensor))
        return tensor.detach(), version(tensor)

    def _pack_other(self, tensor: torch.Tensor) -> Any:
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
            return _Parts(self, tensor)
        if tensor.layout is not torch.strided:
            raise TransformError(
                f"the region saves a tensor of layout {tensor.layout}, and offload() moves strided tensors only; leave "
                "the module that makes the tensor out of the region"
            )
        # A subclass without `__tensor_flatten__`.
        return self.keep(tensor)


class HooksAmongHostParameters(Hooks):
    """Hooks of a region inside another region that has host parameters on the device."""

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Any:
        if is_plain(tensor) and (host := host_parameter_on_device(tensor)) is not None:
            with _UNRECORDED:
                return host.mover.save(host, tensor)
        return super().pack(tensor)

    def pack_all(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Packs several tensors: host parameters one by one, all others together."""
        hosts = [is_plain(tensor) and host_parameter_on_device(tensor) is not None for tensor in tensors]
        others = iter(super().pack_all([each for each, is_host in zip(tensors, hosts, strict=True) if not is_host]))
        return [
            self.pack(each.detach()) if is_host else next(others) for each, is_host in zip(tensors, hosts, strict=True)
        ]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a strided tensor of one of PyTorch's own classes, which its bytes describe completely."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def is_traced() -> bool:
    """Whether `make_fx` or `torch.jit.trace` traces, whose graph would hold what comes back from a tier as constants.

    `torch.func.linearize` and exporters call one of the two.
    """
    traces: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return traces or any(type(mode).__name__ == "ProxyTorchDispatchMode" for mode in dispatch_modes())


def _stays(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a trained leaf or a view of one, which its owner keeps, or a nested or quantized tensor."""
    if tensor.is_nested or tensor.is_quantized:
        return True
    if type(tensor) is torch.nn.Parameter or (tensor.is_leaf and tensor.requires_grad):
        return True
    base = tensor._base
    return base is not None and base.is_leaf and base.requires_grad


class _Outer:
    """A tensor that the surrounding hooks have packed."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self._unpack = unpack
        self._packed = packed

    def unpack(self, hooks: Hooks) -> torch.Tensor:
        return self._unpack(self._packed)


class _Parts:
    """A tensor subclass, packed as the plain tensors that it consists of."""

    __slots__ = ("_context", "_kept", "_kind", "_packed", "_size", "_stride", "_version", "_whole")

    def __init__(self, hooks: Hooks, tensor: torch.Tensor) -> None:
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        self._kind: Any = type(tensor)
        self._size, self._stride = tensor.size(), tensor.stride()
        # In-place changes of the subclass do not show in its parts. A change is missed if the tensor is gone by then.
        self._whole, self._version = weakref.ref(tensor), version(tensor)
        parts = {name: getattr(tensor, name) for name in names}
        self._packed = {name: hooks.pack(part) for name, part in parts.items() if _is_of_numbers(part)}
        # Integer parts hold offsets. Two nested tensors have the same shape only if they share this very tensor.
        self._kept = {name: part for name, part in parts.items() if name not in self._packed}

    def unpack(self, hooks: Hooks) -> torch.Tensor:
        whole = self._whole()
        if whole is not None and version(whole) != self._version:
            raise changed_error(kept_tensor(whole.dtype, whole.size()), version(whole), self._version)
        parts = {**self._kept, **{name: hooks.unpack(packed) for name, packed in self._packed.items()}}
        with torch.no_grad():
            return self._kind.__tensor_unflatten__(parts, self._context, self._size, self._stride)  # type: ignore[no-any-return]


def _is_of_numbers(part: Any) -> bool:
    # A DTensor lists its mesh among its parts.
    return isinstance(part, torch.Tensor) and (part.is_floating_point() or part.is_complex())
