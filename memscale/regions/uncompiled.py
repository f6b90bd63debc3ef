"""Keeps code of memscale out of `torch.compile`, and makes values constant to it."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch

from memscale.core import TransformError, internals
from memscale.regions import functorch_state

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(run: Callable[..., Any], why: str, *arguments: Any, **named: Any) -> Any:
    """Returns ``run(*arguments, **named)``. Where Dynamo traces the call, it breaks the graph and reports `why`."""
    # Inside a `try`, because Dynamo cannot resume in the middle of one, so it leaves this whole frame to Python.
    try:
        if torch.compiler.is_compiling():
            if functorch_state.active():
                # An error, since after a graph break inside a `vjp` PyTorch 2.10 returns zero gradients.
                raise TransformError(f"{why}, which torch.compile cannot trace inside a transform of torch.func")
            torch._dynamo.graph_break(msg=why)
    finally:
        pass
    return without_dynamo(run)(*arguments, **named)


def without_dynamo(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run`, disabled for Dynamo if Dynamo is active. Loading Dynamo takes longer than importing memscale.

    >>> without_dynamo(len)("abc")
    3
    """
    return run if _dynamo_callback() is None else _disabled(run)


# PyTorch's private API that tells Dynamo what to do with the frames of a function and with the frames that they call.
_set_strategy = internals.named("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy = internals.named("torch._C._dynamo.eval_frame._FrameExecStrategy")
_Action = internals.named("torch._C._dynamo.eval_frame._FrameAction")
_can_skip = internals.has("torch._C._dynamo.eval_frame.set_code_exec_strategy")  # implies the other two


def never_compiled(entry: F) -> F:
    """Marks `entry`, a function that PyTorch calls from C++, so that Dynamo never compiles it or a function it calls.

    While a compiled function runs Python code between its graphs, such as a backward, Dynamo tries to compile every new
    frame. In a hook of ours it would treat versions, bases and sizes as constants.
    """
    if _can_skip:
        _set_strategy(entry.__code__, _Strategy(_Action.SKIP, _Action.SKIP))
    return entry


def floats_as_constants() -> AbstractContextManager[None]:
    """Returns a context in which Dynamo treats floats, such as an epsilon, as constants with a guard.

    With ``dynamic=True`` Dynamo makes each float a graph input, which it registers in the checkpoint body that reads
    the float first. A second body that reads the float fails with an AssertionError, also in `torch.utils.checkpoint`.
    """
    if not internals.has("torch._dynamo.decorators.DynamoConfigPatchProxy"):
        return nullcontext()
    patch = torch._dynamo.config.patch(specialize_float=True)
    return torch._dynamo.decorators.DynamoConfigPatchProxy(patch)


# Makes Dynamo call the function while tracing, and enter the returned patch in its trace.
floats_as_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]

_c = torch._C

# Returns the callback that CPython calls with each new frame.
_dynamo_callback = internals.named("torch._C._dynamo.eval_frame.get_eval_frame_callback")


@functools.cache
def _disabled(run: Callable[..., Any]) -> Callable[..., Any]:
    # Hooks inside compiled code would have no effect: its compiler decides what a graph saves.
    return torch.compiler.disable(run)  # type: ignore[no-any-return]


_NO_KEYWORDS: dict[str, Any] = {}


class OperatorWatch(internals.TorchDispatchMode):
    """The base of memscale's dispatch modes: `on_call` gets each operator and must call it.

    PyTorch's own way to exclude a mode from Dynamo loads Dynamo at the first operator; this class avoids that.

    Attributes:
        keeps_compiled: whether compiled code under the mode stays compiled, so that `on_call` does not get its
            operators. Else code that first runs under the mode is never compiled, and in `torch.cond`, which PyTorch
            compiles, tensors of closures get no gradients.
    """

    keeps_compiled: ClassVar[bool] = False
    # `on_call` gets an operator of higher order (`torch.cond`) as a whole, without the operators that it runs.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return cls.keeps_compiled

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @never_compiled
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled():
            with _as_without_a_mode(func):
                return without_dynamo(type(self).on_call)(self, func, args, kwargs or {})
        if (around := _context_of(func)) is not None:
            with around(args):
                return without_dynamo(type(self).on_call)(self, func, args, kwargs or {})
        if _dynamo_callback() is None:
            return self.on_call(func, args, kwargs or _NO_KEYWORDS)
        return _disabled(type(self).on_call)(self, func, args, kwargs or {})

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `func` and returns its result. A subclass observes or changes the call."""
        raise NotImplementedError


_Around = Callable[[tuple[Any, ...]], AbstractContextManager[Any]]
_known: dict[int, tuple[Any, _Around | None]] = {}  # by id, since operators hash in Python, in a microsecond


def _context_of(func: Any) -> _Around | None:
    """Returns what makes, from the arguments, the context in which `func` must run under a mode; `None` for most."""
    if (found := _known.get(id(func))) is None:
        name = func._schema.name if isinstance(func, internals.OpOverload) else ""
        around: _Around | None = None
        if re.fullmatch(r"aten::_foreach_\w+_", name):
            around = _new_versions
        elif name in ("aten::linalg_pinv", "aten::linalg_lstsq"):
            around = _with_conjugate_views
        found = _known[id(func)] = func, around  # the reference keeps the id from being used again
    return found[1]


@contextmanager
def _new_versions(args: tuple[Any, ...]) -> Iterator[None]:
    """Increments the versions of the tensors in the first argument, which the body changes in place.

    Under a mode PyTorch does not do so for lists of tensors, and autograd would miss the change of a saved tensor.
    """
    tensors = [each for each in args[0] if isinstance(each, torch.Tensor) and not each.is_inference()]
    before = [each._version for each in tensors]
    yield
    for each, then in zip(tensors, before, strict=True):
        if each._version == then:
            torch.autograd.graph.increment_version(each)


def _as_without_a_mode(func: Any) -> AbstractContextManager[Any]:
    """Returns a context in which a composite operator, in inference mode, chooses the same kernels as without a mode.

    In inference mode a composite operator reaches a mode undecomposed, below the dispatch key that tracks views. The
    view that `linear` makes of its weight would lose `requires_grad`, by which `matmul` chooses its kernel.
    """
    if not _is_made_of_others(func):
        return nullcontext()
    return _with_keys(_c.DispatchKeySet(_c.DispatchKey.ADInplaceOrView))


def _with_conjugate_views(_: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Returns a context in which an operator's kernel sees that a tensor is a view that conjugates.

    `linalg.pinv` and `linalg.lstsq` of complex tensors make such views inside their kernels. Under a mode PyTorch reads
    these views as if they did not conjugate, and returns other numbers without an error.
    """
    return _with_keys(_c.DispatchKeySet(_c.DispatchKey.Conjugate))


def _with_keys(keys: Any) -> AbstractContextManager[Any]:
    """Returns a context in which the dispatcher uses `keys`, which it leaves out under a mode."""
    guard: AbstractContextManager[Any] = _c._ForceDispatchKeyGuard(
        _c._dispatch_tls_local_include_set(), _c._dispatch_tls_local_exclude_set() - keys
    )
    return guard


@functools.lru_cache(maxsize=4096)
def _is_made_of_others(func: Any) -> bool:
    # Only an `OpOverload` has kernels; a higher-order operator has none.
    return isinstance(func, internals.OpOverload) and _c._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
