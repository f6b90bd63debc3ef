"""`serve`: serves the metrics of a process over HTTP, in the format of Prometheus. Off unless a config has a port."""

from __future__ import annotations

import logging
import os
import weakref
from typing import Any

from memscale.core import package
from memscale.observability.metrics import Metrics
from memscale.observability.ranks import local_rank

_LOG = logging.getLogger("memscale")
_OPEN: weakref.WeakSet[Server] = weakref.WeakSet()
_watching_forks: list[bool] = []


class Server:
    """An HTTP server in a thread of its own.

    Attributes:
        url: the address of the metrics.
        metrics: the metrics that it serves.
    """

    def __init__(self, server: Any, thread: Any, url: str, metrics: Metrics) -> None:
        self._server = server
        self._thread = thread
        self.url = url
        self.metrics = metrics

    def close(self) -> None:
        """Stops the server and frees the port. Further calls have no effect."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()

    def close_inherited_socket(self) -> None:
        """Closes the socket in a forked process, since the port belongs to the parent."""
        server, self._server = self._server, None
        if server is not None:
            server.socket.close()


def check_can_serve() -> None:
    """Checks that `serve` can work.

    Raises:
        RuntimeUnavailable: prometheus-client is not installed.
    """
    package("prometheus_client", "Config(observability_port=...)", "metrics")


def serve(metrics: Metrics, port: int | str) -> Server | None:
    """Serves `metrics` and returns the server. If the port is taken, warns and returns `None`.

    Args:
        metrics: the metrics to serve.
        port: a port on 127.0.0.1, or ``"address:port"``. Process i of a machine uses port + i; 0 is any free port.

    Raises:
        RuntimeUnavailable: prometheus-client is not installed.
    """
    check_can_serve()
    from prometheus_client import CollectorRegistry, start_http_server

    address, number = ("127.0.0.1", port) if isinstance(port, int) else _parts(port)
    if number:
        number += local_rank()
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(number, addr=address, registry=registry)
    except (OSError, OverflowError) as error:
        _LOG.warning(
            "observability_port: %s:%s cannot be listened on (%s); training goes on without figures. "
            "Give another port, or 0 for any free one",
            address,
            number,
            error,
        )
        return None
    host = f"[{address}]" if ":" in address else address
    found = Server(server, thread, f"http://{host}:{server.server_port}/metrics", metrics)
    _OPEN.add(found)
    if not _watching_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_inherited_sockets)
        _watching_forks.append(True)
    return found


def _close_inherited_sockets() -> None:
    for server in list(_OPEN):
        server.close_inherited_socket()


def _parts(port: str) -> tuple[str, int]:
    address, _, number = port.rpartition(":")
    return address.strip("[]"), int(number)
