"""Whether the present thread simulates a step, and which device it simulates.

A simulated step computes nothing: its tensors are on the CPU, with sizes but without values. Code that moves bytes gets
the simulation's own runtime. This file is for code without a runtime: code that compares values to find the effects of
a region, which must not read memory without values; and code that depends on the device, which must behave as on the
simulated one.

Only the threads of a simulation see it: the thread that simulates, threads that its step starts, and the threads of
autograd, to which PyTorch copies thread-local state. One simulation runs at a time.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_lock = threading.RLock()
_waiting: set[int] = set()  # threads that wait for the lock, by their identity
_numbers = itertools.count()
_keys: list[str] = []  # thread-local keys that mark the threads of each running simulation, outermost first


class Simulated(NamedTuple):
    """The device of a running simulation.

    Attributes:
        device_type: the type of the device.
        type_of: maps a tensor to the type of its device, since some tensors are on the host.
        capability: the compute capability of a CUDA device.
        choices: the generator for choices of the simulation itself, with `get_state` and `set_state`, or `None`.
        randomness: the generators for the random numbers of the step, as attributes `torch`, `python` and `numpy`;
            all threads share those of the process.
    """

    device_type: str
    type_of: Callable[[torch.Tensor], str]
    capability: tuple[int, int] | None
    choices: Any
    randomness: Any


_running: list[Simulated] = []


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Runs the body while no other thread is in this context, since simulations share process-wide state."""
    thread = threading.get_ident()
    _waiting.add(thread)
    try:
        with _lock:  # not `acquire`, after which an interrupt would leave the lock taken
            _waiting.discard(thread)
            yield
    finally:
        _waiting.discard(thread)


def is_alone() -> bool:
    """Whether no other thread of this process runs code that uses PyTorch.

    Threads that do not count: those that wait for a simulation, idle threads of pools, progress bars, test runners, and
    PyTorch's own threads that wait for results of other processes.

    >>> from threading import Event, Thread
    >>> done = Event()
    >>> threads = [Thread(target=done.wait), Thread(target=lambda: torch.ones(1) if done.wait() else None)]
    >>> before = is_alone()
    >>> threads[0].start()
    >>> is_alone() == before
    True
    >>> threads[1].start()
    >>> is_alone()
    False
    >>> done.set()
    >>> for thread in threads:
    ...     thread.join()
    """
    ours = {threading.get_ident(), *_waiting}
    return not any(map(_computes, (frame for each, frame in sys._current_frames().items() if each not in ours)))


def _computes(frame: types.FrameType | None) -> bool:
    """Whether this frame, or a frame that called it, runs a file that uses PyTorch or is importing PyTorch."""
    while frame is not None:
        if not str(frame.f_globals.get("__name__")).startswith(_HANDED_BACK) and (
            "torch" in frame.f_code.co_names or any(map(_is_of_torch, list(frame.f_globals.values())))
        ):
            return True
        frame = frame.f_back
    return False


def _is_of_torch(value: object) -> bool:
    if isinstance(value, types.BuiltinFunctionType):
        value = value.__self__
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0] in _WITH_TENSORS
    named = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return str(named.__module__).partition(".")[0] in _WITH_TENSORS


_WITH_TENSORS = frozenset({"torch", "memscale"})


# Files whose threads only wait for other processes: those of the compiler and of data loaders.
_HANDED_BACK = ("torch._inductor.compile_worker", "torch.utils.data._utils.pin_memory")


@contextmanager
def own_threads() -> Iterator[None]:
    """Marks this thread, and threads started in the body, as threads of the simulation.

    >>> with own_threads():
    ...     is_own_thread()
    True
    >>> is_own_thread()
    False
    """
    with one_at_a_time():
        key = f"memscale.simulation.{next(_numbers)}"
        if not _keys:
            torch._C._stash_obj_in_tls(key, None)
        _keys.append(key)
        try:
            yield
        finally:
            _keys.pop()
            if not _keys:
                _leave(key)


def is_own_thread() -> bool:
    """Whether this thread belongs to a running simulation."""
    return bool(_keys) and torch._C._is_key_in_tls(_keys[0])


def joining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `function` for another thread, which belongs to this thread's simulation while it runs the function.

    >>> from threading import Thread
    >>> found = []
    >>> with own_threads():
    ...     for target in (lambda: found.append(is_own_thread()), joining(lambda: found.append(is_own_thread()))):
    ...         thread = Thread(target=target)
    ...         thread.start()
    ...         thread.join()
    >>> found
    [False, True]
    """
    key = _keys[0]

    def joined(*args: Any, **kwargs: Any) -> Any:
        if key not in _keys or torch._C._is_key_in_tls(key):
            return function(*args, **kwargs)
        torch._C._stash_obj_in_tls(key, None)
        try:
            return function(*args, **kwargs)
        finally:
            _leave(key)

    return joined


def _leave(key: str) -> None:
    """Removes the mark `key` of a simulation from this thread.

    PyTorch before 2.13 cannot remove a key. The thread keeps it, which is harmless: every simulation has a key of its
    own, and the key has no meaning after that simulation has ended.
    """
    if hasattr(torch._C, "_remove_obj_from_tls"):
        torch._C._remove_obj_from_tls(key)


def simulated() -> Simulated | None:
    """Returns the simulation that this thread belongs to, or `None`.

    >>> with simulation("cuda", lambda tensor: "cuda"):
    ...     simulated().device_type
    'cuda'
    """
    return _running[-1] if _running and is_own_thread() else None


def simulating() -> bool:
    """Whether this thread is simulating, so that tensors have no values to compare.

    >>> simulating()
    False
    """
    return simulated() is not None


def device_type(tensor: torch.Tensor) -> str:
    """Returns the type of the device of `tensor`, in a simulation the simulated one.

    Code that decides by the device must call this function instead of reading ``tensor.device.type``.

    >>> device_type(torch.ones(1))
    'cpu'
    >>> with simulation("cuda", lambda tensor: "cuda"):
    ...     device_type(torch.ones(1))
    'cuda'
    """
    here = simulated()
    return tensor.device.type if here is None else here.type_of(tensor)


def compute_capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Returns the compute capability of the CUDA device of `tensor`; `None` on any other device.

    >>> with simulation("cuda", lambda tensor: "cuda", (7, 5)):
    ...     compute_capability(torch.ones(1))
    (7, 5)
    """
    if device_type(tensor) != "cuda":
        return None
    here = simulated()
    return torch.cuda.get_device_capability(tensor.device) if here is None else here.capability


@contextmanager
def simulation(
    device_type: str,
    type_of: Callable[[torch.Tensor], str],
    capability: tuple[int, int] | None = None,
    choices: Any = None,
    randomness: Any = None,
) -> Iterator[None]:
    """Simulates a device in the body.

    Args:
        device_type: the type of the device.
        type_of: maps a tensor to the type of its device, since some tensors are on the host.
        capability: the compute capability of a CUDA device.
        choices: the generator for choices of the simulation itself, with `get_state` and `set_state`.
        randomness: the generators for the random numbers of the step.
    """
    with own_threads():
        _running.append(Simulated(device_type, type_of, capability, choices, randomness))
        try:
            yield
        finally:
            _running.pop()


def _forget() -> None:
    """Resets the state in the child of a fork. Another thread may have held the lock, and does not exist there."""
    global _lock
    if not is_own_thread():
        _lock = threading.RLock()
        _keys.clear()
        _running.clear()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)
