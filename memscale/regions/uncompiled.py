"""What runs uncompiled under `torch.compile`, and what is constant there."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from memscale.core import TransformError, internals
from memscale.regions import functorch_state

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(run: Callable[..., Any], why: str, *arguments: Any, **named: Any) -> Any:
    """``run(*arguments, **named)``, at the price of a graph break where Dynamo traces it, which reports `why`."""
    # In a `try`, because Dynamo cannot resume in the middle of one, and so leaves this whole frame to Python.
    try:
        if torch.compiler.is_compiling():
            if functorch_state.active():
                # Dynamo leaves all of the transform to Python. After a break inside a `vjp` PyTorch 2.10 gives zeros.
                raise TransformError(f"{why}, which torch.compile cannot trace inside a transform of torch.func")
            torch._dynamo.graph_break(msg=why)
    finally:
        pass
    return without_dynamo(run)(*arguments, **named)


def without_dynamo(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` itself where Dynamo is not at work, else out of its reach; loading it takes longer than importing memscale.

    >>> without_dynamo(len)("abc")
    3
    """
    return run if _dynamo_callback() is None else _disabled(run)


# What Dynamo may do with the frames of a function, and with those that these call.
_set_strategy = internals.named("torch._C._dynamo.eval_frame.set_code_exec_strategy")
_Strategy = internals.named("torch._C._dynamo.eval_frame._FrameExecStrategy")
_Action = internals.named("torch._C._dynamo.eval_frame._FrameAction")
_can_skip = internals.has("torch._C._dynamo.eval_frame.set_code_exec_strategy")  # and so the others


def never_compiled(entry: F) -> F:
    """`entry`, a function that PyTorch calls from C++: Dynamo leaves it, and all that it calls, to Python.

    While a compiled function runs what lies between its graphs, a backward say, Dynamo takes every new frame for one to
    compile. In a hook of ours it would take versions, bases and sizes for constants.
    """
    if _can_skip:
        _set_strategy(entry.__code__, _Strategy(_Action.SKIP, _Action.SKIP))
    return entry


def floats_as_constants() -> AbstractContextManager[None]:
    """Where Dynamo traces with ``dynamic=True``: what is read in here, an epsilon say, is a constant, with a guard.

    Else it makes each float that it meets an input, and the number of that in whichever body of a checkpoint read it
    first, where no second body finds it: an AssertionError, with `torch.utils.checkpoint` as well.
    """
    if not internals.has("torch._dynamo.decorators.DynamoConfigPatchProxy"):
        return nullcontext()
    patch = torch._dynamo.config.patch(specialize_float=True)
    return torch._dynamo.decorators.DynamoConfigPatchProxy(patch)


# Dynamo calls it, and takes what it returns for a patch that its trace enters.
floats_as_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]

_c = torch._C

# What CPython calls with each new frame.
_dynamo_callback = internals.named("torch._C._dynamo.eval_frame.get_eval_frame_callback")


@functools.cache
def _disabled(run: Callable[..., Any]) -> Callable[..., Any]:
    # What a compiled graph keeps is decided by its compiler, before any hook is asked.
    return torch.compiler.disable(run)  # type: ignore[no-any-return]


_NO_KEYWORDS: dict[str, Any] = {}


class OperatorWatch(internals.TorchDispatchMode):
    """A dispatch mode of ours: `on_call` is called with each operator, and calls it.

    PyTorch keeps Dynamo away from a mode by loading it, at the first operator that the mode sees.
    """

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
        if _changes_lists(func):
            with _new_versions(args[0]):
                return without_dynamo(type(self).on_call)(self, func, args, kwargs or {})
        if _dynamo_callback() is None:
            return self.on_call(func, args, kwargs or _NO_KEYWORDS)
        return _disabled(type(self).on_call)(self, func, args, kwargs or {})

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of `func`."""
        raise NotImplementedError


@functools.lru_cache(maxsize=4096)
def _changes_lists(func: Any) -> bool:
    return (
        isinstance(func, internals.OpOverload) and re.fullmatch(r"aten::_foreach_\w+_", func._schema.name) is not None
    )


@contextmanager
def _new_versions(changed: Iterable[Any]) -> Iterator[None]:
    """Give tensors that an operator changes in place new versions, which under a mode PyTorch does not do for lists.

    Autograd, and whoever saves a tensor, would not notice that it was changed.
    """
    tensors = [each for each in changed if isinstance(each, torch.Tensor) and not each.is_inference()]
    before = [each._version for each in tensors]
    yield
    for each, then in zip(tensors, before, strict=True):
        if each._version == then:
            torch.autograd.graph.increment_version(each)


def _as_without_a_mode(func: Any) -> AbstractContextManager[Any]:
    """Where an operator made of others takes the kernels that it takes when no mode sees it, in inference mode.

    There it comes to a mode whole, below the key that makes views. The view that `linear` makes of a weight would be
    none of one that requires gradients, by which `matmul` chooses its kernel.
    """
    if not _is_made_of_others(func):
        return nullcontext()
    views = _c.DispatchKeySet(_c.DispatchKey.ADInplaceOrView)
    guard: AbstractContextManager[Any] = _c._ForceDispatchKeyGuard(
        _c._dispatch_tls_local_include_set(), _c._dispatch_tls_local_exclude_set() - views
    )
    return guard


@functools.lru_cache(maxsize=4096)
def _is_made_of_others(func: Any) -> bool:
    # Operators of higher order have no kernels.
    return isinstance(func, internals.OpOverload) and _c._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    )
