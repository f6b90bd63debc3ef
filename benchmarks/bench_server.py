"""The team server on loopback: how fast it takes runs, shows pages and starts, and how much memory it holds.

    python benchmarks/bench_server.py                    SQLite
    python benchmarks/bench_server.py --postgres URL     PostgreSQL, an empty database

Prints one line a figure, with its target (on two cores that nothing else uses), and the load of the machine. Everything
stays on 127.0.0.1. Needs the extra `server`.
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.team_server import client, document, new_team, running, set_up, token_of

CLIENTS = 8


def send_all(base, team, token, count):
    """Seconds for `count` runs from `CLIENTS` connections, and what was answered other than 201."""
    path, faults = f"/api/v1/teams/{team.slug}/projects/llama/runs", []
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    host = base.removeprefix("http://")

    def sending(first):
        connection = http.client.HTTPConnection(host, timeout=60)
        for number in range(first, first + count // CLIENTS):
            connection.request("POST", path, json.dumps(document(number)), headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 201:
                faults.append((answer.status, text[:200]))
        connection.close()

    threads = [threading.Thread(target=sending, args=(at * count // CLIENTS,)) for at in range(CLIENTS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin, faults


def fill(team, project, user, count):
    """Rows for `count` runs, past the API: what is measured is the pages."""
    from memscale.server.access import access_of
    from memscale.server.models import Document, Plan, Run
    from memscale.server.schema import RunDocument, _row, plan_hash

    access = access_of(user, team.slug)
    sample = document()
    plan, _ = Plan.objects.get_or_create(
        team=team, hash=plan_hash(sample["plan"]), defaults={"document": json.dumps(sample["plan"])}
    )
    fixed = {key: value for key, value in sample.items() if key != "measured"}
    row = _row(access, RunDocument(**sample), fixed) | {"plan": plan}
    for first in range(0, count, 5000):
        numbers = range(first + 1_000_000, first + 1_000_000 + 5000)
        rows = [
            Run(
                **row
                | {
                    "project": project,
                    "uid": f"{number:016x}",
                    "made": datetime.fromtimestamp(1_700_000_000 + 60 * number, tz=timezone.utc),
                    "name": f"model {number % 50}",
                    "card": f"card {number % 7}",
                    "commit": f"{number // 50:040x}",
                    "taken_bytes": 10**9 + number % 997,
                }
            )
            for number in numbers
        ]
        made = Run.objects.bulk_create(rows, batch_size=500)
        texts = [json.dumps(fixed | {"id": each.uid, "name": each.name}) for each in made]
        Document.objects.bulk_create(
            [Document(run=each, text=text) for each, text in zip(made, texts, strict=True)], batch_size=500
        )


def pages(base, user, addresses, rounds):
    """Milliseconds of each page's requests, over one connection, signed in."""
    cookie = client(user).cookies["sessionid"].value
    connection = http.client.HTTPConnection(base.removeprefix("http://"), timeout=60)
    found = {}
    for name, each in addresses.items():
        seconds = []
        for number in range(rounds + 3):
            begin = time.perf_counter()
            connection.request("GET", each[number % len(each)], headers={"Cookie": f"sessionid={cookie}"})
            answer = connection.getresponse()
            text = answer.read()
            seconds.append(time.perf_counter() - begin)
            assert answer.status == 200, (answer.status, text[:300])
        found[name] = sorted(1000 * each for each in seconds[3:])
    return found


def cpu_seconds(process):
    times = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(process):
    text = Path(f"/proc/{process.pid}/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def recording():
    """Milliseconds to record a run of GPT-2's size locally."""
    import torch

    import memscale as ms
    from memscale.history import record

    block = lambda: torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))  # noqa: E731
    model = torch.nn.Sequential(*[block() for _ in range(24)])
    profile = ms.profile(model, torch.ones(64, 256), loss=lambda y, _: y.square().mean(), hardware="t4")
    seconds, busy = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(60):
            begin, computed = time.perf_counter(), time.process_time()
            assert record(profile, "mlp of 24 blocks", path=f"{folder}/runs.db") is not None
            seconds.append(time.perf_counter() - begin)
            busy.append(time.process_time() - computed)
    return 1000 * statistics.median(seconds[5:]), 1000 * statistics.median(busy[5:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--postgres", metavar="URL", help="of an empty database; without it SQLite in a new folder")
    parser.add_argument("--runs", type=int, default=100_000, help="of the project whose pages are timed")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []

    def tell(name, value, unit, target):
        rows.append({"name": name, "value": round(value, 3), "unit": unit, "target": target})
        print(f"{name:34} {value:10.2f} {unit:4} target {target}", flush=True)

    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        url = options.postgres or f"sqlite:///{folder}/server.db"
        set_up(folder, url)
        team, project, users = new_team(owner="owner")
        token = token_of(users["owner"], team)
        begin = time.perf_counter()
        with running(folder, DATABASE_URL=url) as (base, _, process):
            tell("start", time.perf_counter() - begin, "s", "<= 5")
            before = cpu_seconds(process)
            seconds, faults = send_all(base, team, token, 1000)
            tell("1,000 runs from 8 clients", seconds, "s", "<= 10")
            tell("of which the server computes", cpu_seconds(process) - before, "s", "")
            tell("answers other than 201", len(faults), "", "0")
            for fault in faults[:3]:
                print(fault)
            fill(team, project, users["owner"], options.runs)
            path = f"/t/{team.slug}/{project.slug}"
            first = f"{1_000_000 + options.runs // 2:016x}"
            second = f"{1_000_000 + options.runs // 3:016x}"
            addresses = {
                "list": [f"{path}/", f"{path}/?sort=peak", f"{path}/?card=card%203", f"{path}/?name=model%207"],
                "run": [f"{path}/runs/{first}/", f"{path}/runs/{second}/"],
                "compare": [f"{path}/compare?run={first}&run={second}"],
            }
            targets = {"list": 100, "run": 150, "compare": 200}
            for name, found in pages(base, users["owner"], addresses, options.rounds).items():
                p95 = found[int(0.95 * len(found))]
                tell(f"{name} page of {options.runs:,} runs, p95", p95, "ms", f"<= {targets[name]}")
                tell(f"{name} page, median", statistics.median(found), "ms", "")
            tell("resident, at most", resident_mib(process), "MiB", "<= 400")
    wall, computed = recording()
    tell("recording a run locally, median", wall, "ms", "<= 5")
    tell("of which it computes", computed, "ms", "")
    print(f"load of the machine before and after: {load:.1f}, {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if options.json:
        kind = "PostgreSQL" if options.postgres else "SQLite"
        found = {"database": kind, "load": [round(load, 1), round(os.getloadavg()[0], 1)], "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
