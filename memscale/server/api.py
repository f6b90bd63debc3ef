"""The API, version 1. `TokenAuth` checks the operation's row in `access.RULES` before the operation runs.

A row is identified by the method and the `url_name`; all operations of one path share a `url_name`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Annotated, Any

from django.db import transaction
from django.db.utils import DataError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.utils import timezone
from ninja import NinjaAPI, Schema, Status
from ninja.errors import AuthenticationError, HttpError, ValidationError
from ninja.parser import Parser
from pydantic import Field

from memscale.server.access import Access
from memscale.server.listing import Listing
from memscale.server.middleware import problem_of
from memscale.server.models import Baseline, Run
from memscale.server.problems import Problem
from memscale.server.schema import Closed, Line, RunDocument, document_of, keep
from memscale.server.tokens import TokenAuth

_MOST_DEEP = 32


class _Strict(Parser):
    """Parses JSON of at most `_MOST_DEEP` levels, without NaN and without duplicate keys."""

    def parse_body(self, request: HttpRequest) -> Any:
        try:
            data = json.loads(request.body, parse_constant=_refused, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise Problem(400, f"the body is not JSON: {error}", "a body is one JSON document", "mend it") from error
        level, deep = [data], 0
        while level:
            deep += 1
            if deep > _MOST_DEEP:
                raise Problem(400, "the JSON is too deep", f"at most {_MOST_DEEP} levels", "send a flatter document")
            level = [
                item
                for each in level
                if isinstance(each, (dict, list))
                for item in (each.values() if isinstance(each, dict) else each)
            ]
        return data


def _refused(name: str) -> Any:
    raise ValueError(f"JSON has no number {name}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return found


class ProblemSchema(Schema):
    """An error: the value, the rule that it breaks, and the remedy."""

    status: int
    title: str
    value: str
    rule: str
    remedy: str


class ProjectSchema(Schema):
    """A project of the team."""

    slug: str
    name: str


class NewProject(Closed):
    """A project to create."""

    slug: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]
    name: Annotated[Line, Field(max_length=80)]


class RunSummary(Schema):
    """A run in a list."""

    uid: str
    name: str
    card: str
    model: str
    commit: str
    made: datetime
    taken_bytes: int
    measured_bytes: int | None
    step_seconds: float | None
    fits: bool
    plan: str | None

    @staticmethod
    def resolve_plan(run: Run) -> str | None:
        """Returns the hash of the run's plan."""
        return run.plan.hash if run.plan else None


class RunPage(Schema):
    """One page of runs; `next` is the address of the next page."""

    runs: list[RunSummary]
    next: str | None


class StoredRun(Schema):
    """The answer to a run: its id, and whether it is new."""

    id: str
    new: bool


class BaselineSchema(Schema):
    """The run against which later runs of the same name and card are compared."""

    label: str
    name: str
    card: str
    run: str


class NewBaseline(Closed):
    """The id of the run to make the baseline of its name and card."""

    run: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class MemberSchema(Schema):
    """A member of the team."""

    email: str
    role: str


class TokenSchema(Schema):
    """A token, without its text."""

    id: int
    name: str
    scope: str
    owner: str
    expires: str
    revoked: bool


api = NinjaAPI(
    title="memscale",
    version="1",
    auth=TokenAuth(),
    parser=_Strict(),
    docs_url=None,
    openapi_extra={"info": {"license": {"name": "Apache-2.0"}}},
)
_P = dict.fromkeys((400, 401, 403, 404, 405, 409, 413, 422, 503), ProblemSchema)
_TEAM = "/teams/{team}"
_PROJECT = _TEAM + "/projects/{project}"


@api.get(_TEAM + "/projects", url_name="projects", response={200: list[ProjectSchema], **_P})
def list_projects(request: HttpRequest, team: str) -> Any:
    """Returns the team's projects."""
    return list(request.auth.projects.order_by("slug"))


@api.post(_TEAM + "/projects", url_name="projects", response={201: ProjectSchema, **_P})
def make_project(request: HttpRequest, team: str, new: NewProject) -> Any:
    """Creates a project."""
    project = request.auth.made_project(new.slug, new.name)
    if project is None:
        raise Problem(409, f"there is a project {new.slug!r}", "a team's projects differ by slug", "choose another")
    return Status(201, project)


@api.get(_PROJECT + "/runs", url_name="runs", response={200: RunPage, **_P})
def list_runs(
    request: HttpRequest,
    team: str,
    project: str,
    name: str = "",
    card: str = "",
    commit: str = "",
    model: str = "",
    sort: str = "made",
    after: str = "",
) -> Any:
    """Returns runs, fifty per page; `name`, `card`, `commit` and `model` filter, `sort` is ``made`` or ``peak``."""
    filters = {"name": name, "card": card, "commit": commit, "model": model}
    page = Listing(request.auth.runs.filter(project=request.auth.project(project)), filters, sort, after)
    return {"runs": page.runs, "next": f"{request.path}?{page.next}" if page.next else None}


@api.post(_PROJECT + "/runs", url_name="runs", response={200: StoredRun, 201: StoredRun, **_P})
def send_run(request: HttpRequest, team: str, project: str, run: RunDocument) -> Any:
    """Stores a run: 201 for a new one, 200 for a known one. Sending an id twice stores one run."""
    new = keep(request.auth, request.auth.project(project), run)
    return Status(201 if new else 200, {"id": run.id, "new": new})


@api.get(_PROJECT + "/runs/{uid}", url_name="run", response={200: dict[str, Any], **_P})
def read_run(request: HttpRequest, team: str, project: str, uid: str) -> Any:
    """Returns a run as it was sent, with later measurements."""
    return document_of(request.auth.run(project, uid))


@api.get(_TEAM + "/plans/{hash}", url_name="plan", response={200: dict[str, Any], **_P})
def read_plan(request: HttpRequest, team: str, hash: str) -> Any:
    """Returns a plan by its hash or the first eight or more digits of it; a plan never changes, and has an ETag."""
    found = list(request.auth.plans.filter(hash__startswith=hash)[:2]) if len(hash) >= 8 else []
    if len(found) != 1:
        many = "several plans begin" if found else "no plan begins"
        raise Problem(404, f"{many} with {hash!r}", "a plan is named by eight digits or more", "see the plans' page")
    etag = f'"{found[0].hash}"'
    if request.headers.get("If-None-Match") == etag:
        return HttpResponse(status=304, headers={"ETag": etag})
    text = json.dumps({"hash": found[0].hash, "plan": {"memscale_plan": 1, "rules": json.loads(found[0].document)}})
    return HttpResponse(text, content_type="application/json", headers={"ETag": etag})


@api.get(_PROJECT + "/baselines/{label}", url_name="baselines", response={200: list[BaselineSchema], **_P})
def list_baselines(request: HttpRequest, team: str, project: str, label: str, name: str = "", card: str = "") -> Any:
    """Returns the baselines under a label, filtered by name and card if given."""
    found = request.auth.baselines.filter(project=request.auth.project(project), label=label).order_by("name", "card")
    given = {key: value for key, value in (("name", name), ("card", card)) if value}
    return [_baseline(each) for each in found.filter(**given)[:500]]


@api.put(_PROJECT + "/baselines/{label}", url_name="baselines", response={200: BaselineSchema, **_P})
def set_baseline(request: HttpRequest, team: str, project: str, label: str, new: NewBaseline) -> Any:
    """Makes a run the baseline of its name and card."""
    run = request.auth.run(project, new.run)
    return _baseline(make_baseline(request.auth, run, label))


def _baseline(baseline: Baseline) -> dict[str, str]:
    return {"label": baseline.label, "name": baseline.name, "card": baseline.card, "run": baseline.run.uid}


@api.get(_TEAM + "/members", url_name="members", response={200: list[MemberSchema], **_P})
def list_members(request: HttpRequest, team: str) -> Any:
    """Returns the members of the team."""
    return [{"email": each.user.email, "role": each.get_role_display()} for each in request.auth.memberships]


@api.get(_TEAM + "/tokens", url_name="tokens", response={200: list[TokenSchema], **_P})
def list_tokens(request: HttpRequest, team: str) -> Any:
    """Returns your tokens, or for an owner the team's, without their texts; tokens are made on the team's page."""
    return [
        {
            **{name: getattr(each, name) for name in ("id", "name", "scope")},
            "owner": each.user.email,
            "expires": each.expires.isoformat(),
            "revoked": each.revoked is not None,
        }
        for each in request.auth.tokens.order_by("id")
    ]


@api.delete(_TEAM + "/tokens/{int:token}", url_name="token", response={204: None, **_P})
def revoke_token(request: HttpRequest, team: str, token: int) -> Any:
    """Revokes a token permanently."""
    revoke(request.auth, token)
    return Status(204, None)


def make_baseline(access: Access, run: Run, label: str) -> Baseline:
    """Makes `run` the baseline for later runs of the same name and card.

    Raises:
        Problem: 422 for a label that is empty or too long.
    """
    if not label.strip() or len(label) > 80 or not label.isprintable():
        raise Problem(422, f"the label is {label!r}", "a label has 1 to 80 printable characters", "write main")
    with transaction.atomic():
        baseline, _ = Baseline.objects.update_or_create(
            project=run.project, label=label, name=run.name, card=run.card, defaults={"run": run}
        )
        access.noted("baseline set", f"{run.project.slug}#{label}: {run.uid}, {run.name}")
    made: Baseline = baseline
    return made


def revoke(access: Access, token: int) -> None:
    """Revokes a token that `access` can see.

    Raises:
        Http404: there is no such token.
    """
    with transaction.atomic():
        found = access.tokens.filter(pk=token).first() if token < 1 << 62 else None
        if found is None:
            raise Http404
        if found.revoked is None:
            found.revoked = timezone.now()
            found.save(update_fields=["revoked"])
            access.noted("token revoked", f"{found.name} of {found.user.email}")


def _answered(request: HttpRequest, error: Exception) -> HttpResponse:
    if isinstance(error, Http404):
        error = Problem(404, "no such object", "a token sees the objects of its team", "check the address")
    elif isinstance(error, AuthenticationError):
        error = Problem(401, "there is no token", "a request needs one", "send Authorization: Bearer <token>")
    elif isinstance(error, ValidationError):
        first = error.errors[0]
        where = ".".join(str(part) for part in first["loc"][2:])
        value = f"{where or 'the request'}: {first['msg']}"
        error = Problem(422, value[:500], "the schema is closed", "see openapi.json")
    elif isinstance(error, HttpError):
        error = Problem(error.status_code, str(error), "the request cannot be read", "see openapi.json")
    problem = problem_of(error)
    assert problem is not None, "each kind that is registered below is one"
    return problem.response()


for _kind in (Problem, Http404, AuthenticationError, ValidationError, HttpError, DataError, OperationalError):
    api.add_exception_handler(_kind, _answered)
