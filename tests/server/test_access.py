"""Who gets what: every address and API route × everybody who may ask. A route that is not in the table fails."""

import json
from urllib.parse import urlencode

import pytest

pytest.importorskip("django", reason="the extra `server` is not installed; it needs Python 3.11")
from tests.support.team_server import client, document, new_team, post, token_of

OTHERS = ("nobody", "other team")
ROLES = ("viewer", "member", "maintainer", "owner")

# What the page answers to a viewer, a member, a maintainer and an owner. Nobody is sent to sign in, and another team's
# member gets 404, whatever the page.
PAGES = {
    "team": ("GET", "/t/{team}/", (200, 200, 200, 200)),
    "new-project": ("GET", "/t/{team}/-/project", (403, 403, 200, 200)),
    "invite": ("GET", "/t/{team}/-/invite", (403, 403, 403, 200)),
    "member": ("POST", "/t/{team}/-/members/{member}", (403, 403, 403, 302)),
    "tokens": ("GET", "/t/{team}/-/tokens", (200, 200, 200, 200)),
    "revoke": ("POST", "/t/{team}/-/tokens/{token}", (404, 404, 404, 302)),  # the owner's, whom nobody else may touch
    "audit": ("GET", "/t/{team}/-/audit", (403, 403, 403, 200)),
    "plans": ("GET", "/t/{team}/-/plans", (200, 200, 200, 200)),
    "plan": ("GET", "/t/{team}/-/plans/{plan}", (200, 200, 200, 200)),
    "runs": ("GET", "/t/{team}/{project}/", (200, 200, 200, 200)),
    "run": ("GET", "/t/{team}/{project}/runs/{run}/", (200, 200, 200, 200)),
    "baseline": ("POST", "/t/{team}/{project}/runs/{run}/baseline", (403, 403, 302, 302)),
    "compare": ("GET", "/t/{team}/{project}/compare?run={run}&run={run}", (200, 200, 200, 200)),
    "commits": ("GET", "/t/{team}/{project}/commits", (200, 200, 200, 200)),
    "accuracy": ("GET", "/t/{team}/{project}/accuracy", (200, 200, 200, 200)),
}

# What a route answers to tokens of the four roles that may write, and of an owner that may only read. Without a token,
# and with one that is expired, revoked or unknown, all answer 401; with another team's, 404.
_READ, _API = (200, 200, 200, 200, 200), "/api/v1/teams/{team}"
_PROJECT = _API + "/projects/{project}"
API = {
    "GET api-1:projects": (_API + "/projects", None, _READ),
    "POST api-1:projects": (_API + "/projects", {"slug": "p-{n}", "name": "P"}, (403, 403, 201, 201, 403)),
    "GET api-1:runs": (_PROJECT + "/runs", None, _READ),
    "POST api-1:runs": (_PROJECT + "/runs", "a run", (403, 201, 201, 201, 403)),
    "GET api-1:run": (_PROJECT + "/runs/{run}", None, _READ),
    "GET api-1:plan": (_API + "/plans/{plan}", None, _READ),
    "GET api-1:baselines": (_PROJECT + "/baselines/main", None, _READ),
    "PUT api-1:baselines": (_PROJECT + "/baselines/main", {"run": "{run}"}, (403, 403, 200, 200, 403)),
    "GET api-1:members": (_API + "/members", None, _READ),
    "GET api-1:tokens": (_API + "/tokens", None, _READ),
    "DELETE api-1:token": (_API + "/tokens/{token}", None, (404, 404, 404, 204, 403)),
    "metrics": ("/metrics", None, _READ),
}

# Not of a team: what nobody and somebody who is signed in get.
SITE = {
    "healthz": ("/healthz", 200, 200),
    "setup": ("/setup/unknown", 404, 404),
    "join": ("/join/unknown", 404, 404),
    "home": ("/", 302, 302),  # to the only team
    "account_login": ("/account/login/", 200, 302),
    "mfa_authenticate": ("/account/2fa/authenticate/", 302, 302),
    "account_logout": ("/account/logout/", 302, 200),
    "account_reauthenticate": ("/account/reauthenticate/", 302, 200),
    "account_change_password": ("/account/password/change/", 302, 200),
    "mfa_index": ("/account/2fa/", 302, 200),
    "mfa_reauthenticate": ("/account/2fa/reauthenticate/", 302, 302),
    "mfa_activate_totp": ("/account/2fa/totp/activate/", 302, 302),  # asks for the password again
    "mfa_deactivate_totp": ("/account/2fa/totp/deactivate/", 302, 404),
    "mfa_view_recovery_codes": ("/account/2fa/recovery-codes/", 302, 404),
    "mfa_generate_recovery_codes": ("/account/2fa/recovery-codes/generate/", 302, 302),
    "mfa_download_recovery_codes": ("/account/2fa/recovery-codes/download/", 302, 404),
    "usersessions_list": ("/account/sessions/", 302, 200),
    "api-1:openapi-json": ("/api/v1/openapi.json", 200, 200),
}

# Of django-allauth, and closed: accounts are made by links, and no mail is sent.
CLOSED = {
    "account_signup": "/account/signup/",
    "account_inactive": "/account/inactive/",
    "account_email": "/account/email/",
    "account_email_verification_sent": "/account/confirm-email/",
    "account_confirm_email": "/account/confirm-email/key/",
    "account_set_password": "/account/password/set/",
    "account_reset_password": "/account/password/reset/",
    "account_reset_password_done": "/account/password/reset/done/",
    "account_reset_password_from_key": "/account/password/reset/key/1-key/",
    "account_reset_password_from_key_done": "/account/password/reset/key/done/",
    "account_confirm_login_code": "/account/login/code/confirm/",
    "api-1:api-root": "/api/v1/",
}


def routes():
    """The name of each URL pattern, and method and name of each API operation."""
    from django.urls import get_resolver

    from memscale.server.api import api

    def names(resolver, namespace=""):
        for pattern in resolver.url_patterns:
            if hasattr(pattern, "url_patterns"):
                yield from names(pattern, f"{pattern.namespace}:" if pattern.namespace else namespace)
            else:
                yield f"{namespace}{pattern.name}"

    found, operations = set(names(get_resolver())), set()
    for _, router in api._routers:
        for view in router.path_operations.values():
            (name,) = {operation.url_name for operation in view.operations}  # one for all of a path
            found.remove(f"api-1:{name}")
            operations |= {f"{method} api-1:{name}" for each in view.operations for method in each.methods}
    assert found.isdisjoint(operations)
    return found | operations


def test_every_route_is_in_the_table_of_this_test_and_in_the_servers_own():
    from memscale.server.access import RULES

    tested = {*PAGES, *SITE, *CLOSED, *API}
    assert routes() == tested
    assert {name.removeprefix("GET ") if "openapi" in name else name for name in RULES} == tested - set(CLOSED)


@pytest.fixture(scope="module")
def place():
    from memscale.server.models import Membership, Plan, Token

    team, project, users = new_team(**{role: role for role in ROLES}, extra="viewer")
    other, _, strangers = new_team(owner="owner")
    url = f"/api/v1/teams/{team.slug}/projects/{project.slug}/runs"
    owners = token_of(users["owner"], team)
    assert post(client(token=owners), url, document(1)).status_code == 201
    found = {
        "team": team.slug,
        "project": project.slug,
        "run": f"{1:016x}",
        "plan": Plan.objects.get(team=team).hash,
        "member": Membership.objects.get(team=team, user=users["extra"]).pk,
        "token": Token.objects.filter(team=team).latest("pk").pk,
    }
    return team, other, users, strangers["owner"], found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_for_whom_the_table_says(place, name):
    _, _, users, stranger, found = place
    method, address, statuses = PAGES[name]
    address = address.format(**found)
    data = {f"m{found['member']}-role": "10", "label": "main"}

    def ask(user):
        return client(user).generic(method, address, urlencode(data), content_type="application/x-www-form-urlencoded")

    nobody = ask(None)
    assert (nobody.status_code, nobody["Location"].partition("?")[0]) == (302, "/account/login/")
    assert ask(stranger).status_code == 404
    assert tuple(ask(users[role]).status_code for role in ROLES) == statuses


@pytest.mark.parametrize("name", API)
def test_a_route_is_for_whom_the_table_says(place, name):
    team, other, users, stranger, found = place
    address, body, statuses = API[name]
    method = name.partition(" ")[0] if " " in name else "GET"
    address = address.format(**found)

    def ask(token, number=0):
        data = document(1000 + number) if body == "a run" else body
        text = "" if data is None else json.dumps(data)
        text = text.replace("{run}", found["run"]).replace("{n}", str(number))
        return client(token=token).generic(method, address, text, content_type="application/json")

    owner = users["owner"]
    refused = (None, "msc_unknown", token_of(owner, team, days=-1), token_of(owner, team, revoked=True))
    assert [ask(token).status_code for token in refused] == [401] * 4
    assert client(owner).generic(method, address).status_code == 401  # a browser's session is no token
    foreign = ask(token_of(stranger, other))
    assert foreign.status_code == (200 if name == "metrics" else 404)  # metrics are of the token's own team
    tokens = [token_of(users[role], team) for role in ROLES] + [token_of(owner, team, scope="read")]
    assert tuple(ask(token, number).status_code for number, token in enumerate(tokens)) == statuses
    answer = ask("msc_unknown")
    assert answer["Content-Type"] == "application/problem+json"
    assert {"value", "rule", "remedy"} <= set(answer.json())


@pytest.mark.parametrize("name", SITE)
def test_the_site_around_teams_is_for_whom_the_table_says(place, name):
    address, *statuses = SITE[name]
    users = place[2]
    assert [client(user).get(address).status_code for user in (None, users["viewer"])] == statuses


@pytest.mark.parametrize("name", CLOSED)
def test_a_route_without_a_rule_is_closed_to_everybody(place, name):
    for user in (None, place[2]["owner"]):
        for method in ("get", "post"):
            assert getattr(client(user), method)(CLOSED[name]).status_code in (404, 405)


def test_ids_of_another_team_answer_as_ids_that_do_not_exist(place):
    team, _, users, stranger, found = place
    theirs, project, _ = new_team(owner="owner")
    from memscale.server.models import Membership

    Membership.objects.create(team=theirs, user=stranger, role=40)
    browser, program = client(stranger), client(token=token_of(stranger, theirs))
    base, api = f"/t/{theirs.slug}", f"/api/v1/teams/{theirs.slug}"
    for kind, address in {
        "run": f"{base}/{project.slug}/runs/{{}}/",
        "plan": f"{base}/-/plans/{{}}",
    }.items():
        assert browser.get(address.format(found[kind])).status_code == 404
    assert browser.post(f"{base}/-/tokens/{found['token']}").status_code == 404
    assert browser.post(f"{base}/-/members/{found['member']}", {f"m{found['member']}-role": 0}).status_code == 404
    assert program.get(f"{api}/plans/{found['plan']}").status_code == 404
    assert program.get(f"{api}/projects/{project.slug}/runs/{found['run']}").status_code == 404
    assert program.delete(f"{api}/tokens/{found['token']}").status_code == 404
    assert Membership.objects.filter(pk=found["member"], team=team).exists()
    assert users["extra"].memberships.count() == 1
