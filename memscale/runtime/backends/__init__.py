"""The machines an engine runs on."""

from memscale.runtime.backends.protocol import Backend, Buffer, Event, Stream
from memscale.runtime.backends.trace import TraceBackend

__all__ = [
    "Backend",
    "Buffer",
    "Event",
    "Stream",
    "TraceBackend",
]
