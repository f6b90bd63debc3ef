"""The team server inside this process, on an SQLite file of its own; and as a process, as users start it."""

import contextlib
import http.cookiejar
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlencode

PASSWORD = "correct horse 9"


def set_up(folder, database_url=None):
    """Django with the server's settings on a new database; once a process."""
    os.environ |= {"MEMSCALE_STATE": str(folder), "DJANGO_SETTINGS_MODULE": "memscale.server.settings"}
    os.environ["DATABASE_URL"] = database_url or f"sqlite:///{folder}/server.db"
    import django
    from django.conf import settings

    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.ACCOUNT_RATE_LIMITS = False
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


_count = iter(range(10**9))


def new_team(**roles):
    """A team with a project, and users of its own by role: ``new_team(owner="owner", viewer="viewer")``."""
    from memscale.server.models import Membership, Project, Role, Team, User

    number = next(_count)
    team = Team.objects.create(slug=f"team-{number}", name=f"Team {number}")
    project = Project.objects.create(team=team, slug="llama", name="Llama")
    users = {}
    for name, role in (roles or {"owner": "owner"}).items():
        users[name] = User.objects.create_user(f"{name}-{number}@example.org", PASSWORD)
        Membership.objects.create(team=team, user=users[name], role=Role[role])
    return team, project, users


def token_of(user, team, *, scope="write", days=30, revoked=False):
    """A token's text."""
    from django.utils import timezone

    from memscale.server.access import access_of
    from memscale.server.models import Token
    from memscale.server.tokens import hashed, new_token

    secret = new_token(access_of(user, team.slug), "test", scope, 30)
    now = timezone.now()
    changes = {"expires": now + timedelta(days=days), "revoked": now if revoked else None}
    Token.objects.filter(hash=hashed(secret)).update(**changes)
    return secret


def client(user=None, token=None, **options):
    """Django's test client, signed in with a password that was given just now, or with a token."""
    from django.test import Client

    headers = {"authorization": f"Bearer {token}"} if token else {}
    found = Client(headers={"host": "127.0.0.1", **headers}, **options)
    if user is not None:
        from memscale.server.middleware import PASSWORD_CHOSEN_AT

        found.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
        session = found.session
        session[PASSWORD_CHOSEN_AT] = time.time()
        session.save()
    return found


def document(number=0, **changes):
    """A run as clients send it."""
    found = {
        "memscale_run_document": 1,
        "id": f"{number:016x}",
        "name": "mlp batch=8",
        "made": f"2026-11-{1 + number // 1440 % 28:02}T{number // 60 % 24:02}:{number % 60:02}:00Z",
        "hardware": {"name": "Tesla T4", "device_type": "cuda", "memory_bytes": 16 << 30, "usable_bytes": 15 << 30},
        "predicted": {
            "peak_bytes": (1 << 30) + number,
            "first_step_peak_bytes": 1 << 30,
            "reserved_peak_bytes": (3 << 29) + number,
            "step_seconds": 0.25,
            "flops": 10**12,
            "moment": ["aten::mm", "layers.0", "backward"],
            "by_category": {"parameter": 1 << 29, "activation": (1 << 29) + number},
            "by_module": {"": {"input": 64}, "layers.0": {"activation": (1 << 29) + number}},
            "by_tier": {},
            "exposed_seconds": {},
            "holdings": [],
            "notes": ["an assumption"],
        },
        "measured": {"peak_bytes": float(1 << 30)},
        "timeline": {
            "unit": "seconds",
            "end": 0.25,
            "phases": [["forward", 0.0], ["backward", 0.1]],
            "live": {"activation": [0, 5 << 26, 9 << 26], "parameter": [3 << 26] * 3},
        },
        "plan": [{"path": "layers.*", "transform": {"type": "checkpoint"}}],
        "budget_bytes": 2 << 30,
        "model": "ab" * 32,
        "shapes": ["8x64 float32"],
        "config": "",
        "commit": f"{number % 40:040x}",
        "versions": {"memscale": "0.2.0"},
        "simulator": "cd" * 32,
        "decision_source": "planner",
    }
    return {**found, **changes}


def post(sender, url, data):
    """POST of JSON."""
    return sender.post(url, json.dumps(data), content_type="application/json")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(folder, **changes):
    """For processes: this tree, its own state, and none of what the tests' process was set up with."""
    ours = ("MEMSCALE", "DJANGO", "DATABASE")
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    root = str(Path(__file__).parents[2])
    return found | {"MEMSCALE_STATE": str(folder), "PYTHONPATH": root, "XDG_STATE_HOME": str(folder)} | changes


@contextlib.contextmanager
def running(folder, *, port=None, **changes):
    """``memscale server run`` as a process: its base address, what it printed, and the process."""
    port = port or free_port()
    command = [sys.executable, "-m", "memscale", "server", "run", "--listen", f"127.0.0.1:{port}"]
    log = Path(folder) / f"server-{port}-{time.time_ns()}.log"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment(folder, **changes), stdout=out, stderr=subprocess.STDOUT)
    base = f"http://127.0.0.1:{port}"
    try:
        wait_for(base, process, log)
        yield base, log, process
    finally:
        process.kill()
        process.wait()


def wait_for(base, process, log):
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            if urllib.request.urlopen(f"{base}/healthz", timeout=30).status == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server does not answer: {log.read_text()}")


def set_up_link(log):
    return re.search(r"http\S+/setup/\S+", log.read_text())[0]


def postgres_programs():
    """Where ``initdb`` and ``pg_ctl`` are, None without them."""
    folders = [Path(each) for each in os.environ.get("PATH", "").split(":")]
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((each for each in folders if (each / "initdb").exists() and (each / "pg_ctl").exists()), None)


@contextlib.contextmanager
def postgres():
    """A PostgreSQL of its own on a free port of this machine: the URL of an empty database."""
    programs, port = postgres_programs(), free_port()
    data = Path(tempfile.mkdtemp(prefix="memscale-postgres-"))  # pytest's folders are closed to other users
    as_user = []
    if os.geteuid() == 0:  # which PostgreSQL refuses to run as
        as_user = ["runuser", "-u", "nobody", "--"]
        shutil.chown(data, "nobody")
    program = [*as_user, str(programs / "initdb")]
    made = [*program, "--auth=trust", "--username=memscale", "--no-sync", "-D", str(data)]
    subprocess.run(made, check=True, capture_output=True, cwd="/")
    control = [*as_user, str(programs / "pg_ctl"), "-D", str(data), "-w"]
    options = f"-p {port} -h 127.0.0.1 -k {data} -c fsync=on"
    begin = [*control, "-l", str(data / "log"), "-o", options, "start"]
    subprocess.run(begin, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/")
    try:
        yield f"postgres://memscale@127.0.0.1:{port}/postgres"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], check=True, capture_output=True, cwd="/")
        shutil.rmtree(data)


def first_team(base, log):
    """Set a server up by its link, as a browser does, and return a token."""
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))

    def submit(address, **data):
        page = browser.open(address).read().decode()
        data["csrfmiddlewaretoken"] = re.search(r'csrfmiddlewaretoken" value="([^"]+)', page)[1]
        return browser.open(address, urlencode(data).encode()).read().decode()

    submit(set_up_link(log), email="a@example.org", password=PASSWORD, again=PASSWORD, team="Vision", slug="vision")
    submit(f"{base}/t/vision/-/project", name="Llama", slug="llama")
    page = submit(f"{base}/t/vision/-/tokens", name="ci", scope="write", days="1")
    return re.search(r"msc_[\w-]{43}", page)[0]


def send(base, token, number):
    """POST a run; its status, or None where no answer came."""
    request = urllib.request.Request(
        f"{base}/api/v1/teams/vision/projects/llama/runs",
        json.dumps(document(number)).encode(),
        {"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
    )
    try:
        return urllib.request.urlopen(request, timeout=30).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
