"""Threads that move bytes, and futures that keep nothing of what was moved."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from memscale.runtime.engine.refusals import refuse_in_fork

T = TypeVar("T")


class CopyFuture(Future[T]):
    """Work that a pool was given, and the `Event` behind it."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    _began_seconds: float | None = None
    _ended_seconds: float | None = None

    def span(self) -> tuple[float, float] | None:
        """When it ran, by `time.perf_counter`: without the time in the queue, which says nothing about a copy."""
        if self._began_seconds is None or self._ended_seconds is None:
            return None
        return self._began_seconds, self._ended_seconds

    def error(self) -> BaseException | None:
        return self.exception() if self.done() else None

    def wait(self) -> None:
        """Let the calling thread come after it, however it ended."""
        if not self.done():
            refuse_in_fork(self._process)  # where it never will be
            self.exception()


class CopyPool:
    """Runs work in threads. By the time a future has a result, the work and the tensors it held are gone.

    The pools of the standard library let go of the work some time later: memory that the caller believes to be free
    would still be there, for as long as the thread takes to come round.

    >>> pool = CopyPool(1, "example")
    >>> pool.submit(lambda: 6 * 7).result()
    42
    """

    def __init__(self, threads: int, name: str) -> None:
        # Dropped, the threads end by themselves once nothing is left to do.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"memscale-{name}")

    def submit(self, run: Callable[[], T]) -> CopyFuture[T]:
        """Queue ``run``; one thread runs what it is given in order. What was queued will run: no future is cancelled.

        Raises:
            RuntimeError: the interpreter ends.
        """
        future: CopyFuture[T] = CopyFuture()
        future.set_running_or_notify_cancel()
        job = [(future, run)]
        del run

        def work() -> None:
            future, run = job.pop()
            future._began_seconds = time.perf_counter()
            try:
                result = run()
            except BaseException as error:  # which belongs to who waits for the result
                future._ended_seconds = time.perf_counter()
                future.set_exception(error)
            else:
                future._ended_seconds = time.perf_counter()
                del run
                future.set_result(result)
            finally:
                # An error's traceback holds this frame, which must not hold the error in turn: such a cycle keeps
                # what the frames below hold until the garbage collector comes by.
                del future

        self._pool.submit(work)
        return future
