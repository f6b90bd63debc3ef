"""`History`: runs in one SQLite file, to which several processes of one machine may add."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memscale.core import HISTORY, ConfigError, filesystem_of
from memscale.history.run import Run

# A delivery is a run to be sent to a server. Its stamp is renewed with each change of the run, and an acknowledgement
# names the sent stamp. Every statement may run again: two processes may open a new file at once.
_SCHEMA = 2
_TABLES = f"""
CREATE TABLE IF NOT EXISTS run (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, hardware TEXT NOT NULL, commit_ TEXT NOT NULL, document TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS delivery (
    run TEXT NOT NULL, url TEXT NOT NULL, stamp INTEGER NOT NULL, done INTEGER NOT NULL, PRIMARY KEY (run, url)
) WITHOUT ROWID;
PRAGMA user_version = {_SCHEMA};
PRAGMA journal_mode = WAL;
"""
_BUSY_SECONDS = 5.0
# Filesystems on which SQLite's WAL cannot share memory between machines.
_ELSEWHERE = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "glusterfs", "fuse.sshfs")


class History:
    """A file of runs. Every run that was added is on disk, even if the process dies.

    >>> import tempfile, torch, memscale as ms
    >>> from memscale.history import History, Run
    >>> profile = ms.profile(torch.nn.Linear(64, 64), torch.ones(8, 64), loss=lambda y, _: y.sum())
    >>> with tempfile.TemporaryDirectory() as folder, History(f"{folder}/runs.db") as history:
    ...     history.add(Run.of(profile, "layer"))
    ...     [run.profile.peak_bytes for run in history.runs(name="layer")]
    [39176]

    Args:
        path: the file, created with the first run; None is ``$MEMSCALE_HISTORY``.

    Raises:
        ConfigError: no path is given or set; or the file is on a network filesystem, cannot be written, or was made by
            a newer memscale, is damaged or no database.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        chosen = os.environ.get(HISTORY) if path is None else os.fspath(path)
        if not chosen:
            raise ConfigError(f"there is no history: set ${HISTORY} to a file, or pass the path of one")
        self.path = Path(chosen)
        filesystem = filesystem_of(str(self.path.resolve().parent))
        if filesystem in _ELSEWHERE:
            raise ConfigError(
                f"the history {chosen!r} is on {filesystem}, where processes of several machines would spoil it; use a "
                "file on a disk of this machine, and `memscale history export` to share runs"
            )
        with self._errors_explained(), contextlib.ExitStack() as closed_on_error:
            # IMMEDIATE: a writer waits for another one when it begins; later it would fail at once.
            connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level="IMMEDIATE")
            closed_on_error.callback(connection.close)
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema > _SCHEMA:
                raise ConfigError(
                    f"the history {chosen!r} has schema version {schema}, and this memscale knows {_SCHEMA}; "
                    "use a newer memscale, or another file"
                )
            if schema < _SCHEMA:
                connection.executescript(_TABLES)
            closed_on_error.pop_all()
        self._connection = connection

    def __enter__(self) -> History:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._connection.close()

    def add(self, run: Run, *, send_to: str | None = None) -> None:
        """Adds a run, replacing one with the same id; it is on disk when this returns.

        Args:
            run: the run.
            send_to: the address of a project on a server; the run then waits in the file to be sent there.

        Raises:
            ConfigError: the file cannot be written, or another process has locked it for several seconds.
        """
        row, stamp = (run.id, run.name, run.hardware, run.commit.removesuffix("+"), run.to_json()), time.time_ns()
        with self._transaction() as execute:
            execute("INSERT OR REPLACE INTO run VALUES (?, ?, ?, ?, ?)", row)
            execute("UPDATE delivery SET stamp = ?, done = 0 WHERE run = ?", (stamp, run.id))
            if send_to is not None:
                execute("INSERT OR IGNORE INTO delivery VALUES (?, ?, ?, 0)", (run.id, send_to, stamp))

    def queue(self, url: str) -> None:
        """Queues every run for `url` that was not queued for it before."""
        with self._transaction() as execute:
            execute("INSERT OR IGNORE INTO delivery SELECT id, ?, ?, 0 FROM run", (url, time.time_ns()))

    def waiting(self) -> list[tuple[Run, str, int]]:
        """Returns the queued runs, oldest first, each with its address and the stamp for `delivered`."""
        with self._transaction() as execute:
            rows = execute("SELECT document, url, stamp FROM delivery JOIN run ON run = id WHERE NOT done ORDER BY id")
            return [(Run.from_json(document), url, stamp) for document, url, stamp in rows]

    def unsent(self, url: str) -> list[Run]:
        """Returns the runs that `url` has not acknowledged, queued or not."""
        return self._found("LEFT JOIN delivery ON run = id AND url = :url WHERE done IS NOT 1 ORDER BY id", url=url)

    def delivered(self, run: Run, url: str, stamp: int) -> None:
        """Marks the run as delivered to `url`, unless it has changed since `stamp`."""
        with self._transaction() as execute:
            execute("UPDATE delivery SET done = 1 WHERE run = ? AND url = ? AND stamp = ?", (run.id, url, stamp))

    def runs(
        self,
        *,
        name: str | None = None,
        hardware: str | None = None,
        commit: str | None = None,
        last: int | None = None,
    ) -> list[Run]:
        """Returns the runs that match all given arguments, oldest first.

        Args:
            name: as in `Run`.
            hardware: as in `Run`.
            commit: a commit without ``"+"``; runs with changed files count as the commit's.
            last: the number of newest runs to return; None is all.
        """
        which = """WHERE name = ifnull(:name, name) AND hardware = ifnull(:hardware, hardware)
                   AND commit_ = ifnull(:commit, commit_) ORDER BY id DESC LIMIT ifnull(:last, -1)"""
        return self._found(which, name=name, hardware=hardware, commit=commit, last=last)[::-1]

    def run(self, start: str) -> Run:
        """Returns the run whose id begins with `start`; ``"last"`` is the newest run.

        Raises:
            ConfigError: no run, or more than one run, begins with `start`.
        """
        which = (
            "ORDER BY id DESC LIMIT 1" if start == "last" else "WHERE substr(id, 1, length(:start)) = :start LIMIT 2"
        )
        found = self._found(which, start=start)
        if len(found) != 1 or not start:
            if not start:
                fault = "an id is empty; write the beginning of one, or last"
            elif start == "last":
                fault = f"there are no runs yet in {str(self.path)!r}"
            else:
                fault = f"{'several runs begin' if found else 'no run begins'} with {start!r} in {str(self.path)!r}"
            raise ConfigError(f"{fault}; `memscale history list` shows the ids")
        return found[0]

    def _found(self, which: str, **values: object) -> list[Run]:
        with self._transaction() as execute:
            return [Run.from_json(document) for (document,) in execute(f"SELECT document FROM run {which}", values)]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Callable[..., Any]]:
        with self._errors_explained(), self._connection:
            yield self._connection.execute

    @contextlib.contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ConfigError(
                f"the history {str(self.path)!r} cannot be used: {error}; check that it is an undamaged file in "
                "a folder that you may write to, on a disk with room, or use another one"
            ) from error
