"""Whether a call is to be recorded, and in which file: read before the call does anything."""

from __future__ import annotations

import os

from memscale.core.errors import ConfigError

HISTORY = "MEMSCALE_HISTORY"

#: Whether a call is recorded: None where the variable names a file, True there and nowhere else, or the file itself.
Record = bool | str | os.PathLike[str] | None


def history_path(record: Record) -> str | None:
    """The file that a call asks to be recorded in, None for none.

    Raises:
        ConfigError: it asks, and names no file.
    """
    if record is False:
        return None
    if isinstance(record, (str, os.PathLike)) and os.fspath(record):
        return os.fspath(record)
    if record is not None and record is not True:
        raise ConfigError(f"record={record!r} must be True, False, None or the path of a file, such as 'runs.db'")
    path = os.environ.get(HISTORY)
    if record and not path:
        raise ConfigError(f"record=True names no file; set ${HISTORY} to the path of one, or pass it: record='runs.db'")
    return path or None
