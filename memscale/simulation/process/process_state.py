"""The process state that a simulated step may change, and its restoration.

NOTE: a simulation patches PyTorch and runs the caller's step. Neither may change later computations, or those of other
threads. So each patch (`patched`) applies to the threads of the simulation only, and thread-local state is restored for
the thread. State that all threads share is handled as follows:

=================================  ==================================================================================
generators of PyTorch's CPU,       the step draws from generators of its own (`draws`); the state of the process's
of `random` and of NumPy           generators stays. Missed: an earlier ``from random import random``, NumPy's likewise
garbage collector                  unchanged while another thread runs (`few_collections`)
flags of backends, anomaly         restored, unless another thread runs, which may have set them
detection, number of threads
process group                      made for the simulation if the process has none (`parallel`), and hidden from other
                                   threads
kernels of a card's autocast       registered for a device that no build of PyTorch has (`cuda_fused`), and removed at
and norms                          the end
autocast's cache of casts          shared: any thread that leaves autocast empties the cache, also a simulated step
warnings                           ignored by the functions that the compiler's tracing calls, in this thread
CUDA's device guard                in a build without CUDA, PyTorch's empty guard is installed and stays
two simulations                    run one after the other (`one_at_a_time`)
=================================  ==================================================================================
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from memscale.core import interrupts_held, is_alone, is_own_thread, one_at_a_time, own_threads

_MISSING = object()
_Settings = dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]

_OF_THREAD: _Settings = {
    "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
}
_OF_PROCESS: _Settings = {
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "repeated warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "garbage collection": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "garbage collection thresholds": (gc.get_threshold, lambda threshold: gc.set_threshold(*threshold)),
}
#: The flags that can be read and set: by name, the getter and setter. Tests go through these, too.
SETTINGS: _Settings = {**_OF_THREAD, **_OF_PROCESS}


@contextmanager
def process_kept() -> Iterator[None]:
    """Runs a simulation in the body with the default process state, and restores the state afterwards.

    >>> with process_kept():
    ...     torch.set_grad_enabled(False)
    torch.autograd.grad_mode.set_grad_enabled(mode=False)
    >>> torch.is_grad_enabled()
    True
    """
    settings = SETTINGS if is_alone() else _OF_THREAD
    before = {name: read() for name, (read, _) in settings.items()}
    # Autocast caches casts of weights: the simulation must not read the caller's real casts, nor the caller the
    # simulation's fake casts, which have no values.
    casts = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "mps", "xpu"))
    if casts:
        torch.clear_autocast_cache()
    try:
        yield
    finally:
        if casts:
            torch.clear_autocast_cache()
        settings = settings if is_alone() else _OF_THREAD
        for name, (read, put_back) in settings.items():
            if read() != before[name]:
                put_back(before[name])


def begin_alike() -> None:
    """Makes one autograd node, so that the step's first node has a number above 0, as in any process but a new one.

    Autograd numbers the nodes of a thread from 0. A node that has to wait takes a lower number, and 0 has none below.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).sum()


@contextmanager
def placed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets ``owner.name`` to `value` for all threads in the body, and restores it unless other code has set it."""
    own = vars(owner).get(name, _MISSING)  # missing: the attribute is a base class's, and deletion uncovers it
    setattr(owner, name, value)
    try:
        yield
    finally:
        if vars(owner).get(name) is not value:
            pass
        elif own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces ``owner.name`` by `replacement` in the body, for the threads of the simulation.

    Other threads get the original, and all threads do after the body. A replacement function runs in a frame directly
    below its caller's. A function mode cannot serve here: modes are off during ``Tensor.backward``, and so while a
    checkpoint recomputes.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with ThreadPoolExecutor(1) as others, patched(torch.Tensor, "numel", lambda tensor: -1):
    ...     torch.ones(3).numel(), others.submit(lambda: torch.ones(3).numel()).result()
    (-1, 3)
    >>> "numel" in vars(torch.Tensor)
    False
    """
    with all_patched([(owner, name, replacement)]):
        yield


@contextmanager
def all_patched(patches: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replaces each ``owner.name`` by its replacement in the body, as `patched` does."""
    with own_threads(), ExitStack() as stack:
        for owner, name, replacement in patches:
            stack.enter_context(_patch(owner, name, replacement))
        yield


def _patch(owner: Any, name: str, replacement: Any) -> AbstractContextManager[None]:
    if isinstance(owner, types.ModuleType) and not callable(replacement):
        return _value_patched(owner, name, replacement)
    original = getattr(owner, name)
    answer: Any
    if isinstance(replacement, property):
        answer = _by_thread_read(original, replacement)
    elif isinstance(replacement, staticmethod):
        answer = staticmethod(_by_thread(original, replacement.__func__, name))
    elif owner is torch.Tensor or isinstance(owner, nn.Module):
        answer = _Method(original, replacement)  # in a module a plain object, no function of the module
    else:
        answer = _by_thread(original, replacement, name)
    return placed(owner, name, answer)


def _by_thread(original: Any, replacement: Any, name: str) -> Callable[..., Any]:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs) if is_own_thread() else original(*args, **kwargs)

    answer.__name__ = getattr(original, "__name__", name)
    answer.__doc__ = getattr(original, "__doc__", None)
    return answer


def _by_thread_read(original: Any, replacement: property) -> property:
    given, own = original.__get__, replacement.fget
    assert own is not None, "a property is read"

    def read(owner: Any) -> Any:
        return own(owner) if is_own_thread() else given(owner)

    return property(read, getattr(original, "__set__", None))


class _Method:
    """A replacement for the method `original` that compares equal to it, since tensor subclasses look methods up."""

    def __init__(self, original: Any, run: Callable[..., Any]) -> None:
        self._original = original
        self._run = run
        self.__name__ = original.__name__

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        return self if tensor is None else types.MethodType(self, tensor)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs) if is_own_thread() else self._original(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return other is self or bool(other == self._original)

    def __hash__(self) -> int:
        return hash(self._original)


@contextmanager
def _value_patched(module: types.ModuleType, name: str, value: Any) -> Iterator[None]:
    """Makes ``module.name`` read as `value` for the simulation's threads, by a property on a new module class."""
    kind, own = type(module), vars(module)

    def read(_: Any) -> Any:
        if is_own_thread():
            return value
        if name not in own:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return own[name]

    def write(_: Any, other: Any) -> None:
        own[name] = other

    module.__class__ = type(kind.__name__, (kind,), {name: property(read, write)})
    try:
        yield
    finally:
        module.__class__ = kind


def without_library_caches() -> list[tuple[Any, str, Any]]:
    """Returns patches past the ``lru_cache`` of libraries' questions about CUDA: a simulation changes the answers."""
    return [
        (module, name, question.__wrapped__)
        for module, name, question in _cached_questions(len(sys.modules))
        if id(vars(module).get(name)) == id(question)
    ]


@functools.lru_cache(maxsize=1)
def _cached_questions(modules: int) -> list[tuple[types.ModuleType, str, Any]]:
    """Returns (module, name, function) of cached functions such as ``transformers.utils.is_torch_cuda_available``.

    The argument is the number of loaded modules: a new module makes a new search.
    """
    found: list[Any] = []
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.partition(".")[0] in ("torch", "memscale"):
            continue
        for at, value in list(vars(module).items()):
            if type(value) is _Cached and at.lstrip("_").startswith("is_"):
                code = getattr(value.__wrapped__, "__code__", None)
                if code is not None and "cuda" in code.co_names:
                    found.append((module, at, value))
    return found


_Cached = type(functools.lru_cache(maxsize=1)(lambda: None))


_YOUNG = 100_000  # objects: about as many as a large step makes
EVERY = 500  # operators between collections, so that a cycle of the step, and its tensors, die soon, as in reality


class StepCollections:
    """Runs garbage collections at fixed points of a simulated step.

    Python collects by the number of all objects, including those of the process before: a step with tensors in cycles
    would free them at other moments, and hold other bytes, in each run. If Python's collector is off, these collections
    are off too. All threads share the collector: with another thread, Python's own collections continue, and deaths
    that they find count at the next collection here.

    Args:
        wait: called with True while another collection runs and finds deaths, and with False afterwards.
        settle: called when the deaths found so far count.
    """

    def __init__(self, wait: Callable[[bool], object], settle: Callable[[], object]) -> None:
        self._on = gc.isenabled()
        self._wait = wait
        self._settle = settle
        self._collects = False
        if self._on:
            if is_alone():
                gc.disable()  # `process_kept` enables the collector again
            else:
                gc.callbacks.append(self._noticed)
            gc.collect(1)  # excludes young objects from before the step

    def collect(self) -> None:
        """Collects, after each `EVERY` operators."""
        if self._on:
            self._collects = True
            gc.collect(1)
            self._collects = False
            self._settle()

    def end(self) -> None:
        """Ends the collections."""
        if self._noticed in gc.callbacks:
            gc.callbacks.remove(self._noticed)

    def _noticed(self, phase: str, _: object) -> None:
        if not self._collects:
            self._wait(phase == "start")


class _Known:
    before: frozenset[int] | None = None  # the ids of unfrozen objects from before
    new: frozenset[int] = frozenset()  # the ids of newer objects


def _all_ids() -> frozenset[int]:
    """Returns the ids of the objects that Python's collector tracks.

    A single C call, so that no other thread runs meanwhile: a generator could not extend a tuple that another thread
    holds.
    """
    return frozenset(map(id, chain.from_iterable(islice(iter(gc.get_objects, None), 1))))


@contextmanager
def all_objects_seen() -> Iterator[None]:
    """Makes `gc.get_referrers` see frozen objects in the body, and `is_from_before` know the older objects."""
    before = _Known.before
    _Known.new = frozenset() if before is None else _all_ids() - before
    frozen = gc.get_freeze_count() > 0 and is_alone()
    if frozen:
        gc.unfreeze()
    try:
        yield
    finally:
        _Known.new = frozenset()
        if frozen:
            gc.freeze()


def is_from_before(thing: object) -> bool:
    """Whether `thing` is older than `few_collections`, for objects that the collector tracks."""
    return id(thing) not in _Known.new


@contextmanager
def few_collections() -> Iterator[None]:
    """Makes collections rare in the body and freezes older objects; one thread at a time.

    A simulation makes a hundred thousand objects, half of which stay or are in cycles. At each quarter more, Python
    would go through all objects, half a million of PyTorch's and the model's: a tenth of a simulation's time.
    Where another thread runs, the collector stays unchanged.

    >>> before = gc.get_threshold()
    >>> with few_collections():
    ...     gc.get_threshold()[0] == (100000 if is_alone() else before[0])
    True
    """
    with one_at_a_time():
        if _Known.before is not None:  # inside another body
            yield
            return
        before = gc.get_threshold()
        is_often = is_alone() and gc.isenabled() and 0 < before[0] < _YOUNG
        freezes = is_often and gc.get_freeze_count() == 0  # otherwise the caller's objects stay frozen
        _Known.before = frozenset() if freezes else _all_ids()
        if is_often:
            gc.set_threshold(_YOUNG, *before[1:])
        if freezes:
            gc.freeze()
        try:
            yield
        finally:
            with interrupts_held:
                if freezes:
                    gc.collect()
                    gc.unfreeze()
                if is_often:
                    gc.set_threshold(*before)
                _Known.before = None
