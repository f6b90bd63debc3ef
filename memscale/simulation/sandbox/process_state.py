"""What a simulated step may touch of the process that it runs in, in one place, and how each is put back.

A simulation patches PyTorch, and the step that it runs is the caller's: either may leave something for whoever computes
next, who would get other numbers or none. Beside what `untouched` keeps (flags, autocast, random states, global hooks)
it is this. What it patches it patches by `patched`.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_C: Any = torch._C
_MISSING = object()
_SEED = 0  # any would do

#: What can be read and set: by name, how. Tests go through these, too.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "gradients": (torch.is_grad_enabled, _C._set_grad_enabled),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "threads of backward": (_C._is_multithreading_enabled, _C._set_multithreading_enabled),
    "views replayed": (_C._is_view_replay_enabled, _C._set_view_replay_enabled),
    "where tensors are lifted": (_C._only_lift_cpu_tensors, _C._set_only_lift_cpu_tensors),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "repeated warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "garbage collection": (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    "how often it comes": (gc.get_threshold, lambda threshold: gc.set_threshold(*threshold)),
}


@contextmanager
def process_kept() -> Iterator[None]:
    """Run the body, a simulation, as in a process that did nothing before, and leave this one as it was.

    >>> with process_kept():
    ...     torch.set_warn_always(True)
    >>> torch.is_warn_always_enabled()
    False
    """
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    # Under the caller's autocast weights are cast once and kept: real ones are not for the simulation, and its hollow
    # ones, which have no values, not for the caller.
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for name, (read, put_back) in SETTINGS.items():
            if read() != before[name]:
                put_back(before[name])


def begin_alike() -> None:
    """Let a step draw (which experts, which layers) and order its nodes as in every other process.

    Whoever calls has taken the states of the generators, and puts them back.
    """
    # Autograd numbers the nodes of a thread. The first is 0, below which there is no place for one that has to wait.
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).sum()
    torch.default_generator.manual_seed(_SEED)
    random.seed(_SEED)
    np.random.seed(_SEED)


@contextmanager
def patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """``owner.name`` is `replacement`, for those who look it up when they call it; afterwards it is what it was.

    Not by a mode: those are off while ``Tensor.backward`` runs, and so while a checkpoint recomputes.

    >>> with patched(torch.Tensor, "numel", lambda tensor: -1):
    ...     torch.ones(3).numel()
    -1
    >>> torch.ones(3).numel(), "numel" in vars(torch.Tensor)
    (3, False)
    """
    own = vars(owner).get(name, _MISSING)  # an attribute of a base, such as the C++ class of a tensor, shows again
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def answers_forgotten() -> Iterator[None]:
    """Have libraries ask again, in the body and after it, what they asked about CUDA devices and keep: it differs."""
    _forget_answers()
    try:
        yield
    finally:
        _forget_answers()


def _forget_answers() -> None:
    for question in _kept_answers(len(sys.modules)):
        question.cache_clear()


@functools.lru_cache(maxsize=1)
def _kept_answers(modules: int) -> list[Any]:
    """Functions such as ``transformers.utils.is_torch_cuda_available``, of as many modules as are loaded."""
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or name.partition(".")[0] in ("torch", "memscale"):
            continue
        for at, value in list(vars(module).items()):
            if type(value) is _Cached and at.lstrip("_").startswith("is_"):
                code = getattr(value.__wrapped__, "__code__", None)
                if code is not None and "cuda" in code.co_names:
                    found[id(value)] = value
    return list(found.values())


_Cached = type(functools.lru_cache(maxsize=1)(lambda: None))
