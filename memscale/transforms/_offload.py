"""`offload`: keep a region's residuals on another memory tier between forward and backward."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale._errors import ConfigError, TransformError
from memscale._transform import Transform
from memscale._value import factory
from memscale.runtime import Runtime, default_runtime
from memscale.runtime._entry import Handle, changed_error, version
from memscale.runtime._runtime import TIERS
from memscale.transforms import _functorch
from memscale.transforms._selective import unseen

_autograd = torch._C._autograd
_PLAIN = {torch.Tensor, torch.nn.Parameter, FakeTensor}
# Hooks that drop what they are given and run the region again. Inside these there is nothing to keep anywhere.
_RECOMPUTING = ("memscale.transforms._recompute", "torch.utils.checkpoint")


@dataclasses.dataclass(frozen=True, repr=False)
class Offload(Transform):
    """Made by `offload`."""

    spelling: ClassVar[str] = "offload"

    what: str = "activations"
    tier: str = "auto"
    min_bytes: int | None = None

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return Offloaded(fn, self, None)

    def on(self, runtime: Runtime | None) -> Transform:
        return self if runtime is None else OffloadOn(**vars(self), runtime=runtime)


@dataclasses.dataclass(frozen=True, repr=False)
class OffloadOn(Offload):
    """An `Offload` with the runtime that it uses. Only a means to apply one: a plan holds no resources."""

    runtime: Runtime | None = dataclasses.field(default=None, compare=False)

    def apply(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return Offloaded(fn, Offload(self.what, self.tier, self.min_bytes), self.runtime)


class Offloaded:
    """A function whose residuals are kept on another tier. Copies and pickles with the function it holds."""

    def __init__(self, fn: Callable[..., Any], how: Offload, runtime: Runtime | None) -> None:
        self.fn = fn
        self.how = how
        self.runtime = runtime

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        eager = _without_dynamo() if "torch._dynamo" in sys.modules else _eager
        return eager(self, args, kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def __memscale_parts__(self) -> tuple[Any, ...]:
        return (self.fn,)

    def __memscale_remap__(self, remap: Callable[[Any], Any]) -> Offloaded:
        return Offloaded(remap(self.fn), self.how, self.runtime)

    def __repr__(self) -> str:
        return f"{self.how!r}({self.fn!r})"


def offload(*, what: str = "activations", tier: str = "auto", min_bytes: int | None = None) -> Transform:
    """A transform that keeps what a function saves for backward on another memory tier, and brings it back.

    ``offload()(f)`` computes what ``f`` computes, bit for bit, as do its gradients of any order. What it frees:

    >>> import torch, memscale as ms
    >>> def f(x):
    ...     return torch.exp(torch.sin(x * 2))
    >>> x = torch.ones(1024, requires_grad=True)
    >>> sum(r.nbytes for r in ms.saved_residuals(f, x) if r.source == "intermediate")
    8192
    >>> moved = ms.offload(min_bytes=4096)(f)
    >>> sum(r.nbytes for r in ms.saved_residuals(moved, x) if r.source == "intermediate")
    0

    A tensor moves once nothing but backward needs it. One that is kept on the device anyway (a parameter, what the
    caller holds, another view of either) is not copied, since that would free nothing, and views of one storage move
    once. Around `checkpoint` it moves what that keeps: ``compose(offload(), checkpoint())`` moves the region's input.
    Inside one, ``compose(checkpoint(), offload())``, nothing is left to move.

    Under `torch.compile` the region runs uncompiled, at the price of a graph break.

    Args:
        what: ``"activations"``, what autograd saves between forward and backward.
        tier: where to, ``"pinned"``, ``"pageable"`` or ``"disk"``; ``"auto"`` is the nearest that the device has. When
            a tier is full the next one is taken, and at the end of the row the tensor stays where it is, with a
            warning. On a machine without an accelerator the device is RAM, and ``"disk"`` is its only tier.
        min_bytes: smaller storages stay on the device; `None` is the runtime's, 1 MiB unless configured.

    Raises:
        ConfigError: an argument is none of these.
        CorrectnessError: in backward, when a moved tensor was changed in place after it was saved.
        RuntimeUnavailable: in forward, on a device whose tensors nothing here can move.
        TransformError: inside a transform of `torch.func`, in a CUDA graph capture, in a forked process, for sparse
            tensors.

    Cost: saves the region's residuals on the device; pays their way out and back, as far as compute does not hide it.

    Source: Rhu et al., "vDNN: Virtualized Deep Neural Networks" (2016), section III.
    """
    if what == "params":
        raise ConfigError(
            "offload(what='params') is planned and not part of this version; what='activations' is, and is the default"
        )
    if what != "activations":
        raise ConfigError(f"offload(what={what!r}) must be 'activations', the only thing that this version moves")
    if tier not in ("auto", *TIERS):
        raise ConfigError(f"offload(tier={tier!r}) must be one of {', '.join(map(repr, ('auto', *TIERS)))}")
    if min_bytes is not None and (isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0):
        raise ConfigError(f"offload(min_bytes={min_bytes!r}) must be an int of at least 0, or None for the runtime's")
    return Offload(what, tier, min_bytes)


@functools.cache
def _without_dynamo() -> Callable[..., Any]:
    # What a compiled graph keeps is decided by its compiler, before any hook is asked.
    return torch.compiler.disable(_eager)  # type: ignore[no-any-return]


def _eager(self: Offloaded, args: Any, kwargs: Any) -> Any:
    if _functorch.active():
        raise TransformError(
            f"{self.how!r} inside a transform of torch.func, which refuses the saved-tensor hooks that offloading needs "
            "and would keep everything on the device; use checkpoint() there, or plain autograd"
        )
    if not torch.is_grad_enabled():
        return self.fn(*args, **kwargs)
    outer = _autograd._top_saved_tensors_default_hooks(False)
    if outer is not None and getattr(outer[1], "__module__", None) in _RECOMPUTING:
        return self.fn(*args, **kwargs)
    hooks = Hooks(self.runtime or default_runtime(), self.how.tier, self.how.min_bytes, outer)
    _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    try:
        return self.fn(*args, **kwargs)
    except RuntimeError as error:
        if "saved tensor hooks" in str(error) and not isinstance(error, TransformError):
            raise TransformError(
                f"the region of {self.how!r} uses a transform of torch.func, which refuses the saved-tensor hooks that "
                "offloading needs; leave offload() out of this region"
            ) from error
        raise
    finally:
        _autograd._pop_saved_tensors_default_hooks()
        hooks.leave()


class Hooks:
    """What autograd calls with each tensor that a region saves, and with each that its backward asks for."""

    def __init__(self, runtime: Runtime, tier: str, min_bytes: int | None, outer: Any) -> None:
        self._runtime = runtime
        self._tier = tier
        self._min_bytes = runtime.config.min_bytes if min_bytes is None else min_bytes
        self._outer = outer  # hooks around the region: they see what is not moved here
        self._engines: set[Any] = set()

    def pack(self, tensor: torch.Tensor) -> Any:
        """A handle on `tensor` where it may move; otherwise the tensor with the version that it must keep."""
        kind = type(tensor)
        if kind not in _PLAIN or tensor.layout is not torch.strided:
            return self._pack_other(tensor)
        nbytes = tensor.untyped_storage().nbytes()
        if nbytes < self._min_bytes or nbytes == 0 or _is_kept_anyway(tensor):
            if self._outer is not None:
                return _Outer(self._outer[1], self._outer[0](tensor))
            return tensor.detach(), version(tensor)
        with unseen():
            engine = self._runtime.engine(tensor)
            self._engines.add(engine)
            return engine.stash(tensor, tier=self._tier)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor behind what `pack` returned."""
        if type(packed) is tuple:
            tensor, expected = packed
            if version(tensor) != expected:
                raise changed_error(tensor.dtype, tensor.size(), version(tensor), expected)
            return tensor  # type: ignore[no-any-return]
        if type(packed) is Handle:
            with unseen():
                return packed.entry.engine.fetch(packed)
        return packed.unpack(self)  # type: ignore[no-any-return]

    def leave(self) -> None:
        """At the end of the region, where its intermediate values have just gone out of use."""
        for engine in self._engines:
            with unseen():
                engine.look_again()

    def _pack_other(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            raise TransformError(
                f"offload() met a tensor of layout {tensor.layout} among what the region saves, and moves strided ones "
                "only; leave the module that makes it out of the region"
            )
        if is_traceable_wrapper_subclass(tensor):
            return _Parts(self, tensor)
        # A subclass that does not say what it is made of, or one that is only a name for a plain tensor.
        return tensor.detach() if tensor.grad_fn is not None else tensor, version(tensor)


def _is_kept_anyway(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a leaf that is trained, or a view of one: its owner keeps it."""
    if type(tensor) is torch.nn.Parameter or (tensor.is_leaf and tensor.requires_grad):
        return True
    base = tensor._base
    return base is not None and base.is_leaf and base.requires_grad


class _Outer:
    """A tensor that the hooks around the region took."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, unpack: Callable[[Any], torch.Tensor], packed: Any) -> None:
        self._unpack = unpack
        self._packed = packed

    def unpack(self, hooks: Hooks) -> torch.Tensor:
        return self._unpack(self._packed)


class _Parts:
    """A tensor subclass, as the plain tensors that it is made of."""

    __slots__ = ("_context", "_kind", "_packed", "_size", "_stride")

    def __init__(self, hooks: Hooks, tensor: torch.Tensor) -> None:
        names, self._context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        self._kind: Any = type(tensor)
        self._size, self._stride = tensor.size(), tensor.stride()
        self._packed = {name: hooks.pack(getattr(tensor, name)) for name in names}

    def unpack(self, hooks: Hooks) -> torch.Tensor:
        parts = {name: hooks.unpack(packed) for name, packed in self._packed.items()}
        with torch.no_grad():
            return self._kind.__tensor_unflatten__(parts, self._context, self._size, self._stride)  # type: ignore[no-any-return]


factory("offload", offload)
