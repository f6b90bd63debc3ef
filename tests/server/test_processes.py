"""The server as users start it: set-up, what the command sends and reads, and what kills, locks and full disks do."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

import pytest
import torch

pytest.importorskip("django", reason="the extra `server` is not installed; it needs Python 3.11")
import memscale as ms
import memscale.server as server_commands
from memscale.cli import main
from memscale.history import Remote, Run, record
from tests.support.coverings import DEEP
from tests.support.team_server import client, document, environment, first_team, new_team, post, running, send, token_of


@pytest.fixture
def history(tmp_path, monkeypatch):
    """The file of the user's runs, empty; and no token of whoever runs the tests."""
    path = tmp_path / "runs.db"
    monkeypatch.setenv("MEMSCALE_HISTORY", str(path))
    monkeypatch.delenv("MEMSCALE_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return path


@pytest.fixture(scope="module")
def profile():
    return ms.profile(torch.nn.Linear(64, 8), torch.ones(8, 64), loss=lambda y, _: y.sum(), hardware="t4")


def recorded(profile, count, path=None):
    plan = ms.Plan({"": ms.checkpoint()})
    return [record(profile, "layer", path=path, plan=plan).id for _ in range(count)]


@pytest.fixture
def memscale(capsys):
    """The command in this process: its status, stdout and stderr."""

    def run(*words):
        status = main(words)
        return (status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def server(tmp_path_factory, site):
    """A server on the database of this process, with a team's token."""
    folder = tmp_path_factory.mktemp("running")
    team, project, users = new_team(owner="owner")
    token = token_of(users["owner"], team)
    with running(folder, DATABASE_URL=f"sqlite:///{site}/server.db") as (base, _, process):
        yield f"{base}/t/{team.slug}/{project.slug}/", token, process, team


def test_it_serves_without_pytorch(server):
    maps = Path(f"/proc/{server[2].pid}/maps")
    if not maps.exists():
        pytest.skip("no /proc here")
    urllib.request.urlopen(server[0])  # the page to sign in
    assert "libtorch" not in maps.read_text()


def test_runs_are_pushed_once_and_a_dry_run_prints_what_would_leave(server, history, memscale, profile, monkeypatch):
    from memscale.server.models import Run

    url, token, _, team = server
    ids = recorded(profile, 3)
    _, text, _ = memscale("history", "push", "--to", url, "--dry-run")
    assert [json.loads(line)["id"] for line in text.splitlines()] == ids
    assert str(history.parent) not in text  # no path of this machine
    assert os.uname().nodename not in text
    assert memscale("history", "push", "--to", url)[0] == 2  # without a token
    monkeypatch.setenv("MEMSCALE_TOKEN", token)
    for expected in ("3 sent, 0 were there", "0 sent, 0 were there"):
        assert memscale("history", "push", "--to", url)[:2] == (0, f"{expected}\n")
    assert set(Run.objects.filter(project__team=team).values_list("uid", flat=True)) >= set(ids)


def test_a_token_in_a_file_must_be_its_owners_alone(server, history, memscale, profile):
    url, token, *_ = server
    recorded(profile, 1)
    file = history.parent / "memscale" / "token"
    file.parent.mkdir()
    file.write_text(token)
    file.chmod(0o644)
    status, _, said = memscale("history", "push", "--to", url)
    assert (status, "chmod 600" in said) == (2, True)
    file.chmod(0o600)
    assert memscale("history", "push", "--to", url)[0] == 0


@pytest.mark.parametrize(
    "url", ["http://example.org/t/a/b/", "https://u@example.org/t/a/b", "https://x/y", "ftp://x/t/a"]
)
def test_nothing_is_sent_to_an_address_that_is_none_of_a_page_or_not_encrypted(history, memscale, profile, url):
    recorded(profile, 1)
    assert memscale("history", "push", "--to", url)[0] == 2


def test_a_plan_is_pulled_by_its_hash_and_another_plan_is_refused(server, history, memscale, monkeypatch, tmp_path):
    url, token, _, team = server
    monkeypatch.setenv("MEMSCALE_TOKEN", token)
    plan = ms.Plan({"layers.*": ms.checkpoint(), "": ms.step_in_backward()})
    sent = document(0xABC, plan=json.loads(plan.to_json())["rules"])
    assert post(client(token=token), f"/api/v1/teams/{team.slug}/projects/llama/runs", sent).status_code == 201
    source = url.removesuffix("llama/")
    _, text, said = memscale("plan", "pull", f"plan:{plan.hash[:12]}", "--from", source)
    assert ms.Plan.from_json(text) == plan, said
    file = tmp_path / "plan.json"
    assert memscale("plan", "pull", f"plan:{plan.hash[:12]}", "--from", source, "--out", str(file))[0] == 0
    assert ms.Plan.load(file) == plan
    status, _, said = memscale("plan", "pull", "plan:00000000", "--from", source)
    assert (status, "no plan begins" in said) == (2, True)
    forged = {"hash": plan.hash, "plan": json.loads(ms.Plan({"x": ms.checkpoint()}).to_json())}
    monkeypatch.setattr(Remote, "_request", lambda *_: forged)
    with pytest.raises(ms.PlanError, match="not to be trusted"):
        Remote(source).plan(f"plan:{plan.hash}")


MODEL = """
import torch
def make():
    return torch.nn.Linear(64, WIDTH), lambda rows, length: torch.ones(rows, 64), lambda y, _: y.sum()
"""


def test_a_check_compares_with_the_teams_baseline(server, history, memscale, monkeypatch, tmp_path):
    url, token, *_ = server
    monkeypatch.setenv("MEMSCALE_TOKEN", token)
    monkeypatch.syspath_prepend(tmp_path)
    statuses = []
    for number, (width, extra) in enumerate(((8, []), (8, ["--update"]), (8, []), (90000, []), (8, ["--json"]))):
        name = f"made_{number}"
        (tmp_path / f"{name}.py").write_text(MODEL.replace("WIDTH", str(width)))
        monkeypatch.setattr("memscale.cli.history.record", lambda profile, _, **about: None)  # each name is another
        monkeypatch.setattr(Run, "of", classmethod(renamed(Run.of.__func__)))
        words = ("--hf", f"{name}:make", "--batch", "8", "--seq", "8", "--gpu", "t4", "--baseline", f"{url}#main")
        status, text, said = memscale("history", "check", *words, *extra)
        monkeypatch.undo()
        monkeypatch.setenv("MEMSCALE_TOKEN", token)
        monkeypatch.syspath_prepend(tmp_path)
        statuses.append(status)
    assert statuses == [2, 0, 0, 3, 0], said
    assert json.loads(text)["verdict"] == "same"


def renamed(of):
    return lambda cls, profile, name, **about: of(cls, profile, "made", **about)


def test_recording_to_a_server_that_is_not_there_neither_waits_nor_fails_and_is_sent_later(
    server, history, memscale, profile, monkeypatch
):
    from memscale.server.models import Run as Row

    url, token, _, team = server
    monkeypatch.setenv("MEMSCALE_TOKEN", token)
    ids = recorded(profile, 5, path=re.sub(r":\d+/", ":9/", url))
    assert len(set(ids)) == 5
    with sqlite3.connect(history) as connection:
        assert connection.execute("SELECT count(*) FROM delivery WHERE NOT done").fetchone() == (5,)
        connection.execute("UPDATE delivery SET url = ?", (url,))
    assert memscale("history", "push")[0] == 0
    assert Row.objects.filter(project__team=team, uid__in=ids).count() == 5


def test_recording_to_a_server_sends_from_the_file_and_measurements_follow(server, history, profile, monkeypatch):
    from memscale.history import keep_measured
    from memscale.server.models import Run as Row

    url, token, _, team = server
    monkeypatch.setenv("MEMSCALE_TOKEN", token)
    run = record(profile, "layer", path=url)
    keep_measured(run, url, {"peak_bytes": 12345.0})
    for _ in range(600):
        if Row.objects.filter(project__team=team, uid=run.id, measured_bytes=12345).exists():
            return
        time.sleep(0.1)
    raise AssertionError("the run's measurement did not arrive")


def test_a_client_that_is_killed_loses_no_run_and_doubles_none(server, history, memscale, profile, monkeypatch):
    from memscale.server.models import Run as Row

    url, token, _, team = server
    monkeypatch.setenv("MEMSCALE_TOKEN", token)
    ids = recorded(profile, 12)
    command = [sys.executable, "-m", "memscale", "history", "push", "--to", url]
    given = environment(history.parent, MEMSCALE_HISTORY=str(history), MEMSCALE_TOKEN=token)
    pushing = subprocess.Popen(command, env=given)
    sent = Row.objects.filter(project__team=team, uid__in=ids)
    while sent.count() < 3 and pushing.poll() is None:
        time.sleep(0.02)
    pushing.send_signal(signal.SIGKILL)
    pushing.wait()
    assert memscale("history", "push")[0] == 0
    assert sent.count() == 12


def kept(folder):
    with sqlite3.connect(folder / "server.db") as connection:
        return [uid for (uid,) in connection.execute("SELECT uid FROM server_run")]


def test_a_server_that_is_killed_keeps_every_run_that_it_acknowledged_and_so_does_a_backup(tmp_path):
    with running(tmp_path) as (base, log, process):
        token = first_team(base, log)
        acknowledged, stop = [], threading.Event()

        def sending(first):
            for number in range(first, first + 2000):
                if stop.is_set() or send(base, token, number) != 201:
                    return
                acknowledged.append(f"{number:016x}")

        threads = [threading.Thread(target=sending, args=(10_000 * (1 + at),)) for at in range(3)]
        for thread in threads:
            thread.start()
        while len(acknowledged) < 12:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        stop.set()
        for thread in threads:
            thread.join()
    with running(tmp_path) as (base, _, _):
        found = kept(tmp_path)
        assert set(acknowledged) <= set(found)
        assert len(found) == len(set(found))
        assert send(base, token, int(acknowledged[0], 16)) == 200
        a_second_server_is_refused_and_a_backup_while_writing_restores(tmp_path, base, token)


def a_second_server_is_refused_and_a_backup_while_writing_restores(tmp_path, base, token):
    """Of the server that runs in that folder."""
    with tempfile.TemporaryDirectory() as folder:
        second = subprocess.run(
            [sys.executable, "-m", "memscale", "server", "run", "--listen", "127.0.0.1:1"],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
        )
        assert (second.returncode, "another memscale server uses" in second.stderr) == (2, True)
        done = threading.Event()
        acknowledged = []

        def sending():
            for number in range(10_000):
                if done.is_set():
                    return
                assert send(base, token, number) == 201
                acknowledged.append(f"{number:016x}")

        thread = threading.Thread(target=sending)
        thread.start()
        while len(acknowledged) < 4:
            time.sleep(0.01)
        before = list(acknowledged)
        elsewhere = Path(folder)
        command = [sys.executable, "-m", "memscale", "server", "backup", str(elsewhere / "server.db")]
        backup = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
        done.set()
        thread.join()
        assert backup.returncode == 0, backup.stderr
        assert (elsewhere / "server.db").stat().st_mode & 0o777 == 0o600
        with pytest.raises(ms.ConfigError, match=r"server.db' exists; give the backup a name of its own"):
            server_commands.backup(elsewhere / "server.db")
        assert set(before) <= set(kept(elsewhere))
        if DEEP:
            with running(elsewhere) as (other, log, _):
                assert send(other, token, 0) == 200  # the team's token is in it, too
                assert "/setup/" not in log.read_text()


def test_a_newer_database_is_refused_with_the_remedy_and_an_older_one_is_kept_before_it_is_changed(tmp_path, site):
    with sqlite3.connect(site / "server.db") as made, sqlite3.connect(tmp_path / "server.db") as copied:
        made.backup(copied)
    with sqlite3.connect(tmp_path / "server.db") as connection:
        connection.execute(
            "INSERT INTO django_migrations (app, name, applied) VALUES ('server', '0999_later', '2030-01-01')"
        )
    for word in ("run", "migrate") if DEEP else ("run",):
        done = subprocess.run(
            [sys.executable, "-m", "memscale", "server", word],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert "newer version of memscale (it has server.0999_later" in done.stderr
        assert "upgrade memscale" in done.stderr
    with sqlite3.connect(tmp_path / "server.db") as connection:  # as an upgrade finds it
        connection.execute("DELETE FROM django_migrations WHERE name = '0999_later' OR app = 'usersessions'")
        connection.execute("DROP TABLE usersessions_usersession")
    command = [sys.executable, "-m", "memscale", "server", "migrate"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert (done.returncode, "the database as it was: " in done.stdout) == (0, True), done.stderr
    (copy,) = tmp_path.glob("server.db.before-*")
    with sqlite3.connect(copy) as connection:
        assert not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'usersessions_usersession'").fetchall()


def test_nobody_is_invited_into_a_database_without_tables(tmp_path):
    command = [sys.executable, "-m", "memscale", "server", "user", "invite", "ada@example.org"]
    done = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("memscale: the database is new, or of an older version of memscale; `memscale server")
    assert done.stderr.count("\n") == 1


def test_a_full_disk_answers_503_and_loses_nothing():
    from django.db import connection

    from memscale.server.models import Run

    team, _, users = new_team(owner="owner")
    program, url = client(token=token_of(users["owner"], team)), f"/api/v1/teams/{team.slug}/projects/llama/runs"
    browser = client(users["owner"])
    with connection.cursor() as cursor:
        (pages,) = cursor.execute("PRAGMA page_count").fetchone()
        cursor.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own "database or disk is full"
        number = 0
        while (answer := post(program, url, document(number))).status_code == 201:
            number += 1
        cursor.execute("PRAGMA max_page_count = 1073741823")
    assert answer.status_code == 503
    assert answer["Retry-After"]
    assert "full" in answer.json()["value"]
    assert Run.objects.filter(project__team=team).count() == number
    assert post(program, url, document(number)).status_code == 201
    assert browser.get(f"/t/{team.slug}/llama/").status_code == 200


def test_a_body_is_refused_before_it_is_read_whole_with_and_without_its_length(server):
    import socket
    from urllib.parse import urlsplit

    url = urlsplit(server[0])
    path = f"POST /api/v1/teams/x/projects/y/runs HTTP/1.1\r\nHost: 127.0.0.1:{url.port}\r\n"
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
    for header, body in (("Content-Length: 99999999999", [b"x"]), ("Transfer-Encoding: chunked", [chunk] * 20)):
        with socket.create_connection((url.hostname, url.port), timeout=20) as connection:
            connection.sendall(f"{path}{header}\r\n\r\n".encode())
            try:
                for part in body:
                    connection.sendall(part)
            except OSError:
                pass  # it was told before
            assert connection.recv(4096).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("words", "message"),
    {
        "an address of others": (["--listen", "0.0.0.0:1"], "travel unencrypted"),
        "no address": (["--listen", "here"], "must be an address and a port"),
        "no https": (["--public-url", "http://memory.example.org"], "must be the https address"),
        "a path": (["--public-url", "https://memory.example.org/x"], "without a path"),
    }.values(),
)
def test_a_way_to_start_that_is_not_safe_is_refused(memscale, words, message):
    status, _, said = memscale("server", "run", *words)
    assert (status, message in said) == (2, True)


@pytest.mark.deep
def test_the_api_answers_no_5xx_to_what_its_schema_allows_and_to_what_it_does_not():
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    from hypothesis import HealthCheck, given, settings

    from memscale.server.api import api

    team, _, users = new_team(owner="owner")
    sender = client(token=token_of(users["owner"], team), raise_request_exception=False)
    schema = schemathesis.openapi.from_dict(json.loads(json.dumps(api.get_openapi_schema())))
    for result in schema.get_all_operations():
        operation = result.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=6 if DEEP else 2, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        def ask(case):
            case.path_parameters = {**(case.path_parameters or {}), "team": team.slug, "project": "llama"}
            given = case.as_transport_kwargs(base_url="http://127.0.0.1")
            address = given["url"].removeprefix("http://127.0.0.1")
            body = given.get("json", given.get("data", b""))
            text = body if isinstance(body, (str, bytes)) else json.dumps(body)
            query = given.get("params") or {}
            answer = sender.generic(given["method"], address, text, content_type="application/json", query_params=query)
            assert answer.status_code < 500, (given, answer.content)

        ask()
