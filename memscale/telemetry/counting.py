"""Counts a call of a public verb as one line in a file, if the user allows it: no thread, no lock, nothing at exit."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from typing import Any, TypeVar

from memscale.telemetry.consent import State, consent, folder, is_off
from memscale.telemetry.facts import VerbCall

_F = TypeVar("_F", bound=Callable[..., Any])

_MOST_EVENTS = 64  # per process
_MOST_BYTES = 1 << 20  # per week

_process = os.getpid()  # forks are workers, whose calls are not the user's
_events = 0
_within = threading.local()  # set during a counted call, whose inner calls are not counted


def counted(call: str) -> Callable[[_F], _F]:
    """A decorator that counts the calls of a public verb; while telemetry is off it only checks whether a file exists.

    >>> from memscale.telemetry.counting import counted
    >>> @counted("plan")
    ... def plan(model): return model
    >>> plan(3)
    3
    """

    def around(verb: _F) -> _F:
        @functools.wraps(verb)
        def call_of(*args: Any, **kwargs: Any) -> Any:
            if is_off() or getattr(_within, "call", False):
                return verb(*args, **kwargs)
            _within.call, this = True, VerbCall(call, args, kwargs)
            try:
                this.result = verb(*args, **kwargs)
                return this.result
            except Exception as error:  # any error of the verb is counted, and goes on
                this.error = error
                raise
            finally:
                _within.call = False
                count(f"{call}_called", this.facts)

        return call_of  # type: ignore[return-value]

    return around


def uncounted(verb: _F) -> _F:
    """Returns the undecorated verb, for memscale's own calls."""
    return verb.__wrapped__  # type: ignore[attr-defined, no-any-return]


def count(name: str, facts: Callable[[], Iterable[str]] = tuple) -> None:
    """Adds one to a counter, and to those of the facts. Never raises; on an error nothing is counted.

    >>> from memscale.telemetry import count
    >>> count("command:demo")
    """
    global _events
    try:
        # Cheapest checks first, because telemetry is usually off.
        if is_off() or _events >= _MOST_EVENTS or sys.is_finalizing() or os.getpid() != _process or _is_a_rank():
            return
        if (state := consent().state) is State.OFF:
            return
        _events += 1
        _append(f"{folder()}/{state.value}", " ".join((name, *facts())))
    except Exception:  # for example a full disk or a missing folder: the caller's call must not fail
        return


def week_of(now: datetime) -> str:
    """Returns the ISO 8601 week, such as ``2026-W47``.

    >>> week_of(datetime(2026, 11, 22))
    '2026-W47'
    """
    return now.strftime("%G-W%V")


def _append(place: str, line: str) -> None:
    os.makedirs(place, mode=0o700, exist_ok=True)
    # Neither waits for a pipe, nor follows a link.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
    number = os.open(f"{place}/{week_of(datetime.now(timezone.utc))}.txt", flags, 0o600)
    try:
        if os.fstat(number).st_size < _MOST_BYTES:
            os.write(number, f"{line}\n".encode("ascii"))
    finally:
        os.close(number)


def _is_a_rank() -> bool:
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))
