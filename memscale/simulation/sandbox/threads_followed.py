"""The threads that a simulated step starts: they are the simulation's, and compute nothing either."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from memscale.core import is_own_thread, joining
from memscale.simulation.sandbox.process_state import patched


@contextmanager
def threads_followed(mode: TorchDispatchMode) -> Iterator[None]:
    """Have threads and what is given to a pool of them run under `mode` in the body. Autograd's do by themselves."""
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
