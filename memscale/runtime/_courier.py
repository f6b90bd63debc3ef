"""Threads that move bytes, and futures that keep nothing of what was moved."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Courier:
    """Runs work in threads. By the time a future has a result, the work and the tensors it held are gone.

    The pools of the standard library let go of the work some time later: memory that the caller believes to be free
    would still be there, for as long as the thread takes to come round.

    >>> courier = Courier(1, "example")
    >>> courier.submit(lambda: 6 * 7).result()
    42
    >>> courier.close()
    """

    def __init__(self, threads: int, name: str) -> None:
        # Dropped without `close`, the threads end by themselves once nothing is left to do.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"memscale-{name}")

    def submit(self, run: Callable[[], T]) -> Future[T]:
        """Queue ``run``; one thread runs what it is given in order. What was queued will run: no future is cancelled.

        Raises:
            RuntimeError: the courier was closed, or the interpreter ends.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        job = [(future, run)]
        del run

        def work() -> None:
            future, run = job.pop()
            try:
                result = run()
            except BaseException as error:
                future.set_exception(error)
            else:
                del run
                future.set_result(result)
            finally:
                # An error's traceback holds this frame, which must not hold the error in turn: such a cycle keeps
                # what the frames below hold until the garbage collector comes by.
                del future

        self._pool.submit(work)
        return future

    def close(self) -> None:
        """Wait until everything that was queued has run."""
        self._pool.shutdown()
