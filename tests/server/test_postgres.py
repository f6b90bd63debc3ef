"""The server on PostgreSQL: runs from several clients at once, a kill, and a backup; and that its tables are alike."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("django", reason="the extra `server` is not installed; it needs Python 3.11")
from tests.support.team_server import environment, first_team, postgres, postgres_programs, running, send

pytestmark = [
    pytest.mark.deep,  # as `make test-server` is
    pytest.mark.skipif(postgres_programs() is None, reason="needs PostgreSQL: apt-get install postgresql"),
]


@pytest.fixture(scope="module")
def url():
    with postgres() as found:
        yield found


def test_runs_of_eight_clients_are_kept_once_each_through_a_kill_and_a_backup_has_them(url, tmp_path):
    statuses = []
    with running(tmp_path, DATABASE_URL=url) as (base, log, process):
        token = first_team(base, log)

        def sending(first):
            statuses.extend((number, send(base, token, number)) for number in range(first, first + 6))

        threads = [threading.Thread(target=sending, args=(at // 2 * 1000,)) for at in range(8)]  # each run twice
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {status for _, status in statuses} == {200, 201}
        assert sum(status == 201 for _, status in statuses) == 24
        process.kill()
        process.wait()
    backup = tmp_path / "backup.dump"
    command = [sys.executable, "-m", "memscale", "server", "backup", str(backup)]
    done = subprocess.run(command, env=environment(tmp_path, DATABASE_URL=url), capture_output=True, text=True)
    assert (done.returncode, backup.read_bytes()[:5]) == (0, b"PGDMP"), done.stderr
    with running(tmp_path, DATABASE_URL=url) as (base, log, _):
        assert send(base, token, 0) == 200
        assert "/setup/" not in log.read_text()


# The tests of access, of documents and of accounts once more, on the other database.
ALIKE = "test_access.py test_runs.py test_accounts.py"


def test_the_other_tests_hold_there_too(url, tmp_path):
    folder = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += [str(folder / name) for name in ALIKE.split()]
    address = f"{url.rpartition('/')[0]}/alike"
    create = "import psycopg, sys; psycopg.connect(sys.argv[1], autocommit=True).execute('CREATE DATABASE alike')"
    subprocess.run([sys.executable, "-c", create, url], check=True)
    given = environment(tmp_path, MEMSCALE_TEST_DATABASE_URL=address)
    done = subprocess.run(command, env=given, capture_output=True, text=True, cwd=folder.parents[1])
    assert done.returncode == 0, done.stdout[-3000:]
