"""Ctrl-C while the state of a process is exchanged and restored: it waits, so that nothing stays half restored."""

from __future__ import annotations

import importlib
import signal
import threading
from typing import Any

# The module behind `signal`, whose functions look for a handler among the names of an `enum`, in 20 microseconds.
_signals: Any = importlib.import_module("_signal")


class _Interrupts:
    """A context that holds Ctrl-C. It acts at the next `act`, or when the body ends; a second Ctrl-C acts at once.

    Python runs the handlers of signals in the main thread only; in other threads the context does nothing.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._own: Any = None  # the process's handler
        self._held: Any = None  # the arguments for the handler, while a Ctrl-C waits

    def __enter__(self) -> None:
        if not _is_main():
            return
        if not self._depth:
            handler = _signals.getsignal(signal.SIGINT)
            self._own, self._held = handler if callable(handler) else None, None
            if self._own is not None:
                _signals.signal(signal.SIGINT, self._hold)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if not _is_main():
            return
        self._depth -= 1
        if not self._depth and self._own is not None:
            # A step may set a handler of its own, which stays.
            if _signals.getsignal(signal.SIGINT) == self._hold:
                _signals.signal(signal.SIGINT, self._own)
            self.act()

    def act(self) -> None:
        """Passes a Ctrl-C that waits to the process's handler, which raises `KeyboardInterrupt`."""
        if self._held is not None and _is_main():
            given, self._held = self._held, None
            self._own(*given)

    def _hold(self, *given: Any) -> None:
        if self._held is not None:
            self.act()
        else:
            self._held = given


def _is_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident


#: The context in which Ctrl-C waits.
interrupts_held = _Interrupts()
