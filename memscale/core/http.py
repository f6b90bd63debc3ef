"""`http_request`: opens all connections of memscale as a client, each on request of the user."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from memscale.core.errors import RuntimeUnavailable

#: A regular expression for the sites that bytes may be sent to: encrypted, or on this machine. ASCII, in any case.
SITE = r"(?:https://(?:[\w.-]+|\[[\da-f:]+\])|http://(?:localhost|127\.0\.0\.1|\[::1\]))(?::[1-9]\d{0,4})?"
_MOST_ANSWER_BYTES = 2 << 20


def http_request(
    method: str, url: str, headers: Mapping[str, str], body: bytes | None = None, *, seconds: float
) -> tuple[int, bytes]:
    """Sends JSON to a server and returns the status and the body of the answer.

    Follows no redirect and uses no proxy, so that the bytes reach no other host.

    Args:
        method: the HTTP method.
        url: the address; ``https://`` is verified by the system's certificates.
        headers: headers besides those of JSON.
        body: the bytes to send, or None.
        seconds: the limit for the whole request: name lookup, connection, sending and the answer.

    Raises:
        RuntimeUnavailable: the server cannot be reached, or gives no answer of HTTP in time.
    """
    import http.client  # imported late: most programs send nothing

    scheme, host, path, query, _ = urlsplit(url)
    done: queue.SimpleQueue[tuple[int, bytes] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
        target = f"{path or '/'}{'?' * bool(query)}{query}"
        sent = {"Content-Type": "application/json", **headers, "User-Agent": "memscale"}
        try:
            with contextlib.closing(kind(host, timeout=seconds)) as connection:
                connection.request(method, target, body, sent)
                answer = connection.getresponse()
                done.put((answer.status, answer.read(_MOST_ANSWER_BYTES)))
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:  # the last: a port above 65535
            done.put(error)

    # A daemon thread, since a name lookup has no timeout, and a server may send an answer byte by byte.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = done.get(timeout=seconds)
    except queue.Empty:
        answer = TimeoutError(f"no answer in {seconds:g} s")
    if isinstance(answer, Exception):
        raise RuntimeUnavailable(
            f"{scheme}://{host} cannot be reached: {str(answer) or repr(answer)}; check the address and the server"
        ) from answer
    return answer
