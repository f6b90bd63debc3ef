"""The views; each reads data through `request.access`, which `middleware.Gate` sets after checking `access.RULES`."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from allauth.account.utils import perform_login
from django.db import connection, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.utils.safestring import mark_safe
from django.views.decorators.http import require_GET, require_http_methods, require_POST
from django.views.defaults import server_error

from memscale.reports import commits_chart
from memscale.server import api, forms, invitations, pages
from memscale.server.access import Access
from memscale.server.listing import SORTS, Listing
from memscale.server.middleware import PASSWORD_CHOSEN_AT, answer_to
from memscale.server.models import Membership, Role, User
from memscale.server.problems import Problem
from memscale.server.schema import document_of
from memscale.server.tokens import new_token

_FILTERS = ("name", "card", "commit", "model")
_form = require_http_methods(["GET", "HEAD", "POST"])


@require_GET
def healthz(request: HttpRequest) -> HttpResponse:
    """Answers if the server and its database work."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    return HttpResponse("ok\n", content_type="text/plain")


@require_GET
def metrics(request: HttpRequest) -> HttpResponse:
    """Counts of the token's team, for Prometheus."""
    access = request.access
    counts = {
        "projects": access.projects.count(),
        "runs": access.runs.count(),
        "plans": access.plans.count(),
        "members": access.memberships.count(),
    }
    lines = [f"# TYPE memscale_{name} gauge\nmemscale_{name} {value}\n" for name, value in counts.items()]
    return HttpResponse("".join(lines), content_type="text/plain; version=0.0.4")


def missing(request: HttpRequest, exception: Exception) -> HttpResponse:
    """The answer to an address that does not exist or that the user may not see."""
    if request.path.startswith("/api/"):
        return Problem(404, "no such route", "the API has a fixed list", "see /api/v1/openapi.json").response()
    return render(request, "404.html", status=404)


def failed(request: HttpRequest) -> HttpResponse:
    """The answer to an error outside of a view, such as a session that a full disk cannot store."""
    return answer_to(request, sys.exc_info()[1]) or server_error(request)


def forged(request: HttpRequest, reason: str = "") -> HttpResponse:
    """The answer to a form that no page of this server has sent."""
    return render(
        request, "403.html", {"why": "The form was not sent from a page of this server; open it again."}, status=403
    )


@_form
def setup(request: HttpRequest, secret: str) -> HttpResponse:
    """Creates the first account and team, by the one-time link."""
    invitation = invitations.found(secret, team=False)
    if invitation is None:
        return render(request, "server/used.html", status=404)
    form = forms.SetUp(request.POST or None)
    if request.method == "POST" and form.is_valid():
        given = form.cleaned_data
        user = invitations.set_up(invitation, given["email"], given["password"], given["team"], given["slug"])
        if user is None:
            return render(request, "server/used.html", status=404)
        return _signed_in(request, user, given["slug"])
    return render(request, "server/form.html", {"form": form, "title": "Set up this server", "button": "Set up"})


@_form
def join(request: HttpRequest, secret: str) -> HttpResponse:
    """Makes the user a member, by an invitation's link."""
    invitation = invitations.found(secret, team=True)
    if invitation is None:
        return render(request, "server/used.html", status=404)
    signed_in = request.user.is_authenticated and request.user.email == invitation.email
    exists = User.objects.filter(email=invitation.email).exists()
    if exists and not signed_in and not invitations.resets_password(invitation):
        return render(request, "server/sign_in_first.html", {"invitation": invitation})
    form = None if signed_in else forms.Passwords(request.POST or None, initial={"email": invitation.email})
    if request.method == "POST" and (form is None or form.is_valid()):
        password = "" if form is None else form.cleaned_data["password"]
        user = invitations.join(invitation, request.user if signed_in else None, password)
        if user is None:
            return render(request, "server/used.html", status=404)
        if not signed_in:
            return _signed_in(request, user, invitation.team.slug)
        return redirect("team", invitation.team.slug)
    title = f"Join {invitation.team.name} as {invitation.email}"
    return render(request, "server/form.html", {"form": form, "title": title, "button": "Join"})


def _signed_in(request: HttpRequest, user: User, team: str) -> HttpResponse:
    """Signs in a user who has just chosen a password; a second factor is still required if the account has one."""
    response: HttpResponse = perform_login(request, user, redirect_url=f"/t/{team}/")
    request.session[PASSWORD_CHOSEN_AT] = time.time()
    return response


@require_GET
def home(request: HttpRequest) -> HttpResponse:
    """Lists the user's teams, or redirects to the only one."""
    memberships = list(request.user.memberships.select_related("team").order_by("team__slug"))
    if len(memberships) == 1:
        return redirect("team", memberships[0].team.slug)
    return render(request, "server/home.html", {"memberships": memberships})


@require_GET
def team(request: HttpRequest, team: str) -> HttpResponse:
    """Shows a team: its projects and members."""
    access = request.access
    projects = [
        (project, project.runs.order_by("-made", "-id").first()) for project in access.projects.order_by("slug")
    ]
    members = [
        (each, forms.ChangeRole(initial={"role": each.role}, prefix=f"m{each.pk}")) for each in access.memberships
    ]
    found = {"projects": projects, "members": members, "owner": access.may(Role.owner)}
    return _page(request, "team", **found, maintainer=access.may(Role.maintainer))


@_form
def new_project(request: HttpRequest, team: str) -> HttpResponse:
    """Creates a project."""
    form = forms.NewProject(request.POST or None)
    if request.method == "POST" and form.is_valid():
        given = form.cleaned_data
        if request.access.made_project(given["slug"], given["name"]) is not None:
            return redirect("runs", team, given["slug"])
        form.add_error("slug", "There is a project of this name.")
    return _page(request, "form", form=form, title="New project", button="Make the project")


@_form
def invite(request: HttpRequest, team: str) -> HttpResponse:
    """Creates an invitation link, which is shown once."""
    form = forms.Invite(request.POST or None)
    link = ""
    if request.method == "POST" and form.is_valid():
        role, email = Role(form.cleaned_data["role"]), form.cleaned_data["email"]
        secret = invitations.invite_to(request.access.team, email, role, request.user)
        link = request.build_absolute_uri(f"/join/{secret}")
    note = "Hand this link to the person yourself: it works once, within three days."
    return _page(request, "form", form=form, title="Invite", button="Make a link", secret=link, note=note)


@require_POST
def member(request: HttpRequest, team: str, member: int) -> HttpResponse:
    """Changes a member's role or removes the member; the team always keeps an owner."""
    with transaction.atomic():
        found = request.access.memberships.select_for_update().filter(pk=member).first()
        form = forms.ChangeRole(request.POST, prefix=f"m{member}")
        if found is None or not form.is_valid():
            raise Http404
        role = form.cleaned_data["role"]
        owners = Membership.objects.filter(team=request.access.team, role=Role.owner).exclude(pk=found.pk)
        if found.role == Role.owner and role != Role.owner and not owners.exists():
            return _page(request, "sorry", why="A team needs an owner; make another member one first.", status=409)
        if role:
            Membership.objects.filter(pk=found.pk).update(role=role)
        else:
            found.delete()
        request.access.noted("role changed", f"{found.user.email}: {Role(role).name if role else 'removed'}")
    return redirect("team", team)


@_form
def tokens(request: HttpRequest, team: str) -> HttpResponse:
    """Lists the tokens, with a form for a new one, whose text is shown once."""
    form, secret = forms.NewToken(request.POST or None), ""
    if request.method == "POST" and form.is_valid():
        secret = new_token(request.access, **form.cleaned_data)
        form = forms.NewToken()
    found = list(request.access.tokens.order_by("-id")[:200])
    return _page(request, "tokens", form=form, secret=secret, tokens=found, now=timezone.now())


@require_POST
def revoke(request: HttpRequest, team: str, token: int) -> HttpResponse:
    """Revokes a token."""
    api.revoke(request.access, token)
    return redirect("tokens", team)


@require_GET
def audit(request: HttpRequest, team: str) -> HttpResponse:
    """Shows the team's audit log."""
    return _page(request, "audit", audits=request.access.audits[:500])


@require_GET
def runs(request: HttpRequest, team: str, project: str) -> HttpResponse:
    """Lists the project's runs."""
    found = request.access.project(project)
    filters = {name: request.GET.get(name, "").strip() for name in _FILTERS}
    sort = request.GET.get("sort", "made")
    listing = Listing(request.access.runs.filter(project=found), filters, sort, request.GET.get("after", ""))
    pair = [uid for uid in request.GET.getlist("with") if uid][:1]
    values = {"project": found, "listing": listing, "filters": filters, "sort": sort, "sorts": SORTS, "pair": pair}
    return _page(request, "runs", **values)


@require_GET
def run(request: HttpRequest, team: str, project: str, uid: str) -> HttpResponse:
    """Shows a run: predicted and measured figures, timeline, notes and plan."""
    found = request.access.run(project, uid)
    document = document_of(found)
    predicted, measured = document["predicted"], document["measured"]
    rows = [
        (name, nbytes, measured.get(f"{name.replace(' ', '_')}_bytes"))
        for name, nbytes in sorted(predicted["by_category"].items(), key=lambda item: -item[1])
    ]
    modules = sorted(pages.by_module(document).items(), key=lambda item: -item[1])
    return _page(
        request,
        "run",
        project=found.project,
        run=found,
        document=document,
        rows=rows,
        modules=modules[:100],
        chart=pages.timeline(document),
        python=pages.plan_as_python(document["plan"]) if document["plan"] is not None else "",
        error=predicted["peak_bytes"] / found.measured_bytes - 1 if found.measured_bytes else None,
        baselines=list(found.baselines.order_by("label")),
        form=forms.NewBaseline() if request.access.may(Role.maintainer) else None,
    )


@require_GET
def compare(request: HttpRequest, team: str, project: str) -> HttpResponse:
    """Compares two runs by category and by module."""
    ids = [uid.strip() for uid in request.GET.getlist("run") if uid.strip()]
    if len(ids) != 2:
        return _page(request, "sorry", why="Choose two runs of the list to compare.", status=400)
    found = [request.access.run(project, uid) for uid in ids]
    documents = [document_of(each) for each in found]
    predicted = [each["predicted"] for each in documents]
    peaks = {
        name: [each[name] for each in predicted]
        for name in ("peak_bytes", "first_step_peak_bytes", "reserved_peak_bytes")
        if None not in (predicted[0][name], predicted[1][name])
    }
    facts = [
        (name, *(each.get(name) for each in documents)) for name in ("name", "model", "shapes", "config", "commit")
    ]
    facts += [("card", *(each.card for each in found)), ("plan", *(each.plan and each.plan.hash for each in found))]
    return _page(
        request,
        "compare",
        project=found[0].project,
        before=found[0],
        after=found[1],
        peaks=[(name, first, second, second - first) for name, (first, second) in peaks.items()],
        categories=pages.differences(*(each["by_category"] for each in predicted)),
        modules=pages.differences(*(pages.by_module(each) for each in documents))[:200],
        facts=[(name, first, second) for name, first, second in facts if first != second],
        simulator=documents[0]["simulator"] != documents[1]["simulator"],
    )


@require_GET
def commits(request: HttpRequest, team: str, project: str) -> HttpResponse:
    """Shows the peak by commit for one name and card."""
    found = request.access.project(project)
    every = request.access.runs.filter(project=found)
    name, card = request.GET.get("name", ""), request.GET.get("card", "")
    if not name or not card:
        newest = every.exclude(commit="").order_by("-made", "-id").first()
        name, card = (newest.name, newest.card) if newest else ("", "")
    rows = pages.commits(every.filter(name=name, card=card)) if name else []
    points = [
        (row["run"].commit[:9], row["run"].taken_bytes, f"/t/{team}/{project}/runs/{row['run'].uid}/") for row in rows
    ]
    chart = mark_safe(commits_chart(points)) if points else ""
    return _page(request, "commits", project=found, name=name, card=card, rows=rows[::-1], chart=chart)


@require_GET
def accuracy(request: HttpRequest, team: str, project: str) -> HttpResponse:
    """Shows the errors of predictions by card."""
    found = request.access.project(project)
    return _page(request, "accuracy", project=found, rows=pages.accuracy(request.access.runs.filter(project=found)))


@require_GET
def plans(request: HttpRequest, team: str) -> HttpResponse:
    """Lists the team's plans with their evidence, for each model, card and budget."""
    return _page(request, "plans", rows=pages.proven(request.access.runs.order_by()))


@require_GET
def plan(request: HttpRequest, team: str, hash: str) -> HttpResponse:
    """Shows a plan as Python, and the runs that used it."""
    found = request.access.plans.filter(hash=hash).first()
    if found is None:
        raise Http404
    rules = json.loads(found.document)
    runs = request.access.runs.filter(plan=found).order_by("-made", "-id")[:50]
    return _page(request, "plan", plan=found, python=pages.plan_as_python(rules), runs=runs)


@require_POST
def baseline(request: HttpRequest, team: str, project: str, uid: str) -> HttpResponse:
    """Makes a run the baseline of its name and card."""
    found = request.access.run(project, uid)
    form = forms.NewBaseline(request.POST)
    if not form.is_valid():
        return _page(request, "sorry", why="A label is one word, such as main.", status=400)
    api.make_baseline(request.access, found, form.cleaned_data["label"])
    return redirect("run", team, project, uid)


def _page(request: HttpRequest, page: str, /, *, status: int = 200, **values: Any) -> HttpResponse:
    access: Access = request.access
    return render(request, f"server/{page}.html", {"access": access, "team": access.team, **values}, status=status)
