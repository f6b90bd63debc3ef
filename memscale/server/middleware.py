"""The access check in front of every view, and the answers to failures."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any

from allauth.account.authentication import get_authentication_records
from django.conf import settings
from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.utils import DataError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render

from memscale.server.access import RULES, Rule, access_of
from memscale.server.problems import Problem
from memscale.server.tokens import TokenAuth, route_of

#: The session key for the time at which the user chose a new password instead of entering one.
PASSWORD_CHOSEN_AT = "memscale_password_chosen_at"
_Next = Callable[[HttpRequest], HttpResponse]


class Failures:
    """Answers 503 if the database has no room or no time, and checks the host of each request."""

    def __init__(self, get_response: _Next) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request.get_host()  # rejects names of other servers, against DNS rebinding
        if "\0" in request.path or "%00" in request.META.get("QUERY_STRING", ""):
            raise BadRequest("a NUL in the address")
        return self.get_response(request)

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Returns the answer to an error of a view, or None to leave it to Django."""
        return answer_to(request, error)


def answer_to(request: HttpRequest, error: BaseException | None) -> HttpResponse | None:
    """Returns a problem document for programs or a page for people; None for an error that is a bug here."""
    problem = problem_of(error)
    if problem is None:
        return None
    if request.path.startswith("/api/") or request.path == "/metrics":
        return problem.response()
    return render(request, "server/problem.html", {"problem": problem}, status=problem.status)


def problem_of(error: BaseException | None) -> Problem | None:
    """Returns what an exception means to a client; None for an error that is a bug here."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, DataError):
        return Problem(400, "a value does not fit its column", "numbers and texts have limits", "see openapi.json")
    if isinstance(error, (OperationalError, sqlite3.OperationalError)):
        rule = "nothing was changed, and nothing that was acknowledged is lost"
        return Problem(503, f"the database cannot be written or read now ({error})", rule, "send it again later")
    return None


class Gate:
    """Lets a request through to its view if the view's row in `RULES` allows it; no row, no access."""

    def __init__(self, get_response: _Next) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        if not request.path.startswith("/static/"):
            response.setdefault("Cache-Control", "private, no-cache")
        return response

    def process_view(
        self, request: HttpRequest, view: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> HttpResponse | None:
        """Returns None to continue with the view, or the answer."""
        try:
            return self._passed(request, kwargs)
        except (Problem, DataError, OperationalError) as error:
            return answer_to(request, error)

    def _passed(self, request: HttpRequest, kwargs: dict[str, Any]) -> HttpResponse | None:
        rule = RULES.get(route_of(request))
        if rule is None:
            raise Http404
        if rule.who == "token" and request.resolver_match.namespace != "api-1":  # the API checks its own
            access = TokenAuth()(request)
            if access is None:
                raise Problem(401, "there is no token", "this page needs a token", "send Authorization: Bearer <token>")
            request.access = access
        if rule.who in ("anyone", "token"):
            return None
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        return self._in_team(request, rule, kwargs) if rule.who == "member" else None

    def _in_team(self, request: HttpRequest, rule: Rule, kwargs: dict[str, Any]) -> HttpResponse | None:
        access = access_of(request.user, kwargs["team"])
        if access is None:
            raise Http404
        if not access.may(rule.role):
            raise PermissionDenied
        if rule.fresh and not _is_fresh(request):
            back = request.path if request.method == "GET" else f"/t/{access.team.slug}/"
            return redirect_to_login(back, "/account/reauthenticate/")
        request.access = access
        return None


def _is_fresh(request: HttpRequest) -> bool:
    given = [record["at"] for record in get_authentication_records(request, request.user)]
    newest = max(*given, request.session.get(PASSWORD_CHOSEN_AT, 0.0), 0.0)
    return time.time() - newest < settings.ACCOUNT_REAUTHENTICATION_TIMEOUT
