"""Accounts, links, sessions and roles; requests that other sites or other hosts would have a browser send."""

import logging
import re
import time
from datetime import timedelta

import pytest

pytest.importorskip("django", reason="the extra `server` is not installed; it needs Python 3.11")
from tests.support.team_server import PASSWORD, client, new_team, token_of


@pytest.fixture(autouse=True)
def _quiet():
    logging.getLogger("django.request").setLevel(logging.CRITICAL)  # refusals are what these tests ask for


def sign_in(email, password=PASSWORD, sender=None):
    sender = sender or client()
    return sender, sender.post("/account/login/", {"login": email, "password": password})


def test_the_set_up_link_makes_one_account_once_and_lives_for_15_minutes(monkeypatch):
    from django.db import transaction
    from django.utils import timezone

    from memscale.server import invitations
    from memscale.server.models import Invitation, Membership, Role, Team, User

    form = {"email": "A@Example.org", "password": PASSWORD, "again": PASSWORD, "team": "First", "slug": "first"}
    with transaction.atomic():  # as on a server without an account
        User.objects.all().delete()
        Team.objects.all().delete()
        secret = invitations.set_up_secret()
        assert secret not in str(list(Invitation.objects.values_list()))  # only its hash is kept
        address = f"/setup/{secret}"
        for bad in ({"password": "short"}, {"again": "other"}, {"slug": "Not a slug"}, {"email": "none"}):
            assert client().post(address, {**form, **bad}).status_code == 200
        late = timezone.now() + timedelta(minutes=15, seconds=1)
        monkeypatch.setattr(timezone, "now", lambda: late)
        assert client().get(address).status_code == 404
        monkeypatch.undo()
        browser = client()
        assert browser.post(address, form)["Location"] == "/t/first/"
        assert browser.get("/t/first/").status_code == 200
        membership = Membership.objects.get(team__slug="first")
        assert (membership.user.email, membership.role) == ("a@example.org", Role.owner)
        assert client().post(address, form).status_code == 404
        assert invitations.set_up_secret() is None  # there is an account
        transaction.set_rollback(True)


def test_a_password_is_hashed_and_a_wrong_one_signs_nobody_in():
    _, _, users = new_team(owner="owner")
    user = users["owner"]
    assert PASSWORD not in user.password
    browser, answer = sign_in(user.email, "wrong horse 9")
    assert (answer.status_code, browser.get("/").status_code) == (200, 302)
    browser, answer = sign_in(user.email.upper())
    assert answer["Location"] == "/"


def test_guessing_passwords_is_stopped():
    from django.core.cache import cache
    from django.test import override_settings

    _, _, users = new_team(owner="owner")
    cache.clear()
    with override_settings(ACCOUNT_RATE_LIMITS={}):
        answers = [sign_in(users["owner"].email, f"wrong {number}")[1] for number in range(12)]
        assert "Too many failed login attempts" in answers[-1].content.decode() or answers[-1].status_code == 429
        assert sign_in(users["owner"].email)[1].status_code != 302  # the right one, too, for a while
    cache.clear()


def test_a_second_factor_is_asked_for_and_a_link_for_a_new_password_does_not_go_around_it():
    from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret

    from memscale.server import invitations
    from memscale.server.models import Role

    team, _, users = new_team(owner="owner")
    TOTP.activate(users["owner"], generate_totp_secret())
    browser, answer = sign_in(users["owner"].email)
    assert answer["Location"].startswith("/account/2fa/authenticate/")
    assert browser.get(f"/t/{team.slug}/")["Location"].startswith("/account/login/")
    secret = invitations.invite_to(team, users["owner"].email, Role.owner, None)
    browser = client()
    answer = browser.post(f"/join/{secret}", {"password": "another horse 9", "again": "another horse 9"})
    assert answer["Location"].startswith("/account/2fa/authenticate/")
    assert browser.get(f"/t/{team.slug}/").status_code == 302


def test_an_invitation_makes_a_member_once():
    from memscale.server.models import Membership, Role

    team, _, users = new_team(owner="owner")
    owner = client(users["owner"])
    email = f"new-{team.slug}@example.org"
    page = owner.post(f"/t/{team.slug}/-/invite", {"email": email, "role": int(Role.member)}).content.decode()
    address = re.search(r"/join/[\w-]+", page)[0]
    browser = client()
    assert email in browser.get(address).content.decode()
    assert browser.post(address, {"password": PASSWORD, "again": PASSWORD})["Location"] == f"/t/{team.slug}/"
    assert browser.get(f"/t/{team.slug}/").status_code == 200
    assert Membership.objects.get(team=team, user__email=email).role == Role.member
    assert client().get(address).status_code == 404


def test_an_owners_invitation_does_not_take_over_an_account_of_another_team():
    from memscale.server import invitations
    from memscale.server.models import Role

    team, _, users = new_team(owner="owner")
    _, _, others = new_team(owner="owner")
    victim = others["owner"]
    secret = invitations.invite_to(team, victim.email, Role.member, users["owner"])
    for browser in (client(), client(users["owner"])):
        answer = browser.post(f"/join/{secret}", {"password": "stolen horse 9", "again": "stolen horse 9"})
        assert "Sign in with it" in answer.content.decode()
    victim.refresh_from_db()
    assert victim.check_password(PASSWORD)
    assert not victim.memberships.filter(team=team).exists()
    assert client(victim).post(f"/join/{secret}").status_code == 302
    assert victim.memberships.filter(team=team).exists()


def test_a_role_that_changes_changes_the_open_tab_and_the_tokens():
    from memscale.server.models import Membership, Role

    team, _, users = new_team(owner="owner", member="member")
    browser, program = client(users["member"]), client(token=token_of(users["member"], team))
    url = f"/api/v1/teams/{team.slug}/projects/llama/runs"
    membership = Membership.objects.get(team=team, user=users["member"])
    owner = client(users["owner"])

    def change(role):
        data = {f"m{membership.pk}-role": int(role)}
        return owner.post(f"/t/{team.slug}/-/members/{membership.pk}", data).status_code

    assert change(Role.viewer) == 302
    assert program.post(url, "{}", content_type="application/json").status_code == 403
    assert browser.get(f"/t/{team.slug}/").status_code == program.get(url).status_code == 200
    assert change(0) == 302
    assert browser.get(f"/t/{team.slug}/").status_code == program.get(url).status_code == 404


def test_a_team_keeps_an_owner():
    from memscale.server.models import Membership

    team, _, users = new_team(owner="owner")
    membership = Membership.objects.get(team=team)
    answer = client(users["owner"]).post(f"/t/{team.slug}/-/members/{membership.pk}", {f"m{membership.pk}-role": 0})
    assert (answer.status_code, Membership.objects.filter(team=team).count()) == (409, 1)


def test_a_session_is_ended_from_another_browser_and_by_a_new_password():
    _, _, users = new_team(owner="owner")
    lost, own = (sign_in(users["owner"].email)[0] for _ in range(2))
    assert lost.get("/account/sessions/").status_code == 200
    own.post("/account/sessions/")  # all but this one
    assert (lost.get("/account/sessions/").status_code, own.get("/account/sessions/").status_code) == (302, 200)
    lost = sign_in(users["owner"].email)[0]
    users["owner"].set_password("another horse 9")
    users["owner"].save()
    assert lost.get("/account/sessions/").status_code == 302


def test_what_changes_rights_asks_for_the_password_again():
    from memscale.server.middleware import PASSWORD_CHOSEN_AT

    team, _, users = new_team(owner="owner")
    browser = client(users["owner"])
    session = browser.session
    session[PASSWORD_CHOSEN_AT] = time.time() - 3600
    session.save()
    for page in ("invite", "tokens"):
        answer = browser.get(f"/t/{team.slug}/-/{page}")
        assert answer["Location"] == f"/account/reauthenticate/?next=/t/{team.slug}/-/{page}"
    answer = browser.post(answer["Location"], {"password": PASSWORD, "next": f"/t/{team.slug}/-/tokens"})
    assert answer["Location"] == f"/t/{team.slug}/-/tokens"
    assert browser.get(f"/t/{team.slug}/-/tokens").status_code == 200


def test_who_was_let_in_and_what_for_is_in_the_audit():
    team, _, users = new_team(owner="owner")
    owner = client(users["owner"])
    owner.post(f"/t/{team.slug}/-/invite", {"email": "x@example.org", "role": 10})
    owner.post(f"/t/{team.slug}/-/tokens", {"name": "ci", "scope": "read", "days": 1})
    owner.post(f"/t/{team.slug}/-/project", {"name": "P", "slug": "p"})
    page = owner.get(f"/t/{team.slug}/-/audit").content.decode()
    assert all(text in page for text in ("invited", "x@example.org: viewer", "token made", "ci: read", "project made"))


def test_a_token_is_shown_once_and_kept_as_a_hash():
    from memscale.server.models import Token

    team, _, users = new_team(owner="owner")
    owner = client(users["owner"])
    page = owner.post(f"/t/{team.slug}/-/tokens", {"name": "ci", "scope": "read", "days": 1}).content.decode()
    secret = re.search(r"msc_[\w-]{43}", page)[0]
    assert secret not in owner.get(f"/t/{team.slug}/-/tokens").content.decode()
    assert secret not in str(list(Token.objects.filter(team=team).values_list()))
    assert client(token=secret).get(f"/api/v1/teams/{team.slug}/projects").status_code == 200


def test_a_form_that_another_site_sends_is_refused():
    team, _, users = new_team(owner="owner")
    browser = client(users["owner"], enforce_csrf_checks=True)
    address, data = f"/t/{team.slug}/-/project", {"name": "P", "slug": "p"}
    assert browser.post(address, data).status_code == 403
    token = re.search(r'csrfmiddlewaretoken" value="([^"]+)', browser.get(address).content.decode())[1]
    forged = {**data, "csrfmiddlewaretoken": token}
    for origin in ("http://127.0.0.1:9999", "https://evil.example", "null"):
        assert browser.post(address, forged, headers={"origin": origin}).status_code == 403
    assert browser.post(address, forged, headers={"origin": "http://127.0.0.1"}).status_code == 302


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "a b"])
def test_a_host_that_is_not_this_servers_is_refused_before_anything_else(host):
    _, _, users = new_team(owner="owner")
    for address in ("/", "/healthz", "/api/v1/openapi.json", "/account/login/", "/static/server.css"):
        assert client(users["owner"]).get(address, headers={"host": host}).status_code == 400


def test_no_other_origin_is_let_in_and_no_page_is_framed_or_cached_for_others():
    team, _, users = new_team(owner="owner")
    program = client(token=token_of(users["owner"], team))
    for answer in (
        client(users["owner"]).get(f"/t/{team.slug}/", headers={"origin": "https://evil.example"}),
        program.get(f"/api/v1/teams/{team.slug}/projects", headers={"origin": "https://evil.example"}),
        program.options(f"/api/v1/teams/{team.slug}/projects", headers={"origin": "https://evil.example"}),
    ):
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        assert answer["X-Frame-Options"] == "DENY"
        assert answer["X-Content-Type-Options"] == "nosniff"
        assert "private" in answer["Cache-Control"] or "no-store" in answer["Cache-Control"]


def test_a_link_to_go_on_to_after_signing_in_stays_on_this_server():
    _, _, users = new_team(owner="owner")
    answer = client().post(
        "/account/login/?next=https://evil.example/", {"login": users["owner"].email, "password": PASSWORD}
    )
    assert answer["Location"] == "/"
