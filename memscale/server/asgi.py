"""The ASGI application: Django, behind a limit on the size of requests with or without a Content-Length."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import django
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from memscale.server.problems import Problem

MOST_BYTES = 1 << 20
_Send = Callable[[dict[str, Any]], Awaitable[None]]
_Receive = Callable[[], Awaitable[dict[str, Any]]]


class Limited:
    """Answers 413 to a body above `MOST_BYTES`, before more than that is read."""

    def __init__(self, application: Any) -> None:
        self.application = application

    async def __call__(self, scope: dict[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        parts: list[bytes] = []
        nbytes, more = int(said) if said.isdigit() else 0, True
        while more and nbytes <= MOST_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            parts.append(message.get("body", b""))
            nbytes, more = max(nbytes, sum(map(len, parts))), message.get("more_body", False)
        if nbytes > MOST_BYTES:
            await _refuse(send)
            return
        whole: list[dict[str, Any]] = [{"type": "http.request", "body": b"".join(parts), "more_body": False}]

        async def received() -> dict[str, Any]:
            return whole.pop() if whole else await receive()

        await self.application(scope, received, send)


async def _refuse(send: _Send) -> None:
    rule = f"a body has at most {MOST_BYTES:,} bytes"
    answer = Problem(413, "the request is too large", rule, "send less at once").response()
    headers = [(b"content-type", b"application/problem+json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": answer.content})


class OneThread(ASGIHandler):  # type: ignore[misc]
    """Django's handler, with all middleware and the view of a request in one call on one thread.

    Django's own handler returns to the event loop between middleware and view, which took a third of a request's time.
    """

    def load_middleware(self, is_async: bool = False) -> None:
        """Builds the chain of middleware as under WSGI."""
        super().load_middleware(is_async=False)

    async def get_response_async(self, request: HttpRequest) -> HttpResponseBase:
        """Returns the response of that chain, computed in the request's thread."""
        return await sync_to_async(self.get_response)(request)


django.setup(set_prefix=False)
application = Limited(OneThread())
