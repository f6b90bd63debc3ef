"""Runs on the server: what is kept, what is refused, what the pages say, and that it is the library's own."""

import dataclasses
import json
import re

import pytest
import torch

pytest.importorskip("django", reason="the extra `server` is not installed; it needs Python 3.11")
import memscale as ms
from memscale.history import Comparison, Run, document_of
from memscale.history.remote import run_of
from tests.support.team_server import client, document, new_team, post, token_of

PLAN = ms.Plan(
    [
        ("layers.*", ms.checkpoint(policy=ms.policies.dots_saveable)),
        ("layers.0", ms.compose(ms.offload(min_bytes=1 << 20), ms.checkpoint(cuts=(1,)))),
        ("", ms.step_in_backward()),
        ("it's", ms.checkpoint(policy=ms.policies.save_only_these_names("a", 'b"'))),
    ]
)


@pytest.fixture
def team():
    team, project, users = new_team(owner="owner", viewer="viewer")
    program = client(token=token_of(users["owner"], team))
    return team, users, program, f"/api/v1/teams/{team.slug}/projects/{project.slug}"


@pytest.fixture(scope="module")
def run():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    step = {"loss": lambda y, _: y.square().sum(), "hardware": "t4"}
    profile = ms.profile(model, torch.ones(8, 64), **step)
    return Run.of(profile, "small mlp", plan=PLAN, model=model, batch=torch.ones(8, 64), measured={"peak_bytes": 5e7})


def test_a_run_of_the_library_is_taken_as_it_is_and_comes_back(team, run):
    _, _, program, url = team
    answer = post(program, f"{url}/runs", document_of(run))
    assert (answer.status_code, answer.json()) == (201, {"id": run.id, "new": True})
    sent = program.get(f"{url}/runs/{run.id}").json()
    assert sent == json.loads(json.dumps(document_of(run)))
    back = run_of(sent, run)
    assert back.plan_hash == run.plan_hash == PLAN.hash
    assert Comparison(back, run).changes == dict.fromkeys(Comparison(back, run).changes, 0)
    assert back.profile.by_module == run.profile.by_module


def test_the_plan_has_the_librarys_hash_and_the_pages_show_it_as_its_python(team, run):
    from memscale.server.pages import plan_as_python

    team, users, program, url = team
    post(program, f"{url}/runs", document_of(run))
    api = f"/api/v1/teams/{team.slug}/plans"
    answer = program.get(f"{api}/{PLAN.hash[:12]}")
    assert ms.Plan.from_json(json.dumps(answer.json()["plan"])) == PLAN
    assert answer["ETag"] == f'"{PLAN.hash}"'
    assert program.get(f"{api}/{PLAN.hash}", headers={"if-none-match": answer["ETag"]}).status_code == 304
    assert program.get(f"{api}/{PLAN.hash[:7]}").status_code == 404
    python = plan_as_python(json.loads(PLAN.to_json())["rules"])
    assert eval(python.removeprefix("plan = "), {**{name: getattr(ms, name) for name in ms.__all__}}) == PLAN
    page = client(users["viewer"]).get(f"/t/{team.slug}/-/plans/{PLAN.hash}").content.decode()
    assert "checkpoint(policy=policies.dots_saveable)" in page
    assert PLAN.hash[:12] in client(users["viewer"]).get(f"/t/{team.slug}/-/plans").content.decode()


def test_a_run_that_is_sent_again_is_there_once_and_may_bring_measurements(team):
    from memscale.server.models import Project
    from memscale.server.models import Run as Row

    team, _, program, url = team
    first = document(7, measured={})
    Project.objects.create(team=team, slug="other", name="Other")
    assert post(program, f"{url}/runs", first).json()["new"] is True
    assert post(program, f"{url}/runs", first).json()["new"] is False
    assert post(program, f"{url}/runs", {**first, "measured": {"peak_bytes": 12.0}}).status_code == 200
    row = Row.objects.get(project__team=team, uid=first["id"])
    assert row.measured_bytes == 12
    assert program.get(f"{url}/runs/{first['id']}").json()["measured"] == {"peak_bytes": 12.0}
    assert program.get(f"{url.replace('llama', 'other')}/runs/{first['id']}").status_code == 404
    answer = post(program, f"{url}/runs", {**first, "name": "another"})
    assert (answer.status_code, Row.objects.filter(project__team=team).count()) == (409, 1)
    assert "new id" in answer.json()["remedy"]


def changed(**changes):
    return {**document(3), **changes}


def deep(levels):
    found = {"type": "x"}
    for _ in range(levels):
        found = {"type": "x", "inner": found}
    return changed(plan=[{"path": "a", "transform": found}])


REFUSED = {
    "a field of one's own": (changed(extra=1), 422),
    "a field inside": (changed(hardware={**document()["hardware"], "owner": "me"}), 422),
    "a missing field": ({key: value for key, value in document().items() if key != "name"}, 422),
    "another version": (changed(memscale_run_document=2), 422),
    "an id of another form": (changed(id="../../etc"), 422),
    "no name": (changed(name=" \t"), 422),
    "two lines": (changed(name="a\nb"), 422),
    "a NUL": (changed(name="a\0b"), 422),
    "half of a pair": ('{"name": "\\ud800", "id": "1"}', 422),
    "an escape": (changed(config="\x1b[31m"), 422),
    "a long text": (changed(config="x" * 2001), 422),
    "a day that is none": (changed(made="2026-02-31T00:00:00Z"), 422),
    "a number above": (changed(budget_bytes=1 << 61), 422),
    "a number below": (changed(budget_bytes=-1), 422),
    "no number": (json.dumps(document()).replace("0.25", "NaN", 1), 400),
    "an infinite number": (json.dumps(document()).replace("0.25", "1e999", 1), 422),
    "a name twice": ('{"id": "1", "id": "2"}', 400),
    "no JSON": ("{", 400),
    "no object": ("[]", 422),
    "33 levels": (deep(30), 400),
    "100,000 levels": ("[" * 100_000, 400),
    "columns that differ": (changed(timeline={**document()["timeline"], "live": {"a": [1], "b": [1, 2]}}), 422),
    "257 KiB": (changed(plan=[{"path": f"p{at}", "transform": {"type": "x" * 2000}} for at in range(130)]), 413),
    "latin-1": (b'{"name": "\xe9"}', 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_document_is_refused_for(team, name):
    from memscale.server.models import Run as Row

    team, _, program, url = team
    data, status = REFUSED[name]
    body = data if isinstance(data, (str, bytes)) else json.dumps(data)
    answer = program.post(f"{url}/runs", body, content_type="application/json")
    assert (answer.status_code, Row.objects.filter(project__team=team).count()) == (status, 0)
    assert {"value", "rule", "remedy"} <= set(answer.json())


def test_a_deep_enough_document_is_taken(team):
    _, _, program, url = team
    assert post(program, f"{url}/runs", deep(27)).status_code == 201


# A run's page has the numbers of its chart as data, and the script of the reports, which shows them.
SCRIPTS = ['<script type="application/json" class="timeline">', '<script src="/static/reports/page.js">']
EVIL = "</svg></title><script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


def evil():
    """A document with markup in every text that a client can set."""
    found = document(5)
    found |= {"name": EVIL, "config": EVIL, "shapes": [EVIL], "versions": {EVIL: EVIL}, "decision_source": EVIL}
    found["hardware"] = {**found["hardware"], "name": EVIL, "device_type": EVIL}
    found["measured"] = {EVIL: 1.0, "peak_bytes": 2.0}
    found["plan"] = [{"path": EVIL, "transform": {"type": EVIL, EVIL: EVIL, "args": [EVIL, {"type": "a", EVIL: 1}]}}]
    found["timeline"] = {"unit": "seconds", "end": 1.0, "phases": [[EVIL, 0.0]], "live": {EVIL: [1, 2]}}
    found["predicted"] |= {
        "by_category": {EVIL: 5},
        "by_module": {EVIL: {EVIL: 5}},
        "notes": [EVIL],
        "moment": [EVIL] * 3,
        "by_tier": {EVIL: 1},
    }
    return found


def test_markup_in_any_text_is_shown_as_text(team):
    from memscale.server.models import Plan, Project, Team

    team, users, program, url = team
    other = json.loads(json.dumps(evil()))
    other["id"], other["commit"] = f"{6:016x}", "e" * 40
    other["predicted"]["by_module"] = {EVIL + "2": {EVIL: 6}}
    for data in (evil(), other):
        assert post(program, f"{url}/runs", data).status_code == 201
    Team.objects.filter(pk=team.pk).update(name=EVIL)
    Project.objects.filter(team=team).update(name=EVIL)
    browser, base = client(users["owner"]), f"/t/{team.slug}"
    browser.post(f"{base}/-/tokens", {"name": EVIL[:80], "scope": "read", "days": 1})
    ids = [f"{number:016x}" for number in (5, 6)]
    pages = ["/", "/-/plans", "/-/tokens", "/-/audit", f"/-/plans/{Plan.objects.get(team=team).hash}", "/llama/"]
    pages += ["/llama/commits", "/llama/accuracy", *(f"/llama/runs/{uid}/" for uid in ids)]
    pages += [f"/llama/compare?run={ids[0]}&run={ids[1]}", f"/llama/?name={EVIL}", f"/llama/commits?name={EVIL}&card=x"]
    for page in pages:
        answer = browser.get(f"{base}{page}")
        text = answer.content.decode()
        assert answer.status_code == 200
        assert re.findall("<script.*?>", text.lower()) in ([], SCRIPTS), page
        assert "<img" not in text.lower(), page
        assert not re.search(r"\son\w+=(?!alert)", re.sub(r"&\w+;", "", re.sub(r">[^<]*<", "><", text))), page
        assert "script-src 'self'" in answer["Content-Security-Policy"]
        assert "unsafe" not in answer["Content-Security-Policy"]
        assert not re.search(r"<[^>]*\sstyle=", text), page


def test_pages_follow_each_other_without_a_gap_in_both_orders(team):
    _, _, program, url = team
    for number in range(60):
        post(program, f"{url}/runs", document(number, made="2026-11-01T00:00:00Z"))  # equal keys, too
    for sort in ("made", "peak"):
        seen, address = [], f"{url}/runs?sort={sort}&card=Tesla%20T4"
        while address:
            page = program.get(address).json()
            seen += [each["uid"] for each in page["runs"]]
            address = page["next"]
        assert seen == [f"{number:016x}" for number in reversed(range(60))]
    assert program.get(f"{url}/runs?card=none").json() == {"runs": [], "next": None}
    for after in ("x", f"{99:016x}", "%00"):
        assert program.get(f"{url}/runs?after={after}").status_code == 400


def test_a_commit_that_takes_more_is_named_with_the_modules_that_grew(team):
    team, users, program, url = team
    for number, grown in enumerate((0, 0, 1 << 28)):
        data = document(number, commit=f"{number:040x}")
        data["predicted"]["reserved_peak_bytes"] += grown
        data["predicted"]["by_module"]["layers.7.attention"] = {"activation": 1 + grown}
        post(program, f"{url}/runs", data)
    page = client(users["viewer"]).get(f"/t/{team.slug}/llama/commits").content.decode()
    rows = re.findall(r"<tr>.*?</tr>", page.partition("<tbody>")[2], re.DOTALL)
    assert [("layers.7.attention +256 MiB" in row) for row in rows] == [True, False, False]
    assert 'class="stairs"' in page


def test_the_plan_that_was_measured_to_hold_comes_first_then_the_fastest(team):
    team, users, program, url = team
    kinds = [
        ("slow, held", 0.5, 1 << 30),
        ("fast, held", 0.3, 1 << 30),
        ("faster, broke", 0.1, 3 << 30),
        ("guess", 0.2, 0),
    ]
    for number, (path, seconds, measured) in enumerate(kinds):
        data = document(number, plan=[{"path": path, "transform": {"type": "checkpoint"}}])
        data["predicted"]["step_seconds"] = seconds
        data["measured"] = {"peak_bytes": measured} if measured else {}
        post(program, f"{url}/runs", data)
    from memscale.server.models import Plan

    paths = {plan.hash: json.loads(plan.document)[0]["path"] for plan in Plan.objects.filter(team=team)}
    page = client(users["viewer"]).get(f"/t/{team.slug}/-/plans").content.decode()
    order = list(dict.fromkeys(re.findall(r"plans/([0-9a-f]{64})", page)))
    assert [paths[each] for each in order] == ["fast, held", "slow, held", "faster, broke", "guess"]


def test_a_run_page_says_what_was_measured_beside_what_was_predicted(team):
    team, users, program, url = team
    post(program, f"{url}/runs", document(1, measured={"peak_bytes": 2.0**30, "parameter_bytes": 2.0**28}))
    page = client(users["viewer"]).get(f"/t/{team.slug}/llama/runs/{1:016x}/").content.decode()
    assert "measured 1.00 GiB allocated" in page
    assert "256 MiB" in page
    assert '<path class="c-activation"' in page
    numbers = json.loads(re.search(r'class="timeline">\s*(.*?)\s*</script>', page)[1])
    assert max(numbers["total"]) == numbers["total"][numbers["peak"]]


def test_baselines_are_of_a_label_a_name_and_a_card(team):
    _, _, program, url = team
    for number in (1, 2):
        post(program, f"{url}/runs", document(number))
    for number in (1, 2):
        answer = program.put(
            f"{url}/baselines/main", json.dumps({"run": f"{number:016x}"}), content_type="application/json"
        )
        assert answer.status_code == 200
    assert [each["run"] for each in program.get(f"{url}/baselines/main?card=Tesla%20T4").json()] == [f"{2:016x}"]
    assert program.get(f"{url}/baselines/main?card=h100").json() == []
    assert program.get(f"{url}/baselines/other").json() == []


def test_a_document_of_a_very_large_model_stays_under_the_limit(run):
    profile = dataclasses.replace(
        run.profile, categories_by_module={f"layers.{at}.{'x' * 200}": {"activation": at} for at in range(3000)}
    )
    sent = document_of(dataclasses.replace(run, profile=profile))
    assert len(json.dumps(sent)) <= 256 << 10
    held = sent["predicted"]["by_module"]
    assert len(held) <= 1000
    assert sum(parts["activation"] for parts in held.values()) == sum(range(3000))


def test_the_doctests_of_the_server():
    import doctest

    from memscale.server import pages

    assert doctest.testmod(pages).failed == 0
