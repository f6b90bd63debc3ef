"""API tokens: shown once, kept as a hash; a request's rights are the lesser of the token's and the role's."""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta

from django.http import HttpRequest
from django.utils import timezone
from ninja.security import HttpBearer

from memscale.server.access import RULES, Access, access_of
from memscale.server.models import Token
from memscale.server.problems import Problem

PREFIX = "msc_"
SCOPES = ("read", "write")


def hashed(secret: str) -> str:
    """What is kept of a secret. A secret has 256 random bits, so that no slow hash is needed."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_token(access: Access, name: str, scope: str, days: int) -> str:
    """Make a token of the user for the team; the text is returned here and never again."""
    secret = PREFIX + secrets.token_urlsafe(32)
    expires = timezone.now() + timedelta(days=days)
    Token.objects.create(
        team=access.team, user=access.user, name=name, hash=hashed(secret), scope=scope, expires=expires
    )
    access.noted("token made", f"{name}: {scope}, for {days} days")
    return secret


class TokenAuth(HttpBearer):
    """The router-level check of the API: a valid token, and what the route's row in `RULES` asks for."""

    def authenticate(self, request: HttpRequest, token: str) -> Access:
        """The access that the token gives.

        Raises:
            Problem: 401 for a token that is unknown, expired or revoked; 403 for one whose scope, or whose user's role,
                is too small; 404 for a route without a row and for another team's URL.
        """
        rule = RULES.get(route_of(request))
        if rule is None or rule.who != "token":
            raise Problem(404, "there is nothing here", "the route is not part of the API", "see /api/v1/openapi.json")
        found = Token.objects.select_related("team", "user").filter(hash=hashed(token)).first()
        if found is None or found.revoked is not None or found.expires <= timezone.now():
            state = "unknown" if found is None else "revoked" if found.revoked is not None else "expired"
            raise Problem(401, f"the token is {state}", "a request needs a valid one", "make one on the team's page")
        access = access_of(found.user, found.team.slug, found)
        team = request.resolver_match.kwargs.get("team", found.team.slug)
        if access is None or team != found.team.slug:
            raise Problem(404, f"there is no team {team!r}", "a token sees its own team", "check the address")
        if SCOPES.index(found.scope) < SCOPES.index(rule.scope):
            raise Problem(403, f"the token's scope is {found.scope!r}", f"this needs {rule.scope!r}", "make another")
        if not access.may(rule.role):
            raise Problem(403, f"your role is {access.role.name}", f"this needs {rule.role.name}", "ask an owner")
        return access


def route_of(request: HttpRequest) -> str:
    """The row of `RULES` for a request: a page's name, or the method and the name of an API path."""
    match = request.resolver_match
    return f"{request.method} {match.view_name}" if match.namespace == "api-1" else str(match.view_name)
