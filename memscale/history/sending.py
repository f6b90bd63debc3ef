"""Runs on their way to a server: each waits in a local file until the server says that it has it."""

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
# Answers that another attempt may change: no valid token yet, no project yet, too many requests, a server in trouble.
_FOR_NOW = (401, 403, 404, 408, 429)


def is_address(place: object) -> bool:
    """Whether a place to record in is a server's address, and not a file."""
    return isinstance(place, str) and place.startswith(("https://", "http://"))


def queue_path() -> Path:
    """The file in which runs wait: ``$MEMSCALE_HISTORY``, or one in the user's folder for state."""
    if chosen := os.environ.get(HISTORY):
        return Path(chosen)
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "memscale"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / "history.db"


def send_later(run: Run, url: str) -> None:
    """Keep a run in the local file, and send what waits there from a thread that nothing waits for.

    Raises:
        ConfigError: the address is none of a project, or the file cannot be written.
    """
    remote = Remote(url)
    with History(queue_path()) as history:
        history.add(run, send_to=remote.url)
    threading.Thread(target=_send_quietly, name="memscale-history", daemon=True).start()


def _send_quietly() -> None:
    if not _sending.acquire(blocking=False):  # the thread that holds it looks again before it ends
        return
    try:
        with History(queue_path()) as history:
            while send(history, lambda run, url, said: _log.debug("%s to %s: %s", run.id, url, said)):
                pass
    except (MemscaleError, OSError) as error:
        _log.info("runs wait in %s: %s", queue_path(), error)
    finally:
        _sending.release()


def send(history: History, told: Callable[[Run, str, str], None]) -> int:
    """Send every run that waits, and return how many a server has now that it had not acknowledged before.

    Args:
        history: the file in which they wait.
        told: called with each run, its address and what became of it.

    Raises:
        ConfigError: there is no token.
        RuntimeUnavailable: a server cannot be reached. What was not acknowledged waits on.
        Refused: a server has trouble, or does not know the token or the project; likewise.
    """
    sent = 0
    for run, url, stamp in history.waiting():
        try:
            new = Remote(url).send(run)
        except Refused as refused:
            if refused.status in _FOR_NOW or refused.status >= 500:
                raise
            told(run, url, str(refused))  # of this run, which no later attempt would change
            history.delivered(run, url, stamp)
            continue
        history.delivered(run, url, stamp)
        told(run, url, "new" if new else "was there")
        sent += 1
    return sent
