"""Sends runs to a server: each run waits in a local file until the server acknowledges it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from memscale.core import HISTORY, MemscaleError
from memscale.history.database import History
from memscale.history.remote import Refused, Remote
from memscale.history.run import Run

_log = logging.getLogger(__name__)
_sending = threading.Lock()
# Statuses after which another attempt may succeed: no valid token or project yet, too many requests, server trouble.
_FOR_NOW = (401, 403, 404, 408, 429)


def is_address(place: object) -> bool:
    """Whether `place` is the address of a server rather than a file."""
    return isinstance(place, str) and place.startswith(("https://", "http://"))


def queue_path() -> Path:
    """Returns the file in which runs wait: ``$MEMSCALE_HISTORY``, or a file in the user's state folder."""
    if chosen := os.environ.get(HISTORY):
        return Path(chosen)
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "memscale"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / "history.db"


def send_later(run: Run, url: str) -> None:
    """Adds a run to the local file, and sends all waiting runs in a daemon thread.

    Raises:
        ConfigError: the address is not a project's, or the file cannot be written.
    """
    remote = Remote(url)
    with History(queue_path()) as history:
        history.add(run, send_to=remote.url)
    threading.Thread(target=_send_quietly, name="memscale-history", daemon=True).start()


def _send_quietly() -> None:
    if not _sending.acquire(blocking=False):  # the thread that holds it checks the queue again before it ends
        return
    try:
        with History(queue_path()) as history:
            while send(history, lambda run, url, said: _log.debug("%s to %s: %s", run.id, url, said)):
                pass
    except (MemscaleError, OSError) as error:
        _log.info("runs wait in %s: %s", queue_path(), error)
    finally:
        _sending.release()


def send(history: History, report: Callable[[Run, str, str], None]) -> int:
    """Sends every waiting run, and returns how many were newly acknowledged.

    Args:
        history: the file in which the runs wait.
        report: called with each run, its address and the outcome.

    Raises:
        ConfigError: there is no token.
        RuntimeUnavailable: a server cannot be reached; runs that were not acknowledged stay in the queue.
        Refused: a server is in trouble, or does not know the token or the project; the queue stays likewise.
    """
    sent = 0
    for run, url, stamp in history.waiting():
        try:
            new = Remote(url).send(run)
        except Refused as refused:
            if refused.status in _FOR_NOW or refused.status >= 500:
                raise
            report(run, url, str(refused))  # the server rejects this run, so another attempt is useless
            history.delivered(run, url, stamp)
            continue
        history.delivered(run, url, stamp)
        report(run, url, "new" if new else "was there")
        sent += 1
    return sent
