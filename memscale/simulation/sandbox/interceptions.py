"""Interceptions of calls that no dispatch mode sees: modules, steps of optimizers, threads, reads of storages.

`BackwardThread` orders a double backward as on a card, where autograd runs in its own thread. Autograd runs the ready
node with the highest sequence number, and each thread numbers the nodes that it makes. On a card the nodes of a
backward's graph (``create_graph=True``) have numbers of the card's thread. These are mostly lower than the numbers of
the caller's thread, so the backward's nodes run after the forward's nodes. On a CPU one thread makes all nodes, and the
backward's nodes run first.

Source: ``Node`` in torch/csrc/autograd/function.h, ``CompareNodeTaskTime`` in torch/csrc/autograd/engine.h.
"""

from __future__ import annotations

import functools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
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
from memscale.simulation.process.process_state import all_patched, patched, placed


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

    of_tensors = [(torch.Tensor, name, checked(name)) for name in ("tolist", "numpy")]
    size, resize = mode.storages.size, mode.storages.resized
    with all_patched([*of_tensors, (torch.UntypedStorage, "size", size), (torch.UntypedStorage, "resize_", resize)]):
        yield


class BackwardThread:
    """Numbers the nodes that backward makes as a card's thread would.

    Args:
        recorder: receives the original number of each renumbered node, and whether the next step may run in another
            order.
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._ahead = 0  # the count of the card's thread, relative to the caller's
        self._began = _next()
        self._made = 0  # nodes made by backward in this step
        self.begin_step()

    def begin_step(self) -> None:
        """Begins the next step, under the assumption that it makes as many nodes as the step before."""
        self._to_be_made = self._made
        self._ahead += 2 * self._made - (_next() - self._began)
        self._recorder.made_as.clear()
        self._began = _next()
        self._made = 0
        # For each run of nodes of the caller's thread: the count of the caller's nodes before the run, and the sequence
        # number of the run's first node.
        self._runs = [(0, self._began)]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Patches autograd so that every backward in the body numbers its nodes like a card's thread."""
        run = self._numbering(torch.autograd.graph._engine_run_backward)
        with (
            patched(torch.autograd.graph, "_engine_run_backward", run),
            patched(torch.autograd, "_engine_run_backward", run),
        ):
            yield

    def _numbering(self, engine: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() != -1:  # a backward inside another runs in the card's thread
                return engine(outputs, gradients, retain_graph, create_graph, *args, **kwargs)
            first = _next()
            found = engine(outputs, gradients, retain_graph, create_graph, *args, **kwargs)
            if create_graph:
                leaves = [getattr(node, "variable", None) for node in _below(outputs, 0)]
                self._number([*(found or ()), *(leaf.grad for leaf in leaves if leaf is not None)], first)
            self._made += _next() - first
            self._runs.append((_next() - self._began - self._made, _next()))
            return found

        return run

    def _number(self, found: Iterable[torch.Tensor | None], first: int) -> None:
        following = _next()
        callers = first - self._began - self._made
        later = max(0, self._to_be_made - self._made - (following - first))
        for node in _below(found, first):
            made = node._sequence_nr()
            if made < following:  # AccumulateGrad nodes have the highest numbers
                number = self._made + made - first
                place = number + self._ahead
                if 0 <= place < callers:
                    before, begin = self._runs[bisect_right(self._runs, (place, following)) - 1]
                    number = begin + place - before
                elif place >= callers:
                    number = following + place - callers + later
                node._set_sequence_nr(number)
                self._recorder.made_as[number] = made
                self._recorder.settled = False


def _next() -> int:
    """Returns the sequence number of the next node that this thread makes."""
    return torch._C._autograd._get_sequence_nr()


def _below(tensors: Iterable[torch.Tensor | None], first: int) -> list[Any]:
    """Returns the nodes of the graphs of `tensors` with sequence number `first` or later."""
    rest = [each.node if hasattr(each, "node") else each.grad_fn for each in tensors if each is not None]
    found: dict[Any, None] = {}
    while rest:
        node = rest.pop()
        if node is not None and node not in found and node._sequence_nr() >= first:
            found[node] = None
            rest += [following for following, _ in node.next_functions]
    return list(found)
