"""Errors of the API as problem documents (RFC 9457): the value, the rule and the remedy."""

from __future__ import annotations

import json

from django.http import HttpResponse


class Problem(Exception):
    """An error answer of the API."""

    def __init__(self, status: int, value: str, rule: str, remedy: str) -> None:
        super().__init__(f"{value}; {rule}; {remedy}")
        self.status, self.value, self.rule, self.remedy = status, value, rule, remedy

    def response(self) -> HttpResponse:
        """Returns the answer as ``application/problem+json``."""
        text = json.dumps(
            {"status": self.status, "title": self.value, "value": self.value, "rule": self.rule, "remedy": self.remedy}
        )
        response = HttpResponse(text, status=self.status, content_type="application/problem+json")
        if self.status == 401:
            response["WWW-Authenticate"] = 'Bearer realm="memscale"'
        if self.status == 503:
            response["Retry-After"] = "30"
        return response
