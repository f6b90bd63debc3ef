"""`CopyPool`: threads that copy bytes, and futures that keep no reference to the copied tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from memscale.runtime.engine.refusals import refuse_in_fork

T = TypeVar("T")


class CopyFuture(Future[T]):
    """The future of a job in a pool; also an `Event` of the offload engine."""

    def __init__(self) -> None:
        super().__init__()
        self._process = os.getpid()

    _began_seconds: float | None = None
    _ended_seconds: float | None = None

    def span(self) -> tuple[float, float] | None:
        """Returns when the job ran, in seconds of `time.perf_counter`, without its time in the queue."""
        if self._began_seconds is None or self._ended_seconds is None:
            return None
        return self._began_seconds, self._ended_seconds

    def error(self) -> BaseException | None:
        return self.exception() if self.done() else None

    def wait(self) -> None:
        """Blocks the calling thread until the job has ended, successfully or not."""
        if not self.done():
            refuse_in_fork(self._process)  # in a fork the job never ends
            self.exception()


class CopyPool:
    """Runs jobs in threads. When a future has a result, the job and its tensors have been freed.

    `ThreadPoolExecutor` alone drops a job some time after its result, so memory that the caller believes to be free
    would stay allocated for a while.

    >>> pool = CopyPool(1, "example")
    >>> pool.submit(lambda: 6 * 7).result()
    42
    """

    def __init__(self, threads: int, name: str) -> None:
        # When the pool is dropped, its threads end after the queued jobs.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"memscale-{name}")

    def submit(self, run: Callable[[], T]) -> CopyFuture[T]:
        """Queues ``run``; each thread runs its jobs in order, and no job is cancelled.

        Raises:
            RuntimeError: the interpreter is shutting down.
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
            except BaseException as error:  # raised in the thread that asks for the result
                future._ended_seconds = time.perf_counter()
                future.set_exception(error)
            else:
                future._ended_seconds = time.perf_counter()
                del run
                future.set_result(result)
            finally:
                # An error's traceback holds this frame. If the frame held the future with the error too, the cycle
                # would keep all frames' tensors until the garbage collector runs.
                del future

        self._pool.submit(work)
        return future
