"""What a transform makes of a function, and how that becomes the forward of a module.

``module.forward`` of a region is a `Method` of a `Transformed` function of the module's `OwnForward`. Each says what
it is made of, and copies and pickles with its parts. None keeps the module alive: it is in the module's attributes,
and a reference back would be a cycle, which holds the weights until Python's garbage collector runs.
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
)  # the attributes of a module that make it a region


class Transformed(Assembled):
    """A function under a transform. Copies and pickles with the function it holds.

    Attributes:
        fn: the function underneath.
        how: the transform.
        runtime: the one that it uses, where it uses one; `None` is the process's own.
        title: how statistics call it: the path of the module that it is the forward of.
    """

    how: Any  # each transform's own class
    keeps_inputs_only = False  # whether it runs its function again for backward, from inputs that it owns
    not_around_sharded = ""  # why not around modules whose parameters FSDP2 gathers and frees, if that is so

    def __init__(self, fn: Callable[..., Any], how: Transform) -> None:
        self.fn = fn
        self.how = how
        self.runtime: Runtime | None = None
        self.title = getattr(fn, "__qualname__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `fn` returns, computed another way."""
        raise NotImplementedError

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn  # `inspect.signature` and friends see the function underneath

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not isinstance(self.__dict__.get("fn"), nn.Module):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(
            f"{self.how!r}(model) is a function, which computes what the model does, and has no {name!r}; write "
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
    """A transformed function that decides where the parameters which it uses live.

    Attributes:
        resident: those that stay where they are, since others outside of every such region use them too. None for the
            region of a bare function, which no model has looked at.
    """

    def __init__(self, fn: Callable[..., Any], how: Transform) -> None:
        super().__init__(fn, how)
        self.resident: tuple[nn.Parameter, ...] | None = None

    def place(self, parameters: Sequence[torch.Tensor], device: torch.device) -> Any:
        """Let `parameters`, which are those of a module on `device`, live where they are to live."""
        raise NotImplementedError

    def why_none_leaves(self, parameters: Sequence[torch.Tensor]) -> str | None:
        """Why nothing of `parameters` would live elsewhere; None where something would."""
        raise NotImplementedError

    def reassembled(self, remap: Callable[[Any], Any]) -> Any:
        other = super().reassembled(remap)
        other.resident = self.resident
        return other


class OfModule:
    """Something in the attributes of a module, which it does not keep alive. Copies and pickles with the module."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[], nn.Module | None] = weakref.ref(module)

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            TransformError: it is gone.
        """
        module = self._module()
        if module is None:
            raise TransformError(
                "the module of this forward is gone: a region does not keep its module alive; keep the module itself, "
                "not only its forward"
            )
        return module

    def __reduce__(self) -> Any:
        return (_new, (type(self),), {**self.__dict__, "_module": self._module()})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        module = state["_module"]
        self._module = _nowhere if module is None else weakref.ref(module)


def _new(kind: type[OfModule]) -> OfModule:
    return object.__new__(kind)


def _nowhere() -> None:
    """Where a module is that is gone."""


class OwnForward(OfModule, Assembled):
    """A module's own forward as a function: that of its class, or one that somebody put into this object.

    A bound method would not do: it pickles as "the attribute `forward` of the module", which is the region itself.
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
    """`fn` as a method of `module`: to whoever asks it is a bound one, as `module.forward` is of any other module.

    Libraries ask. They take its `__func__`, to bind it to a copy of the module or to wrap it, and its signature. It is
    none of Python's own, since that would keep the module alive, and would be lost when the module is pickled.
    """

    def __init__(self, module: nn.Module, fn: Callable[..., Any]) -> None:
        OfModule.__init__(self, module)
        self.fn = fn
        self._taken: tuple[list[Callable[..., Any]], Callable[..., Any]] | None = None  # what `__func__` calls, itself

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # accelerate's unwrap_model makes types.MethodType(forward, model) of a forward that is bound already.
        # Not under a compiler, which fails at a look at an argument that is a tensor of torch.func.
        if not torch.compiler.is_compiling() and args and isinstance(args[0], nn.Module) and args[0] is self._module():
            args = args[1:]
        return self.fn(*args, **kwargs)

    def rebind(self, fn: Callable[..., Any]) -> None:
        """Call `fn` from here on, also for those who have taken `__func__` before."""
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
        """The function of the module and the arguments of `fn`. Given another module, it runs as that one's forward."""
        if self._taken is not None:
            return self._taken[1]
        # A cell that this and the function share: either of them in the other would be a cycle.
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
        # Who follows this would arrive at the module's own forward.
        del forward.__wrapped__  # type: ignore[attr-defined]
        # A method has the attributes of its function, and Dynamo of PyTorch 2.10 asks the function for them.
        forward.fn = self.fn  # type: ignore[attr-defined]
        module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(self.fn)
        forward.__signature__ = signature.replace(parameters=[module, *signature.parameters.values()])  # type: ignore[attr-defined]
        self._taken = cell, forward
        return forward

    def __getattr__(self, name: str) -> Any:
        # A method has the attributes of its function. One that is being unpickled is still empty.
        if "fn" not in self.__dict__:
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
    """What ``.to()`` and its like call: moves all of a region but the parameters that live elsewhere.

    Region by region, so that a model larger than the device can be moved there too.
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
    """What `nn.DataParallel` calls: refuses, since a replica has the attributes of its original.

    Its forward would be that of the original, with the original's weights.
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


class State(OfModule, Assembled):
    """What a module's copies and pickles are made of, ``__getstate__``: its attributes, those of a region to be copied.

    `copy.copy` takes them as they are, and its copy would run as the original, whatever was changed in it since.
    """

    def __call__(self) -> Any:
        return _state(self.module)

    @property
    def __self__(self) -> nn.Module:
        return self.module

    @property
    def __func__(self) -> Callable[..., Any]:
        return _state  # for libraries that bind the methods of a module to their copy of it, as those of `Method`

    def parts(self) -> tuple[Any, ...]:
        return (self.module,)

    def reassembled(self, remap: Callable[[Any], Any]) -> State:
        return State(remap(self.module))


class _Lent:
    """A method of a region on the way to a copy. A deep copy and a pickle of this is one of the method."""

    def __init__(self, method: Method | State) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise TransformError(
            f"this {type(self.__self__).__name__} is a copy.copy of one under a transform: its forward would "
            "be that of the original; use copy.deepcopy, or transform() what was copied"
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


def _itself(method: Method | State) -> Method | State:
    return method


def _state(module: nn.Module) -> Any:
    own: Any = getattr(type(module), "__getstate__", None)
    plain = own is getattr(object, "__getstate__", None)  # which Python 3.10 has not
    state = module.__dict__ if plain else own(module)
    if not isinstance(state, dict):
        return state
    return {name: _Lent(value) if isinstance(value, (Method, State)) else value for name, value in state.items()}


class ForwardPatch(OfModule):
    """What makes a module a region, and takes that off again: every attribute is then the object that it was.

    Others may wrap or replace the forward in between. Theirs stays, over the module's forward of before.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.attributes = {name: module.__dict__[name] for name in _ATTACHED if name in module.__dict__}
        self.method: Method | None = None

    def apply(self, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let the module's forward run under `how`: inside the forward that others have put over it, where they did."""
        module, before = self.module, self.attributes.get("forward")
        if self.method is None:
            self.method = attach(module, how)
            return
        self.method.rebind(how(OwnForward(module, before)))
        if module.__dict__.get("forward") is before:
            module.__dict__["forward"] = self.method
        _refuse_copies(module)

    def put_back(self) -> Callable[..., Any] | None:
        """Let every attribute be the object that it was, unless the module is gone. `apply` may follow.

        Returns:
            A forward that somebody else has put over the region, which stays; the region under it becomes what was
            there before. None if there is none.
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
            now = now.fn.patched  # of this region, or of a former one that somebody has kept and put back
        if now is before or _is_of(now, self.method):
            return None
        if now is None:  # somebody took off what was there, and the region over it
            del module.__dict__["forward"], self.attributes["forward"]
            return None
        on_top: Callable[..., Any] = now
        module.__dict__["forward"] = on_top
        return on_top


def _is_of(forward: Any, method: Method) -> bool:
    """Whether `forward` is `method`, or what Python binds of it or of its function."""
    function = getattr(forward, "__func__", None)
    return forward is method or function is method or (method._taken is not None and function is method._taken[1])


def attach(module: nn.Module, how: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Method:
    """Make `module` a region: let its forward run under `how`."""
    now = module.__dict__.get("forward")
    inside = now.fn if isinstance(now, Method) and now.module is module else OwnForward(module, now)
    method = Method(module, how(inside))
    module.__dict__["forward"] = method
    _refuse_copies(module)
    return method


def _refuse_copies(module: nn.Module) -> None:
    module.__dict__["_replicate_for_data_parallel"] = Replication(module)
    module.__dict__["__getstate__"] = State(module)


def name_regions(modules: Modules, patches: Iterable[ForwardPatch] = ()) -> None:
    """Give the regions among `modules` their first paths, also those of `patches` that others have wrapped."""
    wrapped = {patch.module: patch.method for patch in patches}
    for path, module in reversed(modules):
        for part in assembled_in(wrapped.get(module) or module.__dict__.get("forward")):
            if isinstance(part, Transformed):
                part.title = path or "(model)"


def placing_in(module: nn.Module) -> list[Placing]:
    """The functions that `module`'s forward is made of which decide where its parameters live, outermost first."""
    return [part for part in assembled_in(module.__dict__.get("forward")) if isinstance(part, Placing)]


def is_transformed(model: nn.Module) -> bool:
    """Whether a module of `model` is a region."""
    forwards = (module.__dict__.get("forward") for module in model.modules())
    # What somebody has kept of a region, and put back after it was taken off, is the module's own forward.
    return any(isinstance(each, Method) and not isinstance(each.fn, OwnForward) for each in forwards)
