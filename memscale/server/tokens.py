"""API tokens: shown once and stored as a hash; a request has the lesser of the token's and the role's rights."""

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
    """Returns the hash that is stored for a secret. Secrets have 256 random bits, so a fast hash is safe."""
    return hashlib.sha256(secret.encode()).hexdigest()


def new_token(access: Access, name: str, scope: str, days: int) -> str:
    """Creates a token of the user for the team, and returns its text, which is not stored."""
    secret = PREFIX + secrets.token_urlsafe(32)
    expires = timezone.now() + timedelta(days=days)
    Token.objects.create(
        team=access.team, user=access.user, name=name, hash=hashed(secret), scope=scope, expires=expires
    )
    access.noted("token made", f"{name}: {scope}, for {days} days")
    return secret


class TokenAuth(HttpBearer):
    """The API's authentication: a valid token with the rights in the route's row of `RULES`."""

    def authenticate(self, request: HttpRequest, token: str) -> Access:
        """Returns the access that the token gives.

        Raises:
            Problem: 401 if the token is unknown, expired or revoked; 403 if its scope or its user's role is too low;
                404 for a route without a row and for another team's URL.
        """
        rule = RULES.get(route_of(request))
        if rule is None or rule.who != "token":
            raise Problem(404, "no such route", "the API has a fixed list of routes", "see /api/v1/openapi.json")
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
    """Returns the key in `RULES` for a request: a page's name, or the method and the name of an API path."""
    match = request.resolver_match
    return f"{request.method} {match.view_name}" if match.namespace == "api-1" else str(match.view_name)
