"""Transformed functions, and the classes that install one as the forward of a module.

``module.forward`` of a region is a `Method`, which calls a `Transformed` function, which calls the module's
`OwnForward`. Each lists its parts (`Assembled`), and copies and pickles with them. All of them refer to the module
weakly: they are attributes of the module, and a strong reference would make a cycle, which would keep the weights until
Python's garbage collector runs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from memscale.algebra.composition import Transform
from memscale.algebra.functions import Modules, remapped
from memscale.core import Assembled, TransformError, assembled_in
from memscale.runtime import Runtime

Same = TypeVar("Same", bound="Transformed")
_ATTACHED = (
    "forward",
    "_apply",
    "_replicate_for_data_parallel",
    "__getstate__",
)  # the instance attributes by which a module becomes a region


class Transformed(Assembled):
    """A function under a transform. Copies and pickles with the function it holds.

    Attributes:
        fn: the original function.
        how: the transform.
        runtime: the runtime that the transform uses, if it uses one; `None` is the process's own.
        title: the name in statistics, which is the path of the module.
    """

    how: Any  # subclasses narrow the type to their transform
    keeps_inputs_only = False  # whether it saves only the inputs and recomputes its function in backward
    not_around_sharded = ""  # why it cannot be around modules that FSDP2 shards; empty if it can

    def __init__(self, fn: Callable[..., Any], how: Transform) -> None:
        self.fn = fn
        self.how = how
        self.runtime: Runtime | None = None
        self.title = getattr(fn, "__qualname__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `fn`, computed under the transform."""
        raise NotImplementedError

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn  # `inspect.signature` then shows the signature of the original function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not isinstance(self.__dict__.get("fn"), nn.Module):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{self.how!r}(model) is a function that computes the same as the model, and has no {name!r}; write "
            f"transform(model, {{'': {self.how!r}}}) for a model of the same class, or wrap(model)"
        )

    def parts(self) -> tuple[Any, ...]:
        return (self.fn,)

    def reassembled(self: Same, remap: Callable[[Any], Any]) -> Same:
        other = type(self)(remap(self.fn), self.how)
        other.runtime = self.runtime
        other.title = self.title
        return other

    def __repr__(self) -> str:
        return f"{self.how!r}({self.fn!r})"


class Placing(Transformed):
    """A transformed function that decides in which tier its parameters live.

    Attributes:
        resident: the parameters that stay in place, because modules outside of all such regions use them too. `None`
            for a bare function, which belongs to no model.
    """

    def __init__(self, fn: Callable[..., Any], how: Transform) -> None:
        super().__init__(fn, how)
        self.resident: tuple[nn.Parameter, ...] | None = None

    def place(self, parameters: Sequence[torch.Tensor], device: torch.device) -> Any:
        """Moves `parameters`, those of a module on `device`, to the tiers that the transform chooses."""
        raise NotImplementedError

    def why_none_leaves(self, parameters: Sequence[torch.Tensor]) -> str | None:
        """Returns why the transform would move none of `parameters`, or `None` if it would move some."""
        raise NotImplementedError

    def reassembled(self, remap: Callable[[Any], Any]) -> Any:
        other = super().reassembled(remap)
        other.resident = self.resident
        return other


class OfModule:
    """The base of attributes that refer to their module weakly. Copies and pickles with the module."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            TransformError: the module was freed.
        """
        module = self._module()
        if module is None:
            raise TransformError(
                "the module of this forward is gone: a region's forward does not keep its module alive; "
                "keep the module itself, not only its forward"
            )
        return module

    def __reduce__(self) -> Any:
        return (_new, (type(self),), {**self.__dict__, "_module": self._module()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        module = state["_module"]
        self._module = _no_module if module is None else weakref.ref(module)


def _new(kind: type[OfModule]) -> OfModule:
    return object.__new__(kind)


def _no_module() -> None:
    """Replaces the weak reference to a module that was freed; returns `None`, as a dead reference does."""


class OwnForward(OfModule, Assembled):
    """A module's original forward as a function: the method of its class, or a forward that other code assigned.

    A bound method would pickle as "the attribute `forward` of the module", which is the region itself.
    """

    def __init__(self, module: nn.Module, patched: Callable[..., Any] | None) -> None:
        super().__init__(module)
        self.patched = patched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.patched is not None:
            return self.patched(*args, **kwargs)
        module = self.module
        return type(module).forward(module, *args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.patched or types.MethodType(type(self.module).forward, self.module)

    def parts(self) -> tuple[Any, ...]:
        return (self.module, self.patched)

    def reassembled(self, remap: Callable[[Any], Any]) -> OwnForward:
        return OwnForward(remap(self.module), remap(self.patched))


class Method(OfModule, Assembled):
    """`fn` as a method of `module`, which looks like the bound method that `module.forward` normally is.

    Libraries read its `__func__`, to bind it to a copy of the module or to wrap it, and its signature. A real bound
    method would keep the module alive, and would be lost when the module is pickled.
    """

    def __init__(self, module: nn.Module, fn: Callable[..., Any]) -> None:
        OfModule.__init__(self, module)
        self.fn = fn
        # The cached `__func__`, preceded by the one-item list that holds the function it calls.
        self._taken: tuple[list[Callable[..., Any]], Callable[..., Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # accelerate's unwrap_model calls types.MethodType(forward, model) with a forward that is bound already.
        # Skipped under a compiler, which fails at an isinstance check of a torch.func tensor.
        if not torch.compiler.is_compiling() and args and isinstance(args[0], nn.Module) and args[0] is self._module():
            args = args[1:]
        return self.fn(*args, **kwargs)

    def rebind(self, fn: Callable[..., Any]) -> None:
        """Replaces the function by `fn`, also in a `__func__` that other code already holds."""
        self.fn = fn
        if self._taken is not None:
            self._taken[0][0] = fn

    @property  # type: ignore[misc]  # as `unittest.mock` does, for the same `isinstance`
    def __class__(self) -> Any:
        return types.MethodType

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        """The function of the module and the arguments of `fn`. With another module, it runs that module's forward."""
        if self._taken is not None:
            return self._taken[1]
        # A list that this object and the function share: a reference from one to the other would make a cycle.
        own, cell = self._module, [self.fn]
        others: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Callable[..., Any]]] = weakref.WeakKeyDictionary()

        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            fn = cell[0]
            if (mine := own()) is module:
                return fn(*args, **kwargs)
            if module not in others or others[module][0] is not fn:
                others[module] = fn, remapped(fn, {id(mine): module})
            return others[module][1](*args, **kwargs)

        original = inspect.unwrap(self.fn)
        functools.update_wrapper(forward, original)
        # Removed, since `inspect.unwrap` would otherwise bypass the transform.
        del forward.__wrapped__  # type: ignore[attr-defined]
        # A method has the attributes of its function, and Dynamo of PyTorch 2.10 reads them from the function.
        forward.fn = self.fn  # type: ignore[attr-defined]
        module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(self.fn)
        forward.__signature__ = signature.replace(parameters=[module, *signature.parameters.values()])  # type: ignore[attr-defined]
        self._taken = cell, forward
        return forward

    def __getattr__(self, name: str) -> Any:
        # A method has the attributes of its function. While it is unpickled, it has no `fn` yet; and without its module
        # it has no function, but is copied, with the wrapped model that the module was removed from.
        if "fn" not in self.__dict__ or self._module() is None:
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def parts(self) -> tuple[Any, ...]:
        return (self.fn,)

    def reassembled(self, remap: Callable[[Any], Any]) -> Method:
        return Method(remap(self.module), remap(self.fn))

    def __reduce__(self) -> Any:
        make, args, state = super().__reduce__()
        return make, args, {**state, "_taken": None}


class Relocation(OfModule, Assembled):
    """Replaces ``module._apply``, which ``.to()`` and similar methods call: offloaded parameters stay in their tier.

    Works region by region, so that ``.to()`` also works for a model larger than the device.
    """

    def __init__(self, module: nn.Module, region: Placing) -> None:
        super().__init__(module)
        self.region = region

    def __call__(self, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self.module
        type(module)._apply(module, convert, recurse)
        for parameter in module.parameters():
            if not parameter.is_cpu and not parameter.is_meta:
                self.region.place([parameter], parameter.device)
        return module

    def parts(self) -> tuple[Any, ...]:
        return (self.module,)

    def reassembled(self, remap: Callable[[Any], Any]) -> Relocation:
        return Relocation(remap(self.module), remap(self.region))


class Replication(OfModule, Assembled):
    """Replaces the method that `nn.DataParallel` calls, and raises `TransformError`.

    A replica has the attributes of its original, so its forward would run with the original's weights.
    """

    def __call__(self) -> nn.Module:
        raise TransformError(
            f"nn.DataParallel replicates a {type(self.module).__name__} that is under a transform, and the replicas "
            "would run the original's weights; train one process for each GPU under torchrun "
            "(torch.nn.parallel.DistributedDataParallel), or make one GPU visible (CUDA_VISIBLE_DEVICES=0)"
        )

    def parts(self) -> tuple[Any, ...]:
        return (self.module,)

    def reassembled(self, remap: Callable[[Any], Any]) -> Replication:
        return Replication(remap(self.module))


class StateMethod(OfModule, Assembled):
    """Replaces ``__getstate__``, from which copies and pickles of a module are made: wraps the attributes of a region.

    `copy.copy` would otherwise share the forward, and the copy would run as the original after changes to the copy.
    """

    def __call__(self) -> Any:
        return _state(self.module)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        return _state  # for libraries that bind a module's methods to their copy of the module

    def parts(self) -> tuple[Any, ...]:
        return (self.module,)

    def reassembled(self, remap: Callable[[Any], Any]) -> StateMethod:
        return StateMethod(remap(self.module))


class _Copy:
    """A method of a region inside a copied state. Its deep copy or pickle is a copy of the method itself."""

    def __init__(self, method: Method | StateMethod) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TransformError(
            f"this {type(self.__self__).__name__} is a copy.copy of one under a transform: its forward would "
            "run the original; use copy.deepcopy, or copy the plain model and transform() the copy"
        )

    @property
    def __self__(self) -> nn.Module:
        return self._method.module

    @property
    def __func__(self) -> Callable[..., Any]:
        return self._method.__func__

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._method, memo)

    def __reduce__(self) -> Any:
        return (_itself, (self._method,))


def _itself(method: Method | StateMethod) -> Method | StateMethod:
    return method


def _state(module: nn.Module) -> Any:
    own: Any = getattr(type(module), "__getstate__", None)
    plain = own is getattr(object, "__getstate__", None)  # Python 3.10 has no `object.__getstate__`
    state = module.__dict__ if plain else own(module)
    if not isinstance(state, dict):
        return state
    return {name: _Copy(value) if isinstance(value, (Method, StateMethod)) else value for name, value in state.items()}


class ForwardPatch(OfModule):
    """Makes a module a region, and undoes it: every attribute is then the same object as before.

    Other code may wrap or replace the forward in between. Its wrapper stays, around the module's original forward.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.attributes = {name: module.__dict__[name] for name in _ATTACHED if name in module.__dict__}
        self.method: Method | None = None

    def apply(self, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Puts the module's forward under `how`; inside the wrapper, if other code has wrapped the forward."""
        module, before = self.module, self.attributes.get("forward")
        if self.method is None:
            self.method = attach(module, how)
            return
        self.method.rebind(how(OwnForward(module, before)))
        if module.__dict__.get("forward") is before:
            module.__dict__["forward"] = self.method
        _refuse_copies(module)

    def put_back(self) -> Callable[..., Any] | None:
        """Restores every attribute to the object before `apply`, unless the module was freed. `apply` may follow.

        Returns:
            The wrapper that other code has put around the region, or `None`. A wrapper stays in place, and calls the
            original forward from then on.
        """
        module = self._module()
        if module is None:
            return None
        now, before = module.__dict__.get("forward"), self.attributes.get("forward")
        for name in _ATTACHED:
            module.__dict__.pop(name, None)
        module.__dict__.update(self.attributes)
        if self.method is None:
            return None
        self.method.rebind(OwnForward(module, before))
        while isinstance(now, Method) and isinstance(now.fn, OwnForward):
            now = now.fn.patched  # of this region, or of an earlier one that other code kept and restored
        if now is before or _is_of(now, self.method):
            return None
        if now is None:  # other code deleted the forward, and the region with it
            del module.__dict__["forward"], self.attributes["forward"]
            return None
        on_top: Callable[..., Any] = now
        module.__dict__["forward"] = on_top
        return on_top


def _is_of(forward: Any, method: Method) -> bool:
    """Whether `forward` is `method`, or a bound method made from it or from its function."""
    function = getattr(forward, "__func__", None)
    return forward is method or function is method or (method._taken is not None and function is method._taken[1])


def attach(module: nn.Module, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Method:
    """Makes `module` a region: its forward runs under `how`."""
    now = module.__dict__.get("forward")
    inside = now.fn if isinstance(now, Method) and now.module is module else OwnForward(module, now)
    method = Method(module, how(inside))
    module.__dict__["forward"] = method
    _refuse_copies(module)
    return method


def _refuse_copies(module: nn.Module) -> None:
    module.__dict__["_replicate_for_data_parallel"] = Replication(module)
    module.__dict__["__getstate__"] = StateMethod(module)


def name_regions(modules: Modules, patches: Iterable[ForwardPatch] = ()) -> None:
    """Sets the title of each region to its first path, also for `patches` whose forward other code has wrapped."""
    wrapped = {patch.module: patch.method for patch in patches}
    for path, module in reversed(modules):
        forward = wrapped.get(module) or module.__dict__.get("forward")
        for part in assembled_in(forward) if forward is not None else ():
            if isinstance(part, Transformed):
                part.title = path or "(model)"


def placing_in(module: nn.Module) -> list[Placing]:
    """Returns the `Placing` functions in `module`'s forward, outermost first."""
    return [part for part in assembled_in(module.__dict__.get("forward")) if isinstance(part, Placing)]


def is_transformed(model: nn.Module) -> bool:
    """Whether any module of `model` is a region."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    # A `Method` that other code kept and assigned again after `put_back` calls the module's own forward.
    return any(isinstance(each, Method) and not isinstance(each.fn, OwnForward) for each in forwards)
