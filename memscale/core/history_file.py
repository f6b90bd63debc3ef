"""Decides whether a call is recorded in the run history, and in which file."""

from __future__ import annotations

import os

from memscale.core.errors import ConfigError

HISTORY = "MEMSCALE_HISTORY"

#: The argument `record=`: None records if $MEMSCALE_HISTORY names a file, True requires that it does, False never
#: records, and a path is the file itself.
Record = bool | str | os.PathLike[str] | None


def history_path(record: Record) -> str | None:
    """Returns the file in which to record a call, or `None`.

    Raises:
        ConfigError: `record` is True and the variable names no file, or `record` is of another type.
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
