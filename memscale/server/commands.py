"""The commands of ``memscale server``: run the site, migrate its database, back it up, and invite people."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from memscale.core import ConfigError, RuntimeUnavailable

_PACKAGES = ("django", "allauth", "ninja", "csp", "whitenoise", "uvicorn", "dj_database_url")
_HOSTS = ("127.0.0.1", "localhost", "::1")


def run(listen: str = "127.0.0.1:8765", public_url: str | None = None) -> None:
    """Serves until interrupted; prints the address and, as long as there is no account, a one-time set-up link.

    Raises:
        ConfigError: the address is reachable from other machines and there is no https ``public_url``; or the database
            is in use, unusable, or of a newer version.
        RuntimeUnavailable: a package is missing, or Python is too old.
    """
    host, port = _address(listen)
    if public_url is not None and not re.fullmatch(r"https://[A-Za-z0-9.-]+(:\d+)?/?", public_url):
        raise ConfigError(
            f"--public-url {public_url!r} must be the https address that people type, without a path, such as "
            "https://memory.example.org"
        )
    if host not in _HOSTS and public_url is None:
        raise ConfigError(
            f"--listen {listen!r} can be reached by other machines, where passwords would travel unencrypted; keep "
            "127.0.0.1, or add --public-url https://... and put a TLS proxy in front"
        )
    os.environ["MEMSCALE_PUBLIC_URL"] = (public_url or "").rstrip("/")
    os.environ["MEMSCALE_PORT"] = str(port)
    settings = _set_up()
    with _alone(settings):
        _migrate(settings)
        import uvicorn

        from memscale.server.invitations import set_up_secret

        address = (public_url or f"http://{f'[{host}]' if ':' in host else host}:{port}").rstrip("/")
        print(f"memscale server: {address}", flush=True)
        if (secret := set_up_secret()) is not None:
            print(f"set up the first account within 15 minutes: {address}/setup/{secret}", flush=True)
        sys.setswitchinterval(0.02)  # seconds; Python's default 0.005 costs 6 % in thread switches with eight clients
        uvicorn.run(
            "memscale.server.asgi:application",
            host=host,
            port=port,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            ws="none",
            lifespan="off",
            limit_concurrency=256,
            timeout_keep_alive=15,
        )


def migrate() -> None:
    """Backs the database up and upgrades it to this version.

    Raises:
        ConfigError: as in `run`.
    """
    settings = _set_up()
    with _alone(settings):
        _migrate(settings)
    print("the database is up to date")


def backup(path: Path) -> None:
    """Writes a copy of the database to `path`; the server may be running.

    Raises:
        ConfigError: the file exists or cannot be written.
        RuntimeUnavailable: the database is PostgreSQL, and ``pg_dump`` is not installed.
    """
    settings = _set_up()
    if path.exists():
        raise ConfigError(f"{str(path)!r} exists; give the backup a name of its own")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"{str(path)!r} must be in a folder that exists; make the folder first")
    database = settings.DATABASES["default"]
    if settings.ON_SQLITE:
        _copy(Path(database["NAME"]), path)
    else:
        _dump(database, path)
    print(f"{path}: {path.stat().st_size:,} bytes")


def invite(email: str, team: str | None, role: str) -> None:
    """Prints a one-time link that creates an account for an e-mail address, or sets a new password for it.

    Raises:
        ConfigError: there is no such team or role, or there are several teams and none is given; or the database is not
            of this version.
    """
    settings = _set_up()
    _refuse_newer()
    _refuse_older()
    from memscale.server.invitations import LIVES, invite_to
    from memscale.server.models import Role, Team

    if role not in Role.__members__:
        raise ConfigError(f"--role must be one of {', '.join(Role.__members__)}, got {role!r}")
    teams = list(Team.objects.filter(slug=team) if team else Team.objects.all()[:2])
    if len(teams) != 1:
        known = ", ".join(Team.objects.values_list("slug", flat=True)[:20]) or "none: set the server up first"
        raise ConfigError(f"--team must be one of the server's teams ({known}), got {team!r}")
    secret = invite_to(teams[0], email, Role[role], None)
    address = settings.PUBLIC_URL or f"http://127.0.0.1:{settings.PORT}"
    print(f"{address}/join/{secret}\nfor {email}, {role} of {teams[0].slug}, within {LIVES['join'].days} days, once")


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--listen {listen!r} must be an address and a port, such as 127.0.0.1:8765")
    return host.strip("[]"), int(port)


def _set_up() -> Any:
    """Sets Django up, and returns this site's settings.

    Raises:
        RuntimeUnavailable: a package is missing, or Python is too old.
    """
    if sys.version_info < (3, 11):
        raise RuntimeUnavailable(
            f"the server needs Python 3.11 or newer, as django-allauth does, and this is {sys.version.split()[0]}; "
            "the rest of memscale works on 3.10"
        )
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeUnavailable(
            f"the server needs {', '.join(missing)}, which is not installed; pip install 'memscale-transforms[server]'"
        )
    os.environ["DJANGO_SETTINGS_MODULE"] = "memscale.server.settings"
    import django
    from django.conf import settings

    django.setup()
    return settings


@contextlib.contextmanager
def _alone(settings: Any) -> Iterator[None]:
    """Holds a lock next to an SQLite file, because a second server would migrate and limit it independently.

    Raises:
        ConfigError: another process holds the lock.
    """
    if not settings.ON_SQLITE:
        yield
        return
    import fcntl

    name = settings.DATABASES["default"]["NAME"]
    with open(f"{name}.lock", "a") as lock:  # the system releases the lock even if the process is killed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"another memscale server uses {name}; stop that one, or set DATABASE_URL to another database"
            ) from error
        yield


def _migrate(settings: Any) -> None:
    from django.core.management import call_command
    from django.db import connection, connections
    from django.db.migrations.executor import MigrationExecutor
    from django.db.utils import OperationalError

    try:
        _refuse_newer()
        executor = MigrationExecutor(connection)
        waiting = executor.migration_plan(executor.loader.graph.leaf_nodes())
        if waiting and executor.loader.applied_migrations and settings.ON_SQLITE:
            database = Path(settings.DATABASES["default"]["NAME"])
            kept = database.with_name(f"{database.name}.before-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
            _copy(database, kept)
            print(f"the database as it was: {kept}", flush=True)
        if waiting:
            call_command("migrate", verbosity=0, interactive=False)
    except OperationalError as error:
        raise ConfigError(
            f"the database cannot be used: {error}; check DATABASE_URL, and that the disk has room"
        ) from error
    finally:
        connections.close_all()


def _refuse_newer() -> None:
    """Raises `ConfigError` if the database has migrations that this version does not know."""
    from django.db import connection
    from django.db.migrations.loader import MigrationLoader

    loader = MigrationLoader(connection)
    unknown = sorted(".".join(each) for each in set(loader.applied_migrations) - set(loader.disk_migrations))
    if unknown:
        raise ConfigError(
            f"the database is of a newer version of memscale (it has {', '.join(unknown)}, which this version does not "
            "know); upgrade memscale to the version that wrote it, or restore the backup made before the upgrade"
        )


def _refuse_older() -> None:
    """Raises `ConfigError` if the database lacks migrations of this version, as a new one lacks all."""
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    executor = MigrationExecutor(connection)
    if executor.migration_plan(executor.loader.graph.leaf_nodes()):
        raise ConfigError(
            "the database is new, or of an older version of memscale; `memscale server migrate` brings it to this one"
        )


def _copy(source: Path, target: Path) -> None:
    """Copies a database by SQLite's backup, consistently during writes; only the owner can read the file."""
    part = target.with_name(f"{target.name}.part")
    try:
        os.close(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
        with (
            contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as before,
            contextlib.closing(sqlite3.connect(part)) as after,
        ):
            before.backup(after, pages=1000)
            after.execute("PRAGMA journal_mode = DELETE")
        os.replace(part, target)
    except (OSError, sqlite3.Error) as error:
        part.unlink(missing_ok=True)
        raise ConfigError(
            f"the backup {str(target)!r} cannot be written: {error}; check the folder and the room on its disk"
        ) from error


def _dump(database: dict[str, Any], path: Path) -> None:
    if shutil.which("pg_dump") is None:
        raise RuntimeUnavailable("pg_dump is not here; install PostgreSQL's client programs (postgresql-client)")
    given = {"PGHOST": "HOST", "PGPORT": "PORT", "PGUSER": "USER", "PGPASSWORD": "PASSWORD", "PGDATABASE": "NAME"}
    environment = os.environ | {name: str(database[key]) for name, key in given.items() if database.get(key)}
    command = ["pg_dump", "--format=custom", "--file", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        path.unlink(missing_ok=True)
        raise ConfigError(f"pg_dump failed: {done.stderr.strip()}; check DATABASE_URL and the versions of the two")


def secret_key(folder: Path) -> str:
    """Returns the key that signs sessions and forms; it is made once, in a file that only its owner can read."""
    import secrets

    path = folder / "secret-key"
    if not path.exists():
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_urlsafe(50))
    return path.read_text().strip()


def host_of(url: str) -> str:
    """Returns the host name in a URL, as allowed in the ``Host`` header."""
    return urlsplit(url).hostname or ""
