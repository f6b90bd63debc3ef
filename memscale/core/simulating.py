"""Whether a step is being simulated here, and on which device its tensors are to be thought.

A simulated step computes nothing: its tensors are on the CPU, have sizes and no values. What moves bytes is told by the
runtime that the simulation passes in. This is for what has no runtime: code that compares values to learn what a region
changes, over ordinary tensors of memory that nothing may touch; and code that goes another way on another device, which
must go the way of the device that is simulated.

All of that is answered to the threads of the simulation alone: to the one that simulates, to those that its step
starts, and to autograd's, to which PyTorch hands on what it keeps for each thread. One simulation runs at a time.
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

from memscale.core import internals

_lock = threading.RLock()
_waiting: set[int] = set()  # threads that wait for the lock, by their identity
_numbers = itertools.count()
_keys: list[str] = []  # of the simulations that run, by which PyTorch knows their threads; the outermost first


class _Simulated(NamedTuple):
    device_type: str
    type_of: Callable[[torch.Tensor], str]
    capability: tuple[int, int] | None
    choices: Any
    randomness: Any


_running: list[_Simulated] = []


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Run the body when no other thread is in such a body: what simulations share is used by one after the other."""
    if not _lock.acquire(blocking=False):
        _waiting.add(threading.get_ident())
        try:
            _lock.acquire()
        finally:
            _waiting.discard(threading.get_ident())
    try:
        yield
    finally:
        _lock.release()


def is_alone() -> bool:
    """Whether no other thread of this process runs code that has PyTorch at hand.

    Those that wait to simulate do not, nor do those of pools without work, of progress bars and of test runners, nor
    PyTorch's own that wait for what processes beside this one hand back.

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
    """Whether this frame or one that called it has PyTorch in its file, or imports it."""
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


# The compiler's processes, and the loader's: what a thread of these does is to wait for them.
_HANDED_BACK = ("torch._inductor.compile_worker", "torch.utils.data._utils.pin_memory")


@contextmanager
def own_threads() -> Iterator[None]:
    """Let this thread, and those that it starts, be the simulation's in the body.

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
    """Whether this is a thread of the simulation that runs."""
    return bool(_keys) and torch._C._is_key_in_tls(_keys[0])


def joining(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` for another thread, which is the simulation's while it runs that, as long as there is the simulation.

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
    """Let this thread be the simulation's no longer.

    PyTorch before 2.13 has no way to take a key out: there a thread keeps it, which says nothing once the simulation
    that has it, the only one to have it ever, has ended.
    """
    if internals.has(_REMOVING):
        torch._C._remove_obj_from_tls(key)


_REMOVING = "torch._C._remove_obj_from_tls"


def _here() -> _Simulated | None:
    return _running[-1] if _running and is_own_thread() else None


def simulating() -> bool:
    """Whether code runs in a simulation, where comparing values means nothing.

    >>> simulating()
    False
    """
    return _here() is not None


def simulated_device_type() -> str | None:
    """The type of the device that is simulated, None outside of simulations.

    >>> with simulation("cuda", lambda tensor: "cuda"):
    ...     simulated_device_type()
    'cuda'
    """
    here = _here()
    return None if here is None else here.device_type


def device_type(tensor: torch.Tensor) -> str:
    """The type of the device that `tensor` is on, as everything in memscale that decides by it must ask.

    >>> device_type(torch.ones(1))
    'cpu'
    >>> with simulation("cuda", lambda tensor: "cuda"):
    ...     device_type(torch.ones(1))
    'cuda'
    """
    here = _here()
    return tensor.device.type if here is None else here.type_of(tensor)


def compute_capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """That of the CUDA device that `tensor` is on; None on any other.

    >>> with simulation("cuda", lambda tensor: "cuda", (7, 5)):
    ...     compute_capability(torch.ones(1))
    (7, 5)
    """
    if device_type(tensor) != "cuda":
        return None
    here = _here()
    return torch.cuda.get_device_capability(tensor.device) if here is None else here.capability


def simulated_choices() -> Any:
    """What the simulation that runs draws from for itself; None where it draws nothing."""
    here = _here()
    return None if here is None else here.choices


def simulated_randomness() -> Any:
    """The generators in place of the process's own, as its `torch`, `python` and `numpy`; None outside of simulations.

    Those are all threads', and none of them has to see that a step was simulated.
    """
    here = _here()
    return None if here is None else here.randomness


@contextmanager
def simulation(
    device_type: str,
    type_of: Callable[[torch.Tensor], str],
    capability: tuple[int, int] | None = None,
    choices: Any = None,
    randomness: Any = None,
) -> Iterator[None]:
    """Simulate a device of this type in the body, where `type_of` says it of a tensor: some lie beside the device.

    `capability` is the compute capability of a CUDA device. From its `choices`, which have `get_state` and `set_state`,
    the simulation draws random numbers for itself, from the generators of `randomness` those of the step.
    """
    with own_threads():
        _running.append(_Simulated(device_type, type_of, capability, choices, randomness))
        try:
            yield
        finally:
            _running.pop()


def _forget() -> None:
    """In the child of a fork, which has none of the other threads: one may have held the lock."""
    global _lock
    if not is_own_thread():
        _lock = threading.RLock()
        _keys.clear()
        _running.clear()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)
