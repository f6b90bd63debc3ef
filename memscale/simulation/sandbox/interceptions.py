"""Interceptions of calls that no dispatch mode sees: modules, steps of optimizers, threads, reads of storages.

On a card autograd runs in a thread of its own, and so a double backward may run its nodes in another order than in the
simulation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from memscale.algebra import Method, Transformed
from memscale.core import internals, is_own_thread, joining
from memscale.regions import OperatorWatch
from memscale.simulation.dispatch.fake_mode import FakeMode
from memscale.simulation.dispatch.lazy_values import NeedsValues
from memscale.simulation.dispatch.step_recorder import StepRecorder
from memscale.simulation.process.process_state import patched, placed


@contextmanager
def calls_followed(recorder: StepRecorder, paths: dict[int, str]) -> Iterator[None]:
    """Keeps ``recorder.modules`` at the running modules, and charges the host for calls of modules, regions and hooks.

    The patches replace forward hooks, which miss a forward that ends in a `BaseException`, such as a recompute that
    stops early; and modules take a slower path while global hooks exist.
    """
    run, forward, push = nn.Module.__call__, Method.__call__, internals.autograd._push_saved_tensors_default_hooks
    look = OperatorWatch.__torch_dispatch__
    calls = recorder.calls

    def module_run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls("module")
        recorder.modules.append(paths.get(id(module), type(module).__name__))
        try:
            return run(module, *args, **kwargs)
        except Exception as error:
            recorder.place(error)
            raise
        finally:
            recorder.modules.pop()

    def region_run(method: Method, *args: Any, **kwargs: Any) -> Any:
        if isinstance(method.fn, Transformed):  # the forward of a wrapped whole model is excluded
            calls("region")
        return forward(method, *args, **kwargs)

    def packed(pack: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> Any:
        calls("saved")
        return pack(tensor)

    def pushed(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        # A partial, since a closure would live in the frames of an error's traceback, with a failed step's tensors.
        packing: Any = functools.update_wrapper(functools.partial(packed, pack), pack)
        packing.__self__ = getattr(pack, "__self__", None)  # regions read `__self__`
        calls("region")
        push(packing, unpack)

    def looked(mode: OperatorWatch, *args: Any, **kwargs: Any) -> Any:
        calls("watched")
        return look(mode, *args, **kwargs)

    with (
        patched(OperatorWatch, "__torch_dispatch__", looked),
        patched(nn.Module, "__call__", module_run),
        patched(Method, "__call__", region_run),
        patched(internals.autograd, "_push_saved_tensors_default_hooks", pushed),
    ):
        yield


@contextmanager
def threads_followed(mode: TorchDispatchMode) -> Iterator[None]:
    """Runs threads and the work of thread pools under `mode` in the body. Autograd's threads inherit the mode."""
    start, submit = Thread.start, ThreadPoolExecutor.submit

    def under(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not is_own_thread():  # the simulation is over
                return function(*args, **kwargs)
            with mode:
                return function(*args, **kwargs)

        return joining(run)

    def started(thread: Thread) -> None:
        thread.run = under(thread.run)  # type: ignore[method-assign]
        start(thread)

    def submitted(pool: ThreadPoolExecutor, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        return submit(pool, under(function), *args, **kwargs)

    with patched(Thread, "start", started), patched(ThreadPoolExecutor, "submit", submitted):
        yield


_Hook = Callable[[torch.optim.Optimizer, Any, Any], None]


@contextmanager
def optimizers_followed(before: _Hook, after: _Hook) -> Iterator[None]:
    """Calls `before` and `after` around each step of an optimizer in the threads of the simulation.

    PyTorch would call a global optimizer hook in all threads. Here the wrapper of `step`, and no other code, finds one
    more hook among the optimizer's own hooks.
    """
    names = ("_optimizer_step_pre_hooks", before), ("_optimizer_step_post_hooks", after)
    (pre, first), (post, last) = names
    with (
        placed(torch.optim.Optimizer, pre, _Hooks(pre, first)),
        placed(torch.optim.Optimizer, post, _Hooks(post, last)),
    ):
        yield


class _Hooks:
    """A descriptor in place of an optimizer's table of hooks, with one more hook for the wrapper of `step`."""

    def __init__(self, name: str, hook: _Hook) -> None:
        self._name = name
        self._hook = hook

    def __get__(self, optimizer: Any, owner: Any = None) -> Any:
        if optimizer is None:
            return self
        try:
            own = optimizer.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None
        caller = sys._getframe(1).f_code
        if caller.co_name == "wrapper" and caller.co_filename == _WRAPPER.co_filename and is_own_thread():
            return {**own, self: self._hook}
        return own

    def __set__(self, optimizer: Any, hooks: Any) -> None:
        optimizer.__dict__[self._name] = hooks

    def __delete__(self, optimizer: Any) -> None:
        del optimizer.__dict__[self._name]


_WRAPPER = torch.optim.Optimizer.profile_hook_step.__code__


@contextmanager
def reads_checked(mode: FakeMode) -> Iterator[None]:
    """Makes reads outside the dispatcher raise `NeedsValues` for tensors whose values only a real run computes."""

    def checked(name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                return original(tensor, *args, **kwargs)
            with _disable_current_modes():  # reads the values outside of the step
                values = mode.values.of(tensor)
                if values is None:
                    raise NeedsValues(
                        f"Tensor.{name}() reads values that only a real run computes", mode.recorder.path()
                    )
                return original(values, *args, **kwargs)

        return read

    def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        mode.storages.resized(storage, nbytes)
        return storage

    def size(storage: torch.UntypedStorage) -> int:
        return mode.storages.size(storage)

    with (
        patched(torch.Tensor, "tolist", checked("tolist")),
        patched(torch.Tensor, "numpy", checked("numpy")),
        patched(torch.UntypedStorage, "resize_", resize),
        patched(torch.UntypedStorage, "size", size),
    ):
        yield
